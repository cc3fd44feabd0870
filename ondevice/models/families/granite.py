"""`granite`: Granite 3 and later dense ones: Llama's block with factors of embedding, branches,
scores and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.traits import BlockTraits
from ondevice.models.families.configuration import decoder_dims
from ondevice.models.families.llama import Llama
from ondevice.models.families.traited import TraitFamily

if TYPE_CHECKING:
    import numpy as np

    from ondevice.gguf.metadata import Metadata


def factors(config: dict[str, Any], paths: tuple[tuple[str, str], ...] = ()) -> BlockTraits:
    """Read the factors; a field that is null or not there is 1."""

    def factor(field: str) -> float:
        value = config.get(field)
        if value is None:
            return 1.0
        return float(value)

    return BlockTraits(
        paths=paths,
        score_scale=factor("attention_multiplier"),
        embedding_scale=factor("embedding_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logit_scale=1.0 / factor("logits_scaling"),
    )


class Granite(TraitFamily):
    """`attention_bias` puts a bias on q, k, v and o together, `mlp_bias` on the MLP."""

    model_type = "granite"
    gguf_architecture = "granite"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        traits = factors(config)
        bias = bool(config.get("attention_bias"))
        mlp = bool(config.get("mlp_bias"))
        return decoder_dims(
            "granite", config, where, qkv_bias=bias, o_bias=bias, mlp_bias=mlp, traits=traits
        )

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read the factors."""
        fields = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
                  "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}  # fmt: skip
        return {field: data.need(key) for field, key in fields.items()}

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return the factors."""
        traits = dims.traits
        return {"attention.scale": traits.score_scale, "embedding_scale": traits.embedding_scale,
                "residual_scale": traits.residual_scale, "logit_scale": 1.0 / traits.logit_scale}  # fmt: skip

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Undo the interleaving of rotary pairs, as for Llama."""
        return Llama.gguf_tensor(name, weights, dims)

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does, with factors that are not 1."""
        own = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3}
        return {**own, "logits_scaling": 2.0, **sizes}


FAMILY = Granite
