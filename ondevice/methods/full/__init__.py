"""First-order fine-tuning of all parameters with AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.capabilities import (
    AnyDecoder,
    Asked,
    Classifies,
    LearnsPreferences,
    Packs,
    Refuses,
    Writes,
)
from ondevice.core.method import MemoryModel, MethodSpec, OpenSession, StepCost
from ondevice.methods.full.config import FullConfig
from ondevice.methods.precision import refuse_float16
from ondevice.methods.step_model import backward_bytes, forward_flops, head_flops, loss_bytes

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims

STATE_BYTES = {2: 10, 4: 8}
"""Bytes of AdamW's state a parameter, by the parameter's bytes."""


def open_torch() -> OpenSession[FullConfig]:
    """Return what opens a session."""
    from ondevice.methods.adamw import open_session

    return open_session


def memory(
    dims: ModelDims,
    config: FullConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part: gradients and AdamW's state of every parameter, and activations
    kept for backward.

    Moments are float32; bfloat16 parameters have the lower halves of float32 masters, too.
    """
    rows = min(batch_size, config.micro_batch_size or batch_size)
    tokens = rows * length_tokens
    return {
        "adapter": dims.parameters * activation_bytes,
        "noise": 0,
        "activations": backward_bytes(dims, rows, length_tokens, activation_bytes),
        "logits": loss_bytes(dims, tokens, config.loss_tiles),
        "optimizer": dims.parameters * STATE_BYTES[activation_bytes],
    }


def step_cost(
    dims: ModelDims, config: FullConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    # The tiled loss computes the logits a second time in the backward pass. AdamW reads and writes
    # two moments. Next to bfloat16 weights these and the masters' lower halves are 10 bytes a
    # parameter.
    update = 13
    if weight_bytes >= 4 * dims.parameters:
        update = 8
    forward = forward_flops(dims, batch_size, length_tokens)
    head = head_flops(dims, batch_size, length_tokens)
    return StepCost(3 * forward + 4 * head, 3 * weight_bytes + update * weight_bytes)


def refuse(asked: Asked[FullConfig]) -> None:
    """See `Refuses`."""
    if asked.dtype == "float16":
        refuse_float16()


METHOD = MethodSpec(
    name="full",
    config=FullConfig,
    summary="first-order fine-tuning of all parameters",
    words="Trains the whole model: the most memory. "
    "The result is a model of its own, not an adapter.",
    keeps="gradients, two moments, activations of all layers",
    page="full.md",
    trains="all",
    order="first",
    preference=4,
    sessions={"torch": open_torch},
    memory=lambda: MemoryModel(memory),
    cost=lambda: step_cost,
    capabilities=(
        AnyDecoder(),
        Classifies(),
        LearnsPreferences(("torch",)),
        Packs(("torch",)),
        Refuses(refuse),
        Writes(),
    ),
)
