"""The traits of a decoder's block: the one description that methods which own blocks read.

A family fills it in from `config.json`. A method that computes blocks itself names the traits it knows, and a block
that has another is refused by the trait's name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ModelError, Need

if TYPE_CHECKING:
    from collections.abc import Collection

LLAMA_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
"""The norms of a block by the place where they stand, and their modules in the block."""


@dataclass(frozen=True)
class BlockTraits:
    """A block; the defaults are Llama's.

    Attributes:
        norms: (place, module) of its norms; places are `before_attention`, `after_attention`, `before_mlp`,
            `after_mlp` (of a branch, before it is added to the residual), `q` and `k`.
        norm_offset: a norm's factor is 1 + w, not w.
        qk_norm_all: norms of q and k are over all heads together, not over each.
        activation: of the gate: `silu` or `gelu_tanh`.
        fused: q, k and v are one linear layer, and gate and up are one.
        rotary: of each layer, whether q and k are rotated; () is every layer.
        rotary_width: dimensions of a head that are rotated, the first ones; 0 is all.
        windows: of each layer, how many tokens a query sees, itself included; 0 is all before it. () is none.
        score_scale: factor of the scores; 0 is 1 / sqrt(head_dim).
        embedding_scale, residual_scale, logit_scale: factors of the embedding's rows, of a branch where it is added,
            and of the logits.
    """

    norms: tuple[tuple[str, str], ...] = tuple(LLAMA_NORMS.items())
    norm_offset: bool = False
    qk_norm_all: bool = False
    activation: str = "silu"
    fused: bool = False
    rotary: tuple[bool, ...] = ()
    rotary_width: int = 0
    windows: tuple[int, ...] = ()
    score_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    def rotated(self, layer: int) -> bool:
        """Return True if q and k of that layer are rotated."""
        return self.rotary[layer] if self.rotary else True

    def window(self, layer: int) -> int:
        """Return how many tokens a query of that layer sees; 0 is all."""
        return self.windows[layer] if self.windows else 0

    def shortest_window(self, otherwise: int) -> int:
        """Return the shortest window of any layer, or `otherwise` if there is none."""
        return min((window for window in self.windows if window), default=otherwise)

    def beyond(self, known: Collection[str] = ()) -> list[str]:
        """List in words what differs from Llama's block, without the traits that are known."""
        plain = BlockTraits()
        words = []
        for field in fields(self):
            if field.name not in known and getattr(self, field.name) != getattr(plain, field.name):
                words.append(_words(field.name, self))
        return words


WORDS = {
    "norm_offset": "norm weights of 1 + w",
    "qk_norm_all": "norms of q and k over all heads",
    "fused": "fused projections (q, k and v in one, gate and up in one)",
    "rotary": "layers without a rotary embedding",
    "rotary_width": "a rotary embedding of a part of each head",
    "windows": "a sliding window of attention in some layers",
    "score_scale": "a scale of the scores of its own",
    "embedding_scale": "a factor of the embedding",
    "residual_scale": "a factor of each branch",
    "logit_scale": "a factor of the logits",
}


def _words(name: str, traits: BlockTraits) -> str:
    if name == "norms":
        own = ", ".join(place.replace("_", " ") for place, _ in traits.norms)
        return f"norms at other places ({own})"
    return f"the activation {traits.activation}" if name == "activation" else WORDS[name]


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
    unknown = dims.traits.beyond((*known, "windows") if within else known)
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


LLAMA = BlockTraits()
