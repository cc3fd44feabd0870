"""Work of a mezo step, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import StepCost
from ondevice.methods.step_model import forward_flops, head_flops

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mezo.config import MezoConfig


def step_cost(
    dims: ModelDims, config: MezoConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    forward = forward_flops(dims, batch_size, length_tokens) + head_flops(
        dims, batch_size, length_tokens
    )
    moves = (
        4 * config.queries * 2 * weight_bytes
    )  # four passes over the parameters a query, each reads and writes
    return StepCost(2 * config.queries * forward, 2 * config.queries * weight_bytes + moves)
