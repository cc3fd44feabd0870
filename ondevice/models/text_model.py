"""The language model of a checkpoint that also reads images or sound, as a model of its own.

Programs that only know models of text read this one. Its weights are the checkpoint's own memory,
and its names are those of a text model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ModelError
from ondevice.core.session import Adapter
from ondevice.models.families.any_dims import AnyDims, find_blocks
from ondevice.models.families.base import Family, in_checkpoint
from ondevice.models.families.configuration import (
    UnknownTrait,
    dims_of,
    language_model,
    quiet_transformers,
    text_fields,
    tower_types,
    trait_sentence,
)
from ondevice.models.load import load_model, read_dims, wrap
from ondevice.models.registry import family_classes, family_for
from ondevice.models.sources.resolve import config_of

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.models.load import LoadedModel

SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Language models that compute what a family does, as long as they read only text: their three
positions of a token are then one."""
_STORED = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?")
_TOWER = re.compile(_STORED.pattern + r"(?=layers\.)")


def text_dims(source: str, revision: str | None = None) -> tuple[ModelDims, type[Family]]:
    """Return sizes and family of a model, or of its language model if that is known here.

    Raises:
        ModelError: as `read_dims`.
    """
    dims = read_dims(source, revision)
    if dims.family in tower_types():
        return _of_tower(dims, *config_of(source, revision))
    return dims, family_for(dims.family, source)


def _of_tower(
    whole: ModelDims, values: dict[str, Any], where: str
) -> tuple[ModelDims, type[Family]]:
    """Return sizes and family of a checkpoint's language model; the whole's if it is not known."""
    fields = _fields(values)
    known = family_classes().get(str(fields["model_type"]))
    if known is not None:
        try:
            return dims_of(known, fields, where), known
        except UnknownTrait as reason:
            if isinstance(whole, AnyDims):
                whole = replace(whole, trait=trait_sentence(reason))
    return whole, family_for(whole.family, where)


def load_text_model(source: str, **options: Any) -> LoadedModel:
    """Load a model, of a checkpoint its language model; adapters keep the checkpoint's names.

    Options and errors are those of `load_model`.
    """
    whole = load_model(source, **options)
    loaded = text_model(whole)
    if loaded is whole:
        return loaded
    family = in_checkpoint(type(loaded.family), find_blocks(whole.model)[0])
    return replace(loaded, family=family(loaded.model))


def text_family(
    source: str, revision: str | None = None
) -> tuple[ModelDims, type[Family], dict[str, Any]]:
    """Return `text_dims` with a family that names adapters as `load_text_model` does, and the
    fields of the language model's configuration."""
    whole = read_dims(source, revision)
    values, where = config_of(source, revision)
    if whole.family not in tower_types():
        return whole, family_for(whole.family, source), values
    dims, family = _of_tower(whole, values, where)
    if dims.whole or not isinstance(whole, AnyDims):
        return dims, family, values
    return dims, in_checkpoint(family, whole.blocks), _fields(values)


def text_name(stored: str) -> str:
    """Return the name that a checkpoint's tensor has in its language model as a model of text."""
    match = _STORED.match(stored)
    if match is None:
        return stored
    rest = stored[match.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def text_model(loaded: LoadedModel) -> LoadedModel:
    """Return the language model of a checkpoint as a model of text; others as they are.

    Raises:
        ModelError: its weights are not those of the family.
    """
    config: Any = loaded.model.config
    fields = _fields(config.to_dict())
    known = family_classes().get(str(fields["model_type"]))
    if config.model_type not in tower_types() or known is None:
        return loaded
    try:
        dims_of(known, fields, loaded.source.source)
    except UnknownTrait:
        return loaded
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tower = language_model(loaded.model)
    head: Any = loaded.model.get_output_embeddings()
    weights = {f"model.{name}": value for name, value in tower.state_dict().items()}
    weights["lm_head.weight"] = head.weight
    with quiet_transformers():
        made = AutoConfig.for_model(**fields)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
        try:
            model.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            raise ModelError(
                f"the language model of {loaded.source.source} is not a {known.model_type} model",
                received=str(error).strip().splitlines()[0],
            ) from None
        model.model.rotary_emb = type(model.model.rotary_emb)(made)
    for name, buffer in list(model.model.named_buffers()):
        if buffer.is_meta:
            owner, _, last = name.rpartition(".")
            setattr(model.model.get_submodule(owner), last, tower.get_buffer(name))
    if made.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.generation_config = loaded.model.generation_config
    return wrap(model, loaded.tokenizer, known, loaded.source)


def is_in_tower(adapter: Adapter) -> bool:
    """Return True if an adapter has the names of a checkpoint that has several towers."""
    return any(_TOWER.match(linear) for linear in adapter.linears)


def with_text_names(adapter: Adapter) -> Adapter:
    """Return an adapter of a checkpoint's language model under the names of a text model."""
    tensors = {_TOWER.sub("model.", name): value for name, value in adapter.tensors.items()}
    return replace(adapter, tensors=tensors)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return a language model's own configuration, as that of the family that computes the same."""
    fields = text_fields(values)
    kind = str(fields.get("model_type"))
    if kind in SAME:
        fields = {**fields, "model_type": SAME[kind]}
        rope = dict(fields.get("rope_parameters") or {})
        for name in ("mrope_section", "mrope_interleaved"):
            rope.pop(name, None)
        fields["rope_parameters"] = rope
    return fields
