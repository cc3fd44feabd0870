"""`phi3`: Phi-3 and Phi-4-mini: q, k and v in one linear layer, gate and up in another; a part of
each head rotated, by tables that depend on the length (longrope).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.traits import BlockTraits
from ondevice.models.families.configuration import ROPE_TYPES, decoder_dims, read_size
from ondevice.models.families.traited import TraitFamily

if TYPE_CHECKING:
    from ondevice.gguf.metadata import Metadata


class Phi3(TraitFamily):
    """No biases. An adapter goes next to the fused linear layers."""

    model_type = "phi3"
    gguf_architecture = "phi3"
    linear_targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    linear_parents = {
        "qkv_proj": "self_attn",
        "o_proj": "self_attn",
        "gate_up_proj": "mlp",
        "down_proj": "mlp",
    }

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        hidden = read_size(config, "hidden_size", where)
        heads = read_size(config, "num_attention_heads", where)
        head_dim = read_size(config, "head_dim", where, max(1, hidden // heads))
        rope = config.get("rope_parameters") or {}
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        width = int(head_dim * (1.0 if part is None else part))
        window = config.get("sliding_window")
        layers = read_size(config, "num_hidden_layers", where)
        windows = ()
        if window is not None:
            windows = (read_size(config, "sliding_window", where),) * layers
        traits = BlockTraits(
            fused=True,
            rotary_width=width * (width != head_dim),
            windows=windows,
        )
        return decoder_dims("phi3", config, where, qkv_bias=False, o_bias=False, mlp_bias=False, traits=traits,
                            rope_types=(*ROPE_TYPES, "longrope"))  # fmt: skip

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read the rotated part of a head, longrope's factors and the window (0 for none)."""
        rope: dict[str, Any] = dict(config["rope_parameters"])
        part = data.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]
        rope["partial_rotary_factor"] = part
        own = {
            "partial_rotary_factor": part,
            "sliding_window": data.get("attention.sliding_window") or None,
        }
        # Transformers' defaults name a padding token and ends that a file may not have.
        own |= {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if rope["rope_type"] == "longrope":
            original = data.need("rope.scaling.original_context_length")
            for kind in ("long", "short"):
                rope[f"{kind}_factor"] = [
                    float(f"{x:.7g}") for x in data.vector(f"rope_factors_{kind}.weight")
                ]
            rope["original_max_position_embeddings"] = original
            own["original_max_position_embeddings"] = original
            if factor := data.get("rope.scaling.attn_factor"):
                rope["attention_factor"] = factor
        return {**own, "rope_parameters": rope}

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return longrope's keys; a window of 0 is omitted, and llama.cpp uses none."""
        keys: dict[str, Any] = {"attention.sliding_window": 0}
        rope = config.get("rope_parameters", {})
        if dims.rope_type == "longrope" and rope:
            original = rope["original_max_position_embeddings"]
            factor = dims.max_positions / original
            usual = 1.0
            if factor > 1:
                usual = math.sqrt(1 + math.log(factor) / math.log(original))
            keys["rope.scaling.original_context_length"] = original
            keys["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or usual)
        return keys

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does, with three quarters of each head rotated."""
        if (rope := sizes.pop("rope_parameters", None)) is not None:
            sizes["rope_parameters"] = {"partial_rotary_factor": 0.75, **rope}
        return {"partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, **sizes}


FAMILY = Phi3
