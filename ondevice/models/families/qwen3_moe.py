"""`qwen3_moe`: Qwen3-30B-A3B and larger: Qwen3's attention, and a mixture of experts without a
shared one."""

from __future__ import annotations

from typing import Any

from ondevice.core.dims import MoeDims
from ondevice.core.traits import BlockTraits
from ondevice.models.families.configuration import decoder_dims
from ondevice.models.families.moe import MoeFamily, moe_dims, refuse_window
from ondevice.models.families.qwen3 import NORMS


class Qwen3Moe(MoeFamily):
    """`attention_bias` puts a bias on q, k, v and o together; the weights of a token's experts add
    up to 1 if `norm_topk_prob` says so."""

    model_type = "qwen3_moe"
    gguf_architecture = "qwen3moe"
    llama_cpp_normalises = True

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> MoeDims:
        refuse_window(config, where)
        bias = bool(config.get("attention_bias"))
        traits = BlockTraits(norms=tuple(NORMS.items()))
        sizes = {"intermediate_size": 6144, "num_key_value_heads": 4, **config}
        base = decoder_dims(
            "qwen3_moe", sizes, where, qkv_bias=bias, o_bias=bias, mlp_bias=False, traits=traits
        )
        return moe_dims(base, config, where, experts=128, active=8, expert=768, shared=0)

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `MoeFamily.tiny_config` does, with a head size that is not hidden / heads."""
        return super().tiny_config(**{"head_dim": 24, "norm_topk_prob": True, **sizes})


FAMILY = Qwen3Moe
