"""Families by `model_type`: each is the file of this folder that is named for it."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from ondevice.core.errors import ModelError
from ondevice.core.registry import method_names
from ondevice.models import families
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.families.base import Family
from ondevice.models.families.classifier import Classifier
from ondevice.models.families.configuration import architectures, tower_types

ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert")
"""Types of `ondevice.models.families.classifier`, unless they are configured as decoders."""
_WRITERS = ("LMHeadModel", "ForCausalLM")
"""How names of classes end that write text."""


@cache
def family_classes() -> dict[str, type[Family]]:
    """Map `model_type` to the family: each module of this package that sets `FAMILY`."""
    by_type = {}
    for path in Path(families.__path__[0]).glob("*.py"):
        if "\nFAMILY = " in path.read_text(encoding="utf-8"):  # the others may import a framework
            family = importlib.import_module(f"{families.__name__}.{path.stem}").FAMILY
            by_type[family.model_type] = family
    return dict(sorted(by_type.items()))


def families_with(linear: str) -> list[str]:
    """List the families whose blocks have a linear layer of this name, such as `gate_proj` of a
    gated MLP."""
    return [name for name, family in family_classes().items() if linear in family.linear_targets]


def _family(model_type: str) -> type[Family] | None:
    """Return the family in the file of that name, importing no other; None without one."""
    if (
        not model_type.isidentifier()
        or importlib.util.find_spec(f"ondevice.models.families.{model_type}") is None
    ):
        return None
    family = getattr(
        importlib.import_module(f"ondevice.models.families.{model_type}"), "FAMILY", None
    )
    if family is not None and family.model_type == model_type:
        return family
    return None


def family_for(model_type: object, where: str) -> type[Family]:
    """Return the family of `model_type`.

    Args:
        model_type: what the model's configuration says.
        where: names the configuration in the error.

    Raises:
        ModelError: the type is not supported; the hint says what to do.
    """
    family = None
    if isinstance(model_type, str):
        family = _family(model_type)
    if family is None and model_type in decoder_types():
        return AnyDecoder
    if family is None:
        raise ModelError(
            f"{where}: models of type {model_type!r} are not supported",
            expected=f"a decoder of the installed transformers, or one of {', '.join(family_classes())}",
            received=f"model_type {model_type!r}",
            hint=_what_to_do(model_type),
        )
    return family


def family_of(config: dict[str, Any], where: str) -> type[Family]:
    """Return the family of a `config.json`: an encoder's for classification, or a decoder's.

    Raises:
        ModelError: as `family_for`; or it is an encoder for which no head is known; or
            `architectures` has a wrong type.
    """
    kind = config.get("model_type")
    writes = any(name.endswith(_WRITERS) for name in architectures(config, where))
    if not isinstance(kind, str) or config.get("is_decoder") or writes or _family(kind):
        return family_for(kind, where)
    if kind in ENCODERS:
        return Classifier
    if kind not in encoder_types():
        return family_for(kind, where)
    raise ModelError(
        f"{where}: {kind} models are encoders, and no classification head is known for them",
        expected=f"an encoder with --classes ({', '.join(ENCODERS)}), or a decoder",
        received=f"model_type {kind!r}",
        hint="choose one of those; is_decoder true in config.json is for a decoder of that type",
    )


@cache
def encoder_types() -> frozenset[str]:
    """Return the types that guess hidden words, unless they are configured as decoders."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
    except ImportError:
        return frozenset()
    return frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def family_for_gguf(architecture: str, where: str) -> type[Family]:
    """Return the family of a GGUF file's `general.architecture`; ModelError as in `family_for`."""
    by_name = {
        family.gguf_architecture: family
        for family in family_classes().values()
        if family.gguf_architecture
    }
    if architecture not in by_name:
        raise ModelError(
            f"{where}: GGUF files of architecture {architecture!r} are not supported",
            expected=", ".join(by_name),
            received=architecture,
            hint="use the original safetensors model",
        )
    return by_name[architecture]


def _known_types() -> frozenset[str]:
    """Return the types that the installed transformers knows, with encoders and others."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return frozenset()
    return frozenset(CONFIG_MAPPING.keys())  # only the names: a value would import its module


@cache
def decoder_types() -> tuple[str, ...]:
    """List the types of causal language models that the installed transformers builds, those that
    also read images or sound among them."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return ()
    return tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *tower_types()}))


def _what_to_do(model_type: object) -> str:
    if model_type in method_names():
        return f"{model_type} trained this network: `ondevice eval` takes it; continue from model-ordinary next to it"
    listed = "`ondevice models --types` lists the types that can be trained"
    if not isinstance(model_type, str):
        return f"is this a folder that transformers saved? Its config.json names a model_type; {listed}"
    known = _known_types()
    if not known:
        return "transformers is not installed, which builds most types: pip install 'ondevice-train[torch]'"
    if model_type in encoder_types():
        return f"an encoder for which no head is known here: {', '.join(ENCODERS)} take --classes"
    if model_type in known:
        return f"{model_type} is not a decoder: choose a type that generates text; {listed}"
    return f"a newer transformers may know it: pip install -U transformers; or choose another model: {listed}"
