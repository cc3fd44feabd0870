"""What each layer reads of a token in addition to the residual stream: the token's embedding for
that layer, and a projection of its embedding for all.

Both come from the ids and frozen weights only, so they are constants of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.nn.cross_entropy import wide

Rows = Callable[[Tensor, slice], Tensor]
"""Of int64 [N], the numbers of a slice of the tokens' embeddings for all layers, [N, W]."""


@dataclass(frozen=True)
class LayerInputs:
    """Frozen tensors of the layers' inputs, of L layers and inputs of width W.

    Attributes:
        projection: [L W, D].
        norm: factor of the norm of a layer's projection, [W].
    """

    rows: Rows
    projection: Tensor
    norm: Tensor
    eps: float

    def of(self, ids_N: Tensor, x_ND: Tensor) -> Callable[[int], Tensor]:
        """Return a function of a layer's number to its input [N, W]; `x_ND` is what the first layer
        gets of the residual stream."""
        width = len(self.norm)

        def layer_input(i: int) -> Tensor:
            own = slice(i * width, (i + 1) * width)
            rows = self.rows(ids_N, own).to(x_ND)
            return combine(rows, x_ND, self.projection[own], self.norm, self.eps)

        return layer_input


def combine(rows: Tensor, x: Tensor, projection: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Return a layer's input [N, W]: the norm of the projection of x / sqrt(D), plus the embedding
    times sqrt(W), over sqrt(2)."""
    width = rows.shape[-1]
    projected = wide(functional.linear(x, projection) * projection.shape[-1] ** -0.5)
    normed = projected * torch.rsqrt(projected.pow(2).mean(-1, keepdim=True) + eps) * wide(norm)
    return (normed.to(x.dtype) + rows * width**0.5) * 2.0**-0.5
