"""`qwen3_5_text`: the text of Qwen3.5, dense: a gated delta rule in most layers, attention with a
gate of its output in the others; norms of 1 + w, a rotary embedding of a quarter of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.traits import ATTENDS, DELTA, LLAMA_NORMS, BlockTraits
from ondevice.models.families.configuration import (
    UnknownTrait,
    check_layer_types,
    decoder_dims,
    read_size,
)
from ondevice.models.families.traited import TraitFamily

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ondevice.gguf.metadata import Metadata

NORMS = {**LLAMA_NORMS, "q": "self_attn.q_norm", "k": "self_attn.k_norm"}
DELTA_LINEARS = {
    "delta_qkv": "in_proj_qkv",
    "delta_z": "in_proj_z",
    "delta_b": "in_proj_b",
    "delta_a": "in_proj_a",
    "delta_out": "out_proj",
}
DELTA_TENSORS = {
    "taps": "linear_attn.conv1d.weight",
    "decay": "linear_attn.A_log",
    "step": "linear_attn.dt_bias",
    "gate_norm": "linear_attn.norm.weight",
}
KINDS = {"full_attention": ATTENDS, "linear_attention": DELTA}
FULL_ATTENTION_INTERVAL = 4
"""Every fourth layer attends if the configuration does not list its layers."""


class Qwen3_5Text(TraitFamily):
    """Adapters stand next to the delta rule's own projections as well."""

    model_type = "qwen3_5_text"
    gguf_architecture = "qwen35"
    linear_targets = (
        "q_proj", "k_proj", "v_proj", "o_proj", *DELTA_LINEARS.values(), "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    linear_parents = TraitFamily.linear_parents | dict.fromkeys(
        DELTA_LINEARS.values(), "linear_attn"
    )

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        biased = bool(config.get("attention_bias"))
        mixers = _mixers(config, where)
        rope = config.get("rope_parameters") or {}
        head_dim = read_size(config, "head_dim", where, 256)
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
        width = int(head_dim * part)
        if width < 2 or width % 2:
            raise UnknownTrait(
                f"{where}: field 'partial_rotary_factor'",
                expected=f"an even part of the {head_dim} numbers of a head",
                received=part,
            )
        traits = BlockTraits(
            norms=tuple(NORMS.items()),
            norm_offset=True,
            rotary_width=0 if width == head_dim else width,
            mixers=mixers,
            taps=read_size(config, "linear_conv_kernel_dim", where, 4) if mixers else 0,
            delta=_delta(config, where) if mixers else (),
            output_gate=True,
            paths=(*DELTA_LINEARS.items(), *DELTA_TENSORS.items()),
        )
        return decoder_dims(
            "qwen3_5_text",
            {"max_position_embeddings": 32768, **config, "head_dim": head_dim},
            where,
            qkv_bias=biased,
            o_bias=biased,
            mlp_bias=False,
            traits=traits,
            rope_types=("default",),
        )

    def attention_branch(
        self, i: int, h: Tensor, position: Any, mask: Tensor | None = None
    ) -> Tensor:
        """Compute the mixer of block `i` with the norm before it, without the residual.

        A delta rule reads all tokens before it, so rows of packed sequences are taken apart.
        """
        if self.dims.traits.attends(i):
            return super().attention_branch(i, h, position, mask)
        layer: Any = self.layer(i)
        n = layer.input_layernorm(h)
        if len(position) == 2:
            return layer.linear_attn(hidden_states=n)
        from ondevice.nn.rows_apart import RowsApart

        apart = RowsApart.of(position[2])
        return apart.together(layer.linear_attn(hidden_states=apart.take_apart(n)))

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does: layers with a delta rule and such with attention
        take turns."""
        layers = sizes["num_hidden_layers"]
        types = ["full_attention" if i % 2 else "linear_attention" for i in range(layers)]
        own = {
            "layer_types": types,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 0],
            },
        }
        return own | sizes

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read the sizes of the delta rule, which layers have one, and the rotated part."""
        layers = config["num_hidden_layers"]
        recurrent = data.get("attention.recurrent_layers")
        if recurrent is None:
            each = data.get("full_attention_interval", FULL_ATTENTION_INTERVAL)
            recurrent = [bool((i + 1) % each) for i in range(layers)]
        heads = data.need("ssm.time_step_rank")
        part = data.need("rope.dimension_count") / config["head_dim"]
        rope = {**config["rope_parameters"], "partial_rotary_factor": part}
        if sections := data.get("rope.dimension_sections"):
            rope["mrope_section"] = list(sections[:3])
        return {
            "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
            "linear_num_key_heads": data.need("ssm.group_count"),
            "linear_num_value_heads": heads,
            "linear_key_head_dim": data.need("ssm.state_size"),
            "linear_value_head_dim": data.need("ssm.inner_size") // heads,
            "linear_conv_kernel_dim": data.need("ssm.conv_kernel"),
            "partial_rotary_factor": part,
            "rope_parameters": rope,
        }

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return what `gguf_config` reads; positions of a text have one number, so any sections of
        them rotate alike."""
        traits = dims.traits
        if not traits.delta or traits.delta[2] != traits.delta[3]:
            raise UnknownTrait(
                "llama.cpp has no such gated delta rule",
                expected="layers with one, whose keys are as wide as values",
                received=", ".join(map(str, traits.delta)) or "none",
            )
        key_heads, heads, key_width, width = traits.delta
        pairs = (traits.rotary_width or dims.head_dim) // 2
        rope = config.get("rope_parameters") or {}
        sections = rope.get("mrope_section") or [pairs, 0, 0]
        return {
            "attention.recurrent_layers": [not traits.attends(i) for i in range(dims.layers)],
            "rope.dimension_sections": [*map(int, sections), 0],
            "ssm.conv_kernel": traits.taps,
            "ssm.inner_size": heads * width,
            "ssm.state_size": key_width,
            "ssm.time_step_rank": heads,
            "ssm.group_count": key_heads,
        }

    @classmethod
    def gguf_known_as(cls, name: str) -> str:
        return name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")

    @classmethod
    def gguf_function(cls, name: str) -> Any:
        import numpy as np

        if not name.endswith("A_log"):
            return None
        return (lambda decay: -np.exp(decay)), (lambda stored: np.log(-stored))

    @classmethod
    def gguf_columns(cls, name: str, dims: ModelDims) -> np.ndarray | None:
        if not name.endswith("linear_attn.out_proj.weight"):
            return None
        return _by_turns(dims, dims.traits.delta[3])

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Put heads of values that share a key next to each other; files have the first of every
        key, then the second ones. A norm's weight is 1 + w there."""
        import numpy as np

        place = name.partition("linear_attn.")[2]
        if name.endswith("norm.weight") and place != "norm.weight":
            return weights - 1.0
        if place in ("in_proj_z.weight", "in_proj_qkv.weight", "conv1d.weight"):
            width = dims.traits.delta[3]
        elif place in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
            width = 1
        else:
            return weights
        order = _by_turns(dims, width)
        first = len(weights) - len(order)  # queries and keys are before values
        order = np.concatenate((np.arange(first), first + order))
        weights = weights[np.argsort(order)]
        if place == "conv1d.weight":
            return weights.reshape(len(weights), 1, -1)
        return weights


def _by_turns(dims: ModelDims, width: int) -> np.ndarray:
    """Return which of transformers' rows of heads of values each row of a file is."""
    import numpy as np

    key_heads, heads, *_ = dims.traits.delta
    order = np.arange(heads * width).reshape(key_heads, heads // key_heads, width)
    return order.swapaxes(0, 1).reshape(-1)


def _mixers(config: dict[str, Any], where: str) -> tuple[str, ...]:
    layers = read_size(config, "num_hidden_layers", where)
    types = config.get("layer_types")
    if types is None:
        each = read_size(config, "full_attention_interval", where, FULL_ATTENTION_INTERVAL)
        types = ["linear_attention" if (i + 1) % each else "full_attention" for i in range(layers)]
    check_layer_types(types, KINDS, layers, where)
    if "linear_attention" not in types:
        return ()
    return tuple(KINDS[kind] for kind in types)


def _delta(config: dict[str, Any], where: str) -> tuple[int, ...]:
    key_heads = read_size(config, "linear_num_key_heads", where, 16)
    value_heads = read_size(config, "linear_num_value_heads", where, 32)
    if value_heads % key_heads:
        raise UnknownTrait(
            f"{where}: field 'linear_num_value_heads'",
            expected=f"a multiple of linear_num_key_heads ({key_heads})",
            received=value_heads,
        )
    return (
        key_heads,
        value_heads,
        read_size(config, "linear_key_head_dim", where, 128),
        read_size(config, "linear_value_head_dim", where, 128),
    )


FAMILY = Qwen3_5Text
