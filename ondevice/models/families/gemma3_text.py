"""`gemma3_text`: Gemma 3 without images (270M, 1B): norms before and after each branch with weights
of 1 + w, windows in five layers of six, with a rotary base of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import BlockTraits
from ondevice.models.families.configuration import UnknownTrait, decoder_dims, read_size
from ondevice.models.families.traited import TraitFamily, sliding_windows

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from ondevice.gguf.metadata import Metadata

NORMS = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    "q": "self_attn.q_norm",
    "k": "self_attn.k_norm",
}
PATTERN = 6
WINDOW = 4096
"""Transformers' own defaults: every sixth layer sees all."""


class Gemma3Text(TraitFamily):
    """The embedding's rows are multiplied by sqrt(hidden); the head is the embedding."""

    model_type = "gemma3_text"
    gguf_architecture = "gemma3"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        for field in (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
        ):
            if config.get(field):
                raise UnknownTrait(
                    f"{where}: field '{field}'", expected="null", received=config[field]
                )
        layers = read_size(config, "num_hidden_layers", where)
        hidden = read_size(config, "hidden_size", where)
        if config.get("layer_types") is None:
            every = config.get("sliding_window_pattern") or PATTERN
            types = [
                "full_attention" if (i + 1) % every == 0 else "sliding_attention"
                for i in range(layers)
            ]
            config = {**config, "layer_types": types}
        config = {"sliding_window": WINDOW, "head_dim": 256, "num_key_value_heads": 4, **config}
        traits = BlockTraits(
            norms=tuple(NORMS.items()),
            norm_offset=True,
            activation="gelu_tanh",
            windows=sliding_windows(config, layers, where),
            score_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
            embedding_scale=hidden**0.5,
        )
        bias = bool(config.get("attention_bias"))
        tied = bool(config.get("tie_word_embeddings", True))
        config = {**config, "tie_word_embeddings": tied}
        return decoder_dims(
            "gemma3_text", config, where, qkv_bias=bias, o_bias=bias, mlp_bias=False, traits=traits
        )

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does: layers with a window of 12 tokens and such without
        take turns."""
        types = [
            "full_attention" if i % 2 else "sliding_attention"
            for i in range(sizes["num_hidden_layers"])
        ]
        own = {
            "head_dim": 24,
            "sliding_window": 12,
            "layer_types": types,
            "query_pre_attn_scalar": 20,
        }
        rope = sizes.pop("rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e6}
        base = {"rope_type": "default", "rope_theta": 10000.0}
        own["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": base,
        }  # one set for each kind of layer
        return {**own, **sizes}

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read windows and the second rotary base; the size tells the scale of the scores."""
        layers = config["num_hidden_layers"]
        head_dim = config["head_dim"]
        every = data.get("attention.sliding_window_pattern", PATTERN)
        theta = data.get("rope.freq_base_swa", 10000.0)
        # 27B, of 62 layers, scales by the width of the stream for each head; every other size by
        # the head's own.
        scalar = head_dim
        if layers == 62:
            scalar = config["hidden_size"] // config["num_attention_heads"]
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": data.need("attention.sliding_window"),
            "layer_types": [KINDS[(i + 1) % every != 0] for i in range(layers)],
            "query_pre_attn_scalar": scalar,
            "final_logit_softcapping": data.get("final_logit_softcapping"),
            "rope_parameters": {
                "full_attention": config["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": theta},
            },
        }

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return windows and the second rotary base."""
        windows = dims.traits.windows
        scale = dims.traits.score_scale
        every = next(
            (i + 1 for i in range(dims.layers) if not dims.traits.window(i)), dims.layers + 1
        )
        if not windows or any(
            bool(windows[i]) == ((i + 1) % every == 0) for i in range(dims.layers)
        ):
            raise ModelError(
                "llama.cpp has a window in all layers but each so-and-so-many-th of this family"
            )
        if abs(scale - dims.head_dim**-0.5) > 1e-6 * scale and dims.layers != 62:
            message = "llama.cpp scales the scores of this family by the size of a head"
            raise ModelError(message, expected=dims.head_dim, received=round(scale**-2))
        keys: dict[str, Any] = {
            "attention.sliding_window": max(windows),
            "attention.sliding_window_pattern": every,
        }
        rope = config.get("rope_parameters", {}).get("sliding_attention", {})
        if rope:
            keys["rope.freq_base_swa"] = float(rope["rope_theta"])
        return keys

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Take off the 1 that llama.cpp's converter adds to the weights of norms."""
        if name.endswith("norm.weight"):
            return weights - 1
        return weights

    def positions(self, length: int, device: torch.device | str, dtype: torch.dtype) -> Any:
        """Compute cos and sin of layers that see all, then of those with a window, each [1, length,
        head_dim]."""
        import torch

        like = torch.empty(0, device=device, dtype=dtype)
        at = torch.arange(length, device=device)[None]
        rotary = self.model.model.rotary_emb
        kinds = [kind if kind in rotary.layer_types else rotary.layer_types[0] for kind in KINDS]
        return tuple(table for kind in kinds for table in rotary(like, at, kind))

    def layer_position(self, i: int, position: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        first = 0
        if self.dims.traits.window(i):
            first = 2
        return position[first], position[first + 1]


KINDS = ("full_attention", "sliding_attention")
FAMILY = Gemma3Text
