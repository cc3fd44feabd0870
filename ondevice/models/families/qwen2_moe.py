"""`qwen2_moe`: Qwen1.5-MoE and Qwen2-57B-A14B, mixtures of experts with a shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import MoeDims
from ondevice.models.families.configuration import decoder_dims
from ondevice.models.families.moe import MoeFamily, moe_dims, refuse_window

if TYPE_CHECKING:
    from ondevice.gguf.metadata import Metadata


class Qwen2Moe(MoeFamily):
    """q, k and v have a bias; experts are weighted by the softmax over all of them."""

    model_type = "qwen2_moe"
    gguf_architecture = "qwen2moe"
    llama_cpp_normalises = False

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> MoeDims:
        refuse_window(config, where)
        sizes = {**config, "intermediate_size": config.get("intermediate_size", 5632)}
        bias = bool(config.get("qkv_bias", True))
        base = decoder_dims("qwen2_moe", sizes, where, qkv_bias=bias, o_bias=False, mlp_bias=False)
        return moe_dims(base, config, where, experts=60, active=4, expert=1408, shared=5632)

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read what `MoeFamily.gguf_config` does, and the biases of q, k and v."""
        return {**super().gguf_config(data, config), "qkv_bias": "blk.0.attn_q.bias" in data.shapes}

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `MoeFamily.tiny_config` does, with an expert for all."""
        return super().tiny_config(
            **{"shared_expert_intermediate_size": sizes["intermediate_size"], **sizes}
        )


FAMILY = Qwen2Moe
