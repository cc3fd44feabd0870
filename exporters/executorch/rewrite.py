"""The same blocks in operators that a backend takes whole, while a program is lowered.

Transformers' RMSNorm means over the last dimension and its grouped attention copies keys and
values; XNNPACK takes neither, so each would cut a layer into several delegates (measured on
SmolLM2: six a layer, one with the forms here). Mathematically nothing changes: a mean is a product
with a column of 1/d, and grouped queries are rows of one larger product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ondevice.nn.half_gelu import gelu_angle

ATTENTION = "ondevice_grouped"


class ProductRMSNorm(nn.Module):
    """RMSNorm with the mean of squares as a matrix product."""

    average: Tensor

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = _weight(norm)
        self.epsilon = _epsilon(norm)
        width = norm.weight.shape[0]
        self.register_buffer("average", torch.full((1, width), 1.0 / width, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        mean_of_squares = nn.functional.linear(x * x, self.average)
        return x * torch.rsqrt(mean_of_squares + self.epsilon) * self.weight


class FusedRMSNorm(nn.Module):
    """RMSNorm as one operator, which QNN computes without squares that overflow in float16."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = _weight(norm)
        self.epsilon = _epsilon(norm)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class SigmoidGelu(nn.Module):
    """Tanh-GELU without the operator that QNN takes for another one, in place of `activation`."""

    def __init__(self, activation: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(gelu_angle(x))


def _weight(norm: Any) -> nn.Parameter:
    """Return a norm's factor: Gemma's weights are added to 1."""
    if not type(norm).__name__.startswith("Gemma"):
        return norm.weight
    return nn.Parameter(1.0 + norm.weight.detach(), requires_grad=False)


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return causal attention with the queries of a group stacked as rows.

    Args:
        query: [rows, heads, tokens, head_dim]; key, value: [rows, kv_heads, tokens, head_dim].
        attention_mask: additive float [1, 1, tokens, tokens].
        scaling: factor of the scores.

    Returns:
        [rows, tokens, heads, head_dim], None.
    """
    rows, heads, tokens, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    stacked = (query * scaling).reshape(rows * kv_heads, groups * tokens, width)
    scores = torch.bmm(stacked, key.reshape(rows * kv_heads, tokens, width).transpose(1, 2))
    if attention_mask is not None:
        scores = scores + attention_mask.reshape(1, tokens, tokens).repeat(1, groups, 1)
    weights = torch.softmax(scores, dim=-1)
    output = torch.bmm(weights, value.reshape(rows * kv_heads, tokens, width))
    return output.reshape(rows, heads, tokens, width).transpose(1, 2), None


@contextmanager
def rewritten(
    model: nn.Module, norm: type[nn.Module] = ProductRMSNorm, **others: type[nn.Module]
) -> Iterator[None]:
    """Give `model`, within the block, norms and attention in the forms above, and to modules of the
    classes that `others` names the form there."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
    config: Any = model.config
    before = config._attn_implementation
    forms = others | {"RMSNorm": norm}
    replaced = [
        (parent, name, child, form)
        for parent in model.modules()
        for name, child in parent.named_children()
        for kind, form in forms.items()
        if type(child).__name__.endswith(kind)
    ]
    for parent, name, child, form in replaced:
        setattr(parent, name, form(child))
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
        for parent, name, child, _ in replaced:
            setattr(parent, name, child)
