"""`llama`: Llama 2 and 3, SmolLM 1 and 2, TinyLlama and others that share the architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.models.families.base import Family
from ondevice.models.families.configuration import decoder_dims

if TYPE_CHECKING:
    import numpy as np


class Llama(Family):
    """`attention_bias` puts a bias on q, k, v and o together, `mlp_bias` on the MLP."""

    model_type = "llama"
    gguf_architecture = "llama"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        attention = bool(config.get("attention_bias"))
        mlp = bool(config.get("mlp_bias"))
        return decoder_dims(
            "llama", config, where, qkv_bias=attention, o_bias=attention, mlp_bias=mlp
        )

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Undo the interleaving of rotary pairs that llama.cpp applies to q and k of this
        family."""
        for target, heads in (("q_proj", dims.heads), ("k_proj", dims.kv_heads)):
            if f".{target}." in name:
                pairs = weights.reshape(heads, dims.head_dim // 2, 2, *weights.shape[1:])
                return pairs.swapaxes(1, 2).reshape(weights.shape)
        return weights


FAMILY = Llama
