"""Bytes of a first-order full fine-tuning step by part, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import MemoryModel
from ondevice.methods.step_model import backward_bytes, loss_bytes

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.full.config import FullConfig

STATE_BYTES = {2: 10, 4: 8}
"""Bytes of AdamW's state a parameter, by the parameter's bytes."""


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


MEMORY = MemoryModel(memory)
