"""Bytes of a MeZO step by part, and its work, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import MemoryModel, StepCost
from ondevice.methods.step_model import forward_bytes, forward_flops, head_flops, loss_bytes

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mezo.config import MezoConfig


def memory(
    dims: ModelDims,
    config: MezoConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part: inference plus one chunk of noise, and in half precision a copy of
    the parameters."""
    tokens = batch_size * length_tokens
    return {
        "adapter": 0,
        "noise": 4 * (1 << 20) * 3,
        "activations": forward_bytes(dims, batch_size, length_tokens, activation_bytes),
        "logits": loss_bytes(dims, tokens, config.loss_tiles),
        "optimizer": 2 * dims.parameters
        if activation_bytes == 2
        else 0,  # the copy that restores them
    }


MEMORY = MemoryModel(memory)


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
