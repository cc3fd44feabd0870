"""Refusals of blocks whose traits a method does not know, by the traits' names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from ondevice.core.dims import LLAMA, BlockTraits
from ondevice.core.errors import ModelError, Need

WORDS = {
    "norm_offset": "norm weights of 1 + w",
    "qk_norm_all": "norms of q and k over all heads",
    "fused": "fused projections (q, k and v in one, gate and up in one)",
    "rotary": "layers without a rotary embedding",
    "rotary_width": "a rotary embedding of a part of each head",
    "windows": "a sliding window of attention in some layers",
    "mixers": "short convolutions in the place of attention in some layers",
    "delta": "a gated delta rule in the place of attention in some layers",
    "output_gate": "a gate of attention's output",
    "head_dims": "heads of several widths",
    "key_heads": "another number of heads of keys in some layers",
    "mlp_widths": "MLPs of several widths",
    "key_layers": "keys and values that layers share",
    "keys_as_values": "keys that are values, too",
    "value_norm": "a norm of values",
    "layer_input": "embeddings of the tokens for each layer",
    "output_scale": "a factor of each block's output",
    "score_scale": "a scale of the scores of its own",
    "embedding_scale": "a factor of the embedding",
    "residual_scale": "a factor of each branch",
    "logit_scale": "a factor of the logits",
    "logit_cap": "a soft cap of the logits",
}


_PARTS = ("taps", "paths")
"""Sizes and names that no trait has without another."""


def beyond_llama(traits: BlockTraits, known: Collection[str] = ()) -> list[str]:
    """List in words what differs from Llama's block, without the traits that are known."""
    unknown = [field.name for field in fields(traits) if field.name not in (*known, *_PARTS)]
    if traits.delta and "delta" in unknown:  # says which mixer it is
        unknown = [name for name in unknown if name != "mixers"]
    return [
        _words(name, traits) for name in unknown if getattr(traits, name) != getattr(LLAMA, name)
    ]


def _words(name: str, traits: BlockTraits) -> str:
    if name == "norms":
        own = ", ".join(place.replace("_", " ") for place, _ in traits.norms)
        return f"norms at other places ({own})"
    if name == "activation":
        return f"the activation {traits.activation}"
    return WORDS[name]


def check_traits(
    dims: Any, what: str, known: Collection[str] = (), length_tokens: int | None = None
) -> None:
    """Refuse a block that has a trait which `what`, such as "method revffn", does not do.

    Args:
        known: fields of `BlockTraits`.
        length_tokens: of the longest sequence; a window that it stays within hides nothing.

    Raises:
        ModelError: naming the traits, and the methods that work.
    """
    within = length_tokens is not None and length_tokens <= dims.traits.shortest_window(
        length_tokens
    )
    unknown = beyond_llama(dims.traits, (*known, "windows") if within else known)
    if not unknown:
        return
    raise ModelError(
        f"a block of {dims.family} has {'; '.join(unknown)}, which {what} does not do",
        expected="Llama's block, or a method that takes every decoder",
        received=f"model_type {dims.family!r}",
        hint="docs/howto/models.md has a table of what works with which family",
        needs=Need.ANY_DECODER,
    )


def check_length(dims: Any, length_tokens: int) -> None:
    """Refuse a sequence longer than a window of attention, for attention that is only causal.

    Raises:
        ModelError: with the longest length that is possible.
    """
    window = dims.traits.shortest_window(length_tokens)
    if length_tokens > window:
        raise ModelError(
            "the sequence is longer than the model's sliding window of attention",
            expected=f"at most {window} tokens",
            received=f"{length_tokens} tokens",
            hint=f"set data.max_length_tokens to {window} or less",
        )
