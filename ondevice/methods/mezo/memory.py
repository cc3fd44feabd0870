"""Bytes of a MeZO step by part, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import MemoryModel
from ondevice.methods.step_model import forward_bytes, loss_bytes

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
