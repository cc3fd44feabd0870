"""The models whose reversible network can be kept."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from ondevice.core.errors import ModelError, Need
from ondevice.core.traits import BlockTraits, check_traits

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims

_OF_OTHERS = ("mixers", "key_layers", "layer_input", "output_scale", "logit_cap")
KNOWN = tuple(field.name for field in fields(BlockTraits) if field.name not in _OF_OTHERS)
"""Traits that the modelling file computes, with queries, keys and values of one stream."""


def check_family(dims: ModelDims, crossed: bool = False) -> None:
    """Refuse a model whose training could not be kept.

    Args:
        crossed: queries are of another stream than keys and values (`coupling: paper`).

    Raises:
        ModelError: the modelling file does not know the family, or a trait of its blocks.
    """
    # The modelling file calls each block's norms, `self_attn` and `mlp`.
    if not dims.gated:
        raise ModelError(
            "revffn does not train this family",
            expected="RMS norms, rotary embedding, a gated MLP",
            received=dims.family,
            needs=Need.TRAINS_ALL,
        )
    what = "method revffn"
    if crossed:
        what = "method revffn with coupling: paper"
    check_traits(dims, what, ("windows",) if crossed else KNOWN)
