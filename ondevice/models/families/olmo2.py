"""`olmo2`: OLMo 2: norms after each branch and none before, and norms of q and k over all heads
together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import BlockTraits
from ondevice.models.families.configuration import decoder_dims
from ondevice.models.families.traited import TraitFamily

if TYPE_CHECKING:
    from ondevice.gguf.metadata import Metadata

NORMS = {
    "after_attention": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    "q": "self_attn.q_norm",
    "k": "self_attn.k_norm",
}


class Olmo2(TraitFamily):
    """`attention_bias` puts a bias on q, k, v and o together."""

    model_type = "olmo2"
    gguf_architecture = "olmo2"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        bias = bool(config.get("attention_bias"))
        traits = BlockTraits(norms=tuple(NORMS.items()), qk_norm_all=True)
        return decoder_dims(
            "olmo2", config, where, qkv_bias=bias, o_bias=bias, mlp_bias=False, traits=traits
        )

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Refuse OLMo 3, whose files name the same architecture."""
        if window := data.get("attention.sliding_window"):
            hint = "use the original safetensors model"
            raise ModelError(
                f"{data.path}: is OLMo 3",
                expected="no window",
                received=f"{window} tokens",
                hint=hint,
            )
        return {}

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Refuse a tied head, which llama.cpp does not look for in this family."""
        if dims.tied:
            raise ModelError(
                "llama.cpp wants an output head of its own in this family", received="a tied head"
            )
        return {}

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does; transformers' own epsilon is another one."""
        return {"rms_norm_eps": 1e-5, **sizes}


FAMILY = Olmo2
