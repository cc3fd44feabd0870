"""Frozen weights in 4 and 8 bits with float32 activations, over the ops of `runtime_ops`.

The 4-bit format is asymmetric (scale and minimum for each group of 32 inputs), so a model that was
published as Q4_1 is recovered on its own grid. The same modules run in eager and export as one op
each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ondevice.runtime_ops import quantized

GROUP = 32
"""Inputs that share a scale and a minimum."""


class Q4Linear(nn.Module):
    """x W^T + bias with W in 4 bits: `ondevice::q4_linear`."""

    def __init__(self, linear: nn.Linear, group: int = GROUP) -> None:
        super().__init__()
        packed, scales, mins = quantized.quantize_q4(linear.weight.detach().float(), group)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("mins", mins)
        self.register_buffer(
            "bias", None if linear.bias is None else linear.bias.detach().float().clone()
        )
        self.group = group
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.ondevice.q4_linear(x, self.packed, self.scales, self.mins, self.group)
        return y if self.bias is None else y + self.bias


class Q8Embedding(nn.Module):
    """An embedding with one int8 row and one scale a token; a tied head reads the same buffers."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        weight, scales = quantized.quantize_q8_rows(weight_VD.detach().float())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.ops.ondevice.q8_embedding(ids, self.weight, self.scales)

    def token_nll(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """Return cross-entropy with this table as the head; logits never exist."""
        return torch.ops.ondevice.q8_linear_cross_entropy(
            hidden_ND, self.weight, self.scales, labels_N
        )


def quantize_q4_model(family: Any) -> Q8Embedding:
    """Replace every linear of every block by `Q4Linear` and the embedding by `Q8Embedding`, in
    place.

    Returns:
        The head: the embedding itself if it is tied, else a second table.

    Raises:
        ModelError: a layer's inputs are not a multiple of the group.
    """
    for layer in range(family.dims.layers):
        for target in family.targets(layer):
            family.set_linear(layer, target, Q4Linear(family.linear(layer, target)))
    head = family.head_weight
    embedding = Q8Embedding(family.embedding.weight)
    tied = family.dims.tied
    family.model.set_input_embeddings(embedding)
    return embedding if tied else Q8Embedding(head)
