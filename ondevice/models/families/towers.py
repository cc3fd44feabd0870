"""Checkpoints that also read images or sound: the class that builds one, and its language model.

The whole checkpoint is loaded, so that adapters have the names that peft gives next to it. Text
passes only through its language model.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ondevice.core.errors import ModelError


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
