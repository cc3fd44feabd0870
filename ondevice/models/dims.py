"""Read the sizes of a decoder and its weights' shapes from its configuration.

The fields that Hugging Face decoders share in `config.json` are read here, with readable errors.
Importing this module loads no framework.
"""

from __future__ import annotations

from typing import Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import LLAMA, BlockTraits

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose table is a function of only the position. `dynamic` and `longrope` are
not."""


class UnknownTrait(ModelError):
    """A trait that the family's block does not have; transformers can still run the model."""


def trait_sentence(reason: UnknownTrait) -> str:
    """Say in a sentence what a family does not do."""
    words = reason.message.rpartition(": ")[2]
    if reason.received:
        return f"{words} ({reason.received}; known: {reason.expected})"
    return words


def decoder_dims(
    family: str,
    config: dict[str, Any],
    where: str,
    *,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    traits: BlockTraits = LLAMA,
    rope_types: tuple[str, ...] = (),
) -> ModelDims:
    """Read the dimensions of a Llama-like decoder; `rope_parameters` (transformers 5) and
    `rope_theta` both do.

    Raises:
        ModelError: a size is missing or not a positive integer, or the weights are quantised.
        UnknownTrait: the activation is not SiLU, or the rotary embedding's table depends on the
            length.
    """
    refuse_quantised(config, where)
    hidden = read_size(config, "hidden_size", where)
    heads = read_size(config, "num_attention_heads", where)
    kv_heads = read_size(config, "num_key_value_heads", where, heads)
    head_dim = read_size(config, "head_dim", where, max(1, hidden // heads))
    if heads % kv_heads:
        expected = f"a divisor of num_attention_heads ({heads})"
        raise ModelError(
            f"{where}: field 'num_key_value_heads'", expected=expected, received=kv_heads
        )
    wanted = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[traits.activation]
    field = "hidden_act"
    if "hidden_activation" in config:
        field = "hidden_activation"
    if config.get(field, wanted) != wanted:
        raise UnknownTrait(f"{where}: field '{field}'", expected=wanted, received=config[field])
    theta, rope_type = _rope(config, where, rope_types or ROPE_TYPES, bool(traits.rotary_width))
    return ModelDims(
        family=family,
        layers=read_size(config, "num_hidden_layers", where),
        hidden=hidden,
        intermediate=read_size(config, "intermediate_size", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=read_size(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        rope_theta=theta,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=read_size(config, "max_position_embeddings", where, 2048),
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        rope_type=rope_type,
        traits=traits,
    )


def refuse_quantised(config: dict[str, Any], where: str) -> None:
    """Raise ModelError if the weights are stored in a format that transformers would have to
    unpack."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{where}: the weights are quantised ({method})",
            expected="float32, bfloat16 or float16 weights",
            hint="give the model's original weights or a .gguf file; a method quantises by itself",
        )


def read_size(config: dict[str, Any], field: str, where: str, default: int | None = None) -> int:
    """Read an integer of 1 or more; null is the default. ModelError for another value."""
    value = config.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{where}: field '{field}'", expected="an integer of 1 or more", received=value
        )
    return value


def _rope(
    config: dict[str, Any], where: str, types: tuple[str, ...], partial: bool
) -> tuple[float, str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in rope:  # transformers 5 keeps one set for each kind of layer
        rope = rope["full_attention"]
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in types:
        message = f"{where}: the rotary embedding's scaling is not supported"
        raise UnknownTrait(message, expected=", ".join(types), received=rope_type)
    if not partial and config.get(
        "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)
    ) not in (1.0, None):
        raise UnknownTrait(f"{where}: field 'partial_rotary_factor'", expected="1.0")
    return float(rope.get("rope_theta", config.get("rope_theta") or 10000.0)), rope_type
