"""A mixture of experts whose forward and backward pass give the same bits every time.

Tokens are sorted by expert, go through one grouped matrix product, and come back by the inverse
permutation. Nothing is accumulated by atomic additions: the gradient of a gather is the inverse
gather and a sum over each token's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

GROUPED_CAPABILITY = (8, 0)
"""CUDA devices from here on have torch's grouped matrix product."""
_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)  # torch 2.10 and later


def mixture(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    activation: Callable[[Tensor], Tensor],
    pairs: Mapping[str, ExpertLora] = MappingProxyType({}),
) -> Tensor:
    """Compute the weighted sum of each token's experts: [N, D].

    Args:
        x_ND: tokens.
        experts_NK: int64, the experts of each token, no two the same.
        weights_NK: their weights.
        gate_up_EFD: gate and up projections of every expert, one below the other: [experts, 2 *
            width, D].
        down_EDF: [experts, D, width].
        pairs: adapters of the two, by transformers' names: `gate_up_proj`, `down_proj`.
    """
    count, chosen = experts_NK.shape
    flat = experts_NK.reshape(-1)
    order = torch.argsort(
        flat, stable=True
    )  # stable: one order of the rows, and so the same bits every time
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    ends = torch.searchsorted(
        flat[order], torch.arange(gate_up_EFD.shape[0], device=flat.device), right=True
    )
    rows = _Spread.apply(x_ND, order, inverse, chosen)
    gate, up = _adapted_linear(rows, gate_up_EFD, ends, pairs.get("gate_up_proj")).chunk(2, -1)
    out = _adapted_linear(activation(gate) * up, down_EDF, ends, pairs.get("down_proj"))
    out = _Permute.apply(out, inverse, order).reshape(count, chosen, -1)
    return (out * weights_NK[..., None]).sum(1)


class ExpertLora(NamedTuple):
    """An adapter of the matrices of all experts: matrix e becomes W + scale B A.

    Attributes:
        a_ERI: [experts, rank, inputs].
        b_EOR: [experts, outputs, rank].
    """

    a_ERI: Tensor
    b_EOR: Tensor
    scale: float

    def leaf(self) -> ExpertLora:
        """Return the same numbers as leaves of a graph."""
        return ExpertLora(
            self.a_ERI.detach().requires_grad_(True),
            self.b_EOR.detach().requires_grad_(True),
            self.scale,
        )


def pair_of(a: Tensor, b: Tensor, experts: int, scale: float) -> ExpertLora:
    """Take PEFT's layout apart: `a` [experts * rank, inputs], expert by expert; `b` [outputs, rank
    * experts], in which the numbers of one rank lie together."""
    a_ERI = a.reshape(experts, -1, a.shape[-1])
    return ExpertLora(
        a_ERI, b.reshape(b.shape[0], -1, experts).permute(2, 0, 1).contiguous(), scale
    )


def peft_layout(a_ERI: Tensor, b_EOR: Tensor) -> tuple[Tensor, Tensor]:
    """Return [experts * rank, inputs] and [rank * experts, outputs]: what `pair_of` takes, the
    second transposed."""
    return a_ERI.reshape(-1, a_ERI.shape[-1]), b_EOR.permute(2, 0, 1).reshape(-1, b_EOR.shape[1])


def pairs_of(experts: Any) -> tuple[Any, dict[str, ExpertLora]]:
    """Return the module of the experts and the pairs that PEFT's ParamWrapper holds around it, by
    parameter.

    The wrapper itself would add B A to all experts' matrices and keep the sums for the backward
    pass.
    """
    pairs = {}
    while hasattr(experts, "lora_A") and hasattr(experts, "parameter_name"):
        (name,) = experts.active_adapters
        a = experts.lora_A[name].weight
        b = experts.lora_B[name].weight
        pairs[experts.parameter_name] = pair_of(a, b, experts.num_experts, experts.scaling[name])
        experts = experts.base_layer
    return experts, pairs


def _adapted_linear(
    rows_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor, pair: ExpertLora | None
) -> Tensor:
    """Multiply rows as `grouped_linear` does, by W + scale B A if there is a pair; that sum is
    never built."""
    out = grouped_linear(rows_MI, weight_EOI, ends_E)
    if pair is None:
        return out
    inner = grouped_linear(rows_MI, pair.a_ERI.to(rows_MI.dtype), ends_E)
    return out + grouped_linear(inner, pair.b_EOR.to(rows_MI.dtype), ends_E) * pair.scale


def grouped_linear(rows_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply rows up to `ends[e]` (and from `ends[e - 1]`) by the transpose of `weight[e]`: [M,
    F]."""
    if _grouped(rows_MD, weight_EFD):
        return _grouped_mm(rows_MD, weight_EFD.transpose(-2, -1), offs=ends_E.to(torch.int32))
    products = []
    start = 0
    for weight, end in zip(weight_EFD.unbind(0), ends_E.tolist(), strict=True):
        if end > start:
            products.append(torch.nn.functional.linear(rows_MD[start:end], weight))
        start = end
    return torch.cat(products) if products else rows_MD.new_zeros(0, weight_EFD.shape[1])


def _grouped(rows: Tensor, weight: Tensor) -> bool:
    """Return True if torch has one kernel for it: bfloat16 on CUDA, rows of whole 16 bytes."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or _grouped_mm is None:
        return False
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    return aligned and torch.cuda.get_device_capability(rows.device) >= GROUPED_CAPABILITY


class _Spread(torch.autograd.Function):
    """Each token as often as it has experts, sorted by expert: [N, D] -> [N * chosen, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.chosen = chosen
        return x[order // chosen]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].reshape(-1, ctx.chosen, grad.shape[-1]).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in the order of `index`; `inverse` is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
