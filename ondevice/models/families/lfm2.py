"""`lfm2`: LFM2 and LFM2.5, dense: in most layers a short gated convolution is in the place of
attention; norms of q and k, Llama's MLP under other names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.traits import CONVOLUTION, BlockTraits
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

NORMS = {
    "before_attention": "operator_norm",
    "before_mlp": "ffn_norm",
    "q": "self_attn.q_layernorm",
    "k": "self_attn.k_layernorm",
}
LINEARS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.out_proj",
    "conv_in": "conv.in_proj",
    "conv_out": "conv.out_proj",
    "gate_proj": "feed_forward.w1",
    "up_proj": "feed_forward.w3",
    "down_proj": "feed_forward.w2",
}
KINDS = {"full_attention": "attention", "conv": CONVOLUTION}


class Lfm2(TraitFamily):
    """No biases. The norm before the head is named for the embedding."""

    model_type = "lfm2"
    gguf_architecture = "lfm2"
    linear_targets = tuple(LINEARS.values())
    linear_parents = dict.fromkeys(LINEARS.values(), "")
    last_norm = "model.embedding_norm"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        config = {**config, "intermediate_size": _intermediate(config, where)}
        return lfm2_dims("lfm2", config, where)

    def attention_branch(
        self, i: int, h: Tensor, position: Any, mask: Tensor | None = None
    ) -> Tensor:
        """Compute the mixer of block `i` with the norm before it, without the residual."""
        if self.dims.traits.attends(i):
            return super().attention_branch(i, h, position, mask)
        from ondevice.nn.short_conv import short_conv

        layer: Any = self.layer(i)
        b, c, x = layer.conv.in_proj(layer.operator_norm(h)).chunk(3, -1)
        places = None
        if len(position) > 2:
            places = position[2]
        mixed = short_conv(b * x, layer.conv.conv.weight.squeeze(1), places)
        return layer.conv.out_proj(c * mixed)

    def mlp_branch(self, i: int, h: Tensor) -> Tensor:
        layer: Any = self.layer(i)
        return layer.feed_forward(layer.ffn_norm(h))

    def mlp_of(self, i: int, x_ND: Tensor) -> Tensor:
        layer: Any = self.layer(i)
        return layer.feed_forward(x_ND)

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does: layers with a convolution and such with attention
        take turns. `block_dim` is for mlx-lm, as in published files."""
        types = ["full_attention" if i % 2 else "conv" for i in range(sizes["num_hidden_layers"])]
        own = {"block_dim": sizes["hidden_size"], "block_auto_adjust_ff_dim": False}
        return {"layer_types": types, **own, **sizes}

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read which layers convolve: they have no heads of keys and values."""
        heads = data.need("attention.head_count_kv")
        if not isinstance(heads, list):
            heads = [heads] * config["num_hidden_layers"]
        return {
            "num_key_value_heads": max(heads),
            "layer_types": ["full_attention" if count else "conv" for count in heads],
            "conv_L_cache": data.need("shortconv.l_cache"),
            "block_auto_adjust_ff_dim": False,
            "block_dim": config["hidden_size"],
            "norm_eps": config["rms_norm_eps"],
        }

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return the taps, and the heads of keys and values of each layer."""
        traits = dims.traits
        heads = [0 if traits.mixer(i) == CONVOLUTION else dims.kv_heads for i in range(dims.layers)]
        return {
            "attention.head_count_kv": heads,
            "shortconv.l_cache": traits.taps,
            "feed_forward_length": dims.intermediate,
        }

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Give a convolution's weight the dimension that files have not."""
        if name.endswith("conv.conv.weight"):
            return weights.reshape(len(weights), 1, -1)
        return weights


def lfm2_dims(
    family: str, config: dict[str, Any], where: str, paths: dict[str, str] = LINEARS
) -> ModelDims:
    """Read the dimensions of a decoder of attention and short convolutions; `paths` has its parts
    (`BlockTraits.paths`)."""
    if config.get("conv_bias"):
        raise UnknownTrait(
            f"{where}: field 'conv_bias'", expected="false", received=config["conv_bias"]
        )
    mixers = _mixers(config, where)
    traits = BlockTraits(
        norms=tuple(NORMS.items()),
        mixers=mixers,
        taps=read_size(config, "conv_L_cache", where, 3) if mixers else 0,
        paths=(*paths.items(), ("taps", "conv.conv.weight")),
    )
    sizes = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "rope_theta": 1e6,
        **config,
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        "tie_word_embeddings": config.get("tie_embedding", config.get("tie_word_embeddings", True)),
    }
    return decoder_dims(
        family, sizes, where, qkv_bias=False, o_bias=False, mlp_bias=False, traits=traits
    )


def _mixers(config: dict[str, Any], where: str) -> tuple[str, ...]:
    layers = read_size(config, "num_hidden_layers", where)
    types = config.get("layer_types")
    if types is None:
        attend = config.get("full_attn_idxs")
        attend = range(layers) if attend is None else attend
        types = ["full_attention" if i in attend else "conv" for i in range(layers)]
    check_layer_types(types, KINDS, layers, where)
    if "conv" not in types:
        return ()
    return tuple(KINDS[kind] for kind in types)


def _intermediate(config: dict[str, Any], where: str) -> int:
    """Return the MLP's width, which a configuration may say before it is adjusted."""
    field = "intermediate_size"
    if config.get("block_ff_dim") is not None:
        field = "block_ff_dim"
    width = read_size(config, field, where, 12288)
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = read_size(config, "block_multiple_of", where, 256)
    return multiple * -(-int(factor * width) // multiple)


FAMILY = Lfm2
