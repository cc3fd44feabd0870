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
    above = dims.layers if config.top_layers is None else min(config.top_layers, dims.layers)
    below = forward_flops(dims, batch_size, length_tokens, dims.layers - above)
    copy = forward_flops(dims, batch_size, length_tokens, above) + head_flops(
        dims, batch_size, length_tokens
    )
    passes = 1 if config.batch_queries else config.queries
    passes *= 1 if config.batch_signs or config.estimator == "one_sided" else 2
    return StepCost(below + config.copies * copy, passes * weight_bytes)
