"""A model with its weights and its tokenizer, ready to be trained around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.core.dims import ModelDims
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.families.any_dims import AnyDims
from ondevice.models.families.base import Family, UnknownTrait, trait_sentence
from ondevice.models.sources.resolve import SourceInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class LoadedModel:
    """A model that is ready to be trained around: evaluation mode, no gradients, attention through
    sdpa.

    Attributes:
        model: transformers' causal language model.
        tokenizer: its tokenizer, with a padding token.
        dims: its sizes.
        family: its blocks by part.
        source: its origin.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dims: ModelDims
    family: Family
    source: SourceInfo


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    family: type[Family],
    info: SourceInfo,
    dims: ModelDims | None = None,
) -> LoadedModel:
    """Put a model into the state that every method starts from; `dims` if they are known."""
    model.eval().requires_grad_(False)
    # Only gradients look at the padding index, and padding is never trained on; quantised
    # embeddings cannot be exported with it.
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010
    try:
        wrapped = AnyDecoder(model, dims.trait) if isinstance(dims, AnyDims) else family(model)
    except UnknownTrait as reason:
        wrapped = AnyDecoder(model, trait_sentence(reason))
    return LoadedModel(model, tokenizer, wrapped.dims, wrapped, info)
