"""What a model's configuration says: the class of transformers that builds it, its language model, its sizes.

A checkpoint that also reads images or sound is loaded whole, so that adapters have the names that peft gives next to
it; text passes only through its language model. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import LLAMA, BlockTraits
from ondevice.core.untrusted import well_formed

if TYPE_CHECKING:
    from ondevice.models.families.base import Family


@cache
def tower_types() -> frozenset[str]:
    """Return the types whose class in transformers reads images or sound, and writes text."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    except ImportError:
        return frozenset()
    return frozenset(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def auto_class(model_type: object) -> Any:
    """Return transformers' class that builds a decoder of this type, with all of its towers."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    if model_type in tower_types():
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def check_decodes(config: Any, where: str) -> None:
    """Refuse a model that reads its text in an encoder.

    Args:
        config: transformers' configuration.

    Raises:
        ModelError: text is not what its decoder reads.
    """
    if config.is_encoder_decoder and config.model_type in tower_types():
        raise ModelError(
            f"{where}: {config.model_type} models read text in an encoder, and write in a decoder",
            expected="one decoder that reads and writes",
            received=f"model_type {config.model_type!r}",
            hint="choose a model without an encoder of text",
        )


def text_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` that say what its language model is.

    Fields that the file leaves out are those of transformers' configuration.
    """
    built = config_object(values)
    if built is None:
        return values
    return built.get_text_config(decoder=True).to_dict()


def config_object(values: dict[str, Any]) -> Any:
    """Return transformers' configuration of a `config.json`; None for a type that it lacks."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if values.get("model_type") not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[values["model_type"]].from_dict(_with_floats(values))


def language_model(model: Any) -> Any:
    """Return the part that text passes through; the model itself if it has no other part."""
    if model.config.model_type not in tower_types():
        return model
    return model.get_decoder()


def _with_floats(value: Any) -> Any:
    """Undo what transformers writes for a number that JSON does not have: {"__float__":
    "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(str(value["__float__"]).replace("Infinity", "inf"))
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return value


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose table is a function of only the position. `dynamic` and `longrope` are
not."""
_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
_MOST = 10_000
"""Most layers or experts: each has an entry in lists that are built before the weights are read."""


def architectures(config: dict[str, Any], where: str) -> list[str]:
    """Return the classes that a `config.json` names; ModelError unless they are a list of names.

    Args:
        where: the model, for the message.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"{where}: config.json has `architectures` of a wrong type",
            expected="a list of the names of transformers' classes",
            received=repr(names)[:100],
            hint="copy the model again",
        )
    return names


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


def check_layer_types(
    types: Collection[str], kinds: Collection[str], layers: int, where: str
) -> None:
    """Refuse a `layer_types` that has not one of `kinds` for each layer, by UnknownTrait."""
    if len(types) != layers or set(types) - set(kinds):
        raise UnknownTrait(
            f"{where}: field 'layer_types'",
            expected=f"{layers} of {' and '.join(kinds)}",
            received=", ".join(sorted(map(str, set(types)))),
        )


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


def dims_of(family: type[Family], config: dict[str, Any], where: str) -> ModelDims:
    """Read the dimensions in a configuration that comes from outside.

    Raises:
        ModelError: as `Family.dims_from_config`, or a field has a wrong type or is too large.
    """
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for field in _COUNTS:
            value = values.get(field)
            if isinstance(value, (int, float)) and value > _MOST:
                raise ModelError(
                    f"{where}: field '{field}'", expected=f"at most {_MOST}", received=value
                )
    with well_formed(where, ModelError, hint="check config.json, or copy it again"):
        return family.dims_from_config(config, where)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and its load report, whose faults are errors here.

    The import of torchao, which transformers does, warns of its own enums; that is left out, too.
    """
    from transformers.utils import logging as of_transformers

    bars = of_transformers.is_progress_bar_enabled()
    level = of_transformers.get_verbosity()
    of_transformers.disable_progress_bar()
    of_transformers.set_verbosity_error()
    enums = logging.getLogger("torch.utils._pytree")
    enums_level = enums.level
    enums.setLevel(logging.ERROR)
    try:
        yield
    finally:
        enums.setLevel(enums_level)
        of_transformers.set_verbosity(level)
        if bars:
            of_transformers.enable_progress_bar()
