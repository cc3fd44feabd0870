"""Work of a slideformer step, from dimensions alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import StepCost
from ondevice.methods.step_model import forward_flops, head_flops

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.slideformer.config import SlideformerConfig


def step_cost(
    dims: ModelDims,
    config: SlideformerConfig,
    batch_size: int,
    length_tokens: int,
    weight_bytes: int,
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    # A layer's forward pass runs twice; the head's logits once, unless the vocabulary comes in parts.
    forward, head = (
        forward_flops(dims, batch_size, length_tokens),
        head_flops(dims, batch_size, length_tokens),
    )
    heads = 3 * head * (1 if config.loss_tiles == 1 else 4 / 3)
    return StepCost(4 * forward + heads, 3 * weight_bytes, config.compute)
