"""Bytes of a first-order LoRA step by part, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import MemoryModel
from ondevice.methods.step_model import backward_bytes, loss_bytes

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.lora.config import LoraConfig


def memory(
    dims: ModelDims,
    config: LoraConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part: adapter, its gradients and AdamW moments, and activations kept for
    backward."""
    linears = dims.adapted(config)
    a = config.rank * sum(linear.inputs * linear.experts for linear in linears)
    b = config.rank * sum(linear.outputs * linear.experts for linear in linears)
    trained = a + b if config.trains_a else b
    rows = min(batch_size, config.micro_batch_size or batch_size)
    tokens = rows * length_tokens
    return {
        "adapter": (a + b) * 4 + trained * 4,
        "noise": 0,
        "activations": backward_bytes(dims, rows, length_tokens, activation_bytes),
        "logits": loss_bytes(dims, tokens, config.loss_tiles),
        "optimizer": trained * 8,
    }


MEMORY = MemoryModel(memory)
