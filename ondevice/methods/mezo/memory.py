"""Bytes of a MeZO step by part, from dimensions alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ondevice.methods.mezo.config import MezoConfig
    from ondevice.models import ModelDims


def memory(dims: ModelDims, config: MezoConfig, batch_size: int, length_tokens: int, activation_bytes: int = 4) -> dict[str, int]:
    """Peak bytes by part: inference plus one chunk of noise."""
    tokens = batch_size * length_tokens
    return {
        "adapter": 0,
        "noise": 4 * (1 << 20) * 2,
        "activations": tokens * (3 * dims.intermediate + 2 * dims.hidden) * activation_bytes,
        "logits": tokens * -(-dims.vocab // config.loss_tiles) * 4 * 2,
        "optimizer": 0,
    }
