"""`smollm3`: SmolLM3 3B: Llama's block, without a rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import BlockTraits
from ondevice.models.families.configuration import decoder_dims, read_size
from ondevice.models.families.llama import Llama
from ondevice.models.families.traited import TraitFamily, sliding_windows

if TYPE_CHECKING:
    import numpy as np


class SmolLm3(TraitFamily):
    """`no_rope_layers` has a 1 for each layer that rotates q and k, and a 0 for one that does
    not."""

    model_type = "smollm3"
    gguf_architecture = "smollm3"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        layers = read_size(config, "num_hidden_layers", where)
        rotary = config.get("no_rope_layers")
        every = config.get("no_rope_layer_interval") or 4
        if rotary is None:
            rotary = [(i + 1) % every != 0 for i in range(layers)]
        windows = ()
        if config.get("use_sliding_window"):
            windows = sliding_windows(config, layers, where)
        traits = BlockTraits(rotary=tuple(bool(use) for use in rotary), windows=windows)
        bias = bool(config.get("attention_bias"))
        mlp = bool(config.get("mlp_bias"))
        config = {
            "num_key_value_heads": 4,
            **config,
            "tie_word_embeddings": config.get("tie_word_embeddings", True),
        }
        return decoder_dims(
            "smollm3", config, where, qkv_bias=bias, o_bias=bias, mlp_bias=mlp, traits=traits
        )

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Refuse what llama.cpp does not know: it rotates all layers but each fourth, and has no
        windows."""
        if any(dims.traits.rotated(i) == ((i + 1) % 4 == 0) for i in range(dims.layers)):
            raise ModelError(
                "llama.cpp rotates all layers of this family but each fourth",
                received="other layers",
            )
        return {}

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Undo the interleaving of rotary pairs, as for Llama, in every layer."""
        return Llama.gguf_tensor(name, weights, dims)

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does, without a rotary embedding in every second
        layer."""
        rope = {"rope_type": "default", "rope_theta": 2e6}
        return {"no_rope_layer_interval": 2, "rope_parameters": rope, **sizes}


FAMILY = SmolLm3
