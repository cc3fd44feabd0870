"""Work of a full step, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import StepCost
from ondevice.methods.step_model import forward_flops, head_flops

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.full.config import FullConfig


def step_cost(
    dims: ModelDims, config: FullConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    # The tiled loss computes the logits a second time in the backward pass. AdamW reads and writes
    # two moments. Beside bfloat16 weights these and the masters' lower halves are 10 bytes a
    # parameter.
    update = 8 if weight_bytes >= 4 * dims.parameters else 13
    forward = forward_flops(dims, batch_size, length_tokens)
    head = head_flops(dims, batch_size, length_tokens)
    return StepCost(3 * forward + 4 * head, 3 * weight_bytes + update * weight_bytes)
