"""Bytes of a first-order full fine-tuning step by part, from dimensions alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ondevice.methods.full.config import FullConfig
    from ondevice.models import ModelDims


def activation_bytes_for_backward(dims: ModelDims, batch_size: int, length_tokens: int, activation_bytes: int) -> int:
    """Activations that backpropagation keeps, without checkpointing: about 12 d + 4 ff + attention a token and layer."""
    tokens = batch_size * length_tokens
    kv = 4 * dims.kv_heads * dims.head_dim
    per_token = 12 * dims.hidden + kv + 4 * dims.intermediate
    return dims.layers * (tokens * per_token + batch_size * dims.heads * length_tokens) * activation_bytes


def memory(dims: ModelDims, config: FullConfig, batch_size: int, length_tokens: int, activation_bytes: int = 4) -> dict[str, int]:
    """Peak bytes by part: gradients and AdamW moments of every parameter, and activations kept for backward."""
    tokens = batch_size * length_tokens
    return {
        "adapter": dims.parameters * activation_bytes,
        "noise": 0,
        "activations": activation_bytes_for_backward(dims, batch_size, length_tokens, activation_bytes),
        "logits": tokens * -(-dims.vocab // config.loss_tiles) * 4 * 2,
        "optimizer": dims.parameters * 2 * activation_bytes,
    }
