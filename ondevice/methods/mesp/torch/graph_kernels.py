"""The operations of `kernels` in a graph that is exported for a phone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.methods.mesp.torch.kernels import (
    Position,
    Scores,
    TorchKernels,
    attend_in_chunks,
    attend_in_chunks_backward,
)
from ondevice.nn.cross_entropy import times


class GraphKernels(TorchKernels):
    """Operations of a graph for a phone: nothing is written into a slice, and only operators that a
    stock ExecuTorch runtime has are used.

    Every product is written so that frozen weights are read in place: x W^T is one linear, g W one
    product, and of a transposed weight there is never a copy. In-place operations of inherited
    methods become ordinary operators when the graph is lowered.

    Args:
        mask: of attention, [tokens, tokens], added to the scores.
    """

    name = "graph"
    in_place = False

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def add(self, into: Tensor | None, y: Tensor) -> Tensor:
        return y if into is None else into + y

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        return self.add(into, functional.linear(x, weight, bias))

    def add_product(self, into: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        if into is None:
            return torch.mm(a, b)
        return into + torch.mm(a, times(b, scale))

    def rope(self, q: Tensor, k: Tensor, position: Position) -> tuple[Tensor, Tensor]:
        return _rotated(q, position), _rotated(k, position)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(gate) * up

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(gate)
        silu = gate * s
        return g * up * (s + silu * (1.0 - s)), g * silu

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Any]:
        return attend_in_chunks(q, k, v, self.mask, how), None

    def attend_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Any, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        return attend_in_chunks_backward(g, q, k, v, self.mask, how)


def _rotated(x: Tensor, position: Position) -> Tensor:
    cos, sin = position
    width = 2 * cos.shape[-1]
    first, second = (x if width == x.shape[-1] else x[..., :width]).chunk(2, -1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(parts if width == x.shape[-1] else (*parts, x[..., width:]), -1)
