"""Linear layers whose backward pass gives a `Matrix` token factors instead of making a gradient.

`nn.Linear` keeps its weight as [outputs, inputs], transformers' `Conv1D` as [inputs, outputs].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ondevice.methods.lsp.matrix import Matrix


def is_linear(module: nn.Module) -> bool:
    """Return True for a module that `attach` knows.

    A subclass may compute something else, or lend its weight to another module's forward pass, as
    the output of `nn.MultiheadAttention` does."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def attach(module: nn.Module, matrix: Matrix) -> None:
    """Let the weight's gradient go to `matrix`; the bias keeps its own. `detach` undoes it."""
    weight: Any = module.weight
    weight.requires_grad_(False)
    module.forward = partial(_forward, module, matrix, isinstance(module, nn.Linear))


def detach(module: nn.Module) -> None:
    """Give a module its own forward pass back."""
    module.__dict__.pop("forward", None)


def _forward(module: Any, matrix: Matrix, rows_first: bool, x: Tensor) -> Tensor:
    weight = module.weight.detach()
    if not torch.is_grad_enabled():
        return linear(x, weight if rows_first else weight.T, module.bias)
    handle = torch.empty(
        0, requires_grad=True
    )  # the backward pass comes here even if neither x nor the bias needs it
    return _Projected.apply(x, module.bias, weight, matrix, rows_first, handle)  # pyright: ignore[reportReturnType]


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        matrix: Matrix,
        rows_first: bool,
        handle: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.matrix = matrix
        ctx.rows_first = rows_first
        return linear(x, weight if rows_first else weight.T, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        weight = ctx.weight
        (x,) = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            back = gradient @ (weight if ctx.rows_first else weight.T)
        else:
            back = None
        flat = gradient.reshape(-1, gradient.shape[-1])
        tokens = x.reshape(-1, x.shape[-1])
        ctx.matrix.collect(*((flat, tokens) if ctx.rows_first else (tokens, flat)))
        bias = None
        if ctx.needs_input_grad[1]:
            bias = flat.sum(0)
        return back, bias, None, None, None, None
