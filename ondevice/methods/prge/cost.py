"""Work of a prge step, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import StepCost
from ondevice.methods.step_model import forward_flops, head_flops

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.prge.config import PrgeConfig


def step_cost(
    dims: ModelDims, config: PrgeConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    above = min(config.top_layers or dims.layers, dims.layers)
    below = forward_flops(dims, batch_size, length_tokens, dims.layers - above)
    copy = forward_flops(dims, batch_size, length_tokens, above) + head_flops(
        dims, batch_size, length_tokens
    )
    passes = 1 if config.batch_queries else config.queries
    if not config.batch_signs and config.estimator == "central":
        passes *= 2
    return StepCost(below + config.copies * copy, passes * weight_bytes)
