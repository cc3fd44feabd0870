"""`qwen2`: Qwen2 and Qwen2.5."""

from __future__ import annotations

from typing import Any

from ondevice.core.dims import ModelDims
from ondevice.models.families.base import Family
from ondevice.models.families.configuration import UnknownTrait, decoder_dims


class Qwen2(Family):
    """q, k and v have a bias, the other linear layers have none."""

    model_type = "qwen2"
    gguf_architecture = "qwen2"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        window = config.get("use_sliding_window") and config.get("sliding_window") is not None
        types = config.get("layer_types")
        if types is None and window:
            first = config.get("max_window_layers", 28)
            types = ["sliding_attention"] * (config.get("num_hidden_layers", 0) > first)
        if "sliding_attention" in (types or ()):
            raise UnknownTrait(
                f"{where}: some layers attend to a sliding window",
                expected="full attention in every layer",
                received=f"use_sliding_window with a window of {config.get('sliding_window')} tokens",
                hint="set use_sliding_window to false if sequences stay shorter than the window",
            )
        return decoder_dims("qwen2", config, where, qkv_bias=True, o_bias=False, mlp_bias=False)


FAMILY = Qwen2
