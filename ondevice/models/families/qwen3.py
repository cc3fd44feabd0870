"""`qwen3`: Qwen3 from 0.6B on: Llama's block with norms of each head's q and k, and a head size of
its own."""

from __future__ import annotations

from typing import Any

from ondevice.core.dims import ModelDims
from ondevice.core.traits import LLAMA_NORMS, BlockTraits
from ondevice.models.families.configuration import decoder_dims, read_size
from ondevice.models.families.traited import TraitFamily, sliding_windows

NORMS = {**LLAMA_NORMS, "q": "self_attn.q_norm", "k": "self_attn.k_norm"}


class Qwen3(TraitFamily):
    """`attention_bias` puts a bias on q, k, v and o together."""

    model_type = "qwen3"
    gguf_architecture = "qwen3"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        bias = bool(config.get("attention_bias"))
        layers = read_size(config, "num_hidden_layers", where)
        windows = ()
        if config.get("use_sliding_window"):
            windows = sliding_windows(config, layers, where)
        config = {"head_dim": 128, **config}
        traits = BlockTraits(norms=tuple(NORMS.items()), windows=windows)
        return decoder_dims(
            "qwen3", config, where, qkv_bias=bias, o_bias=bias, mlp_bias=False, traits=traits
        )

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does, with a head size that is not hidden / heads."""
        return {"head_dim": 24, **sizes}


FAMILY = Qwen3
