"""Work of a revffn step, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import StepCost
from ondevice.methods.step_model import forward_flops, head_flops

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.revffn.config import RevffnConfig


def step_cost(
    dims: ModelDims, config: RevffnConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    # A block's branch is computed a second time, and not a third for the inversion.
    forward, head = (
        forward_flops(dims, batch_size, length_tokens),
        head_flops(dims, batch_size, length_tokens),
    )
    return StepCost(
        (3 if config.recompute == "stored" else 4) * forward + 4 * head, 5 * weight_bytes
    )
