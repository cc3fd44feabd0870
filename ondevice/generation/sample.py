"""Draw tokens one at a time from the logits of a model or a program, each with its probability."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Token:
    """A token that was drawn.

    Attributes:
        id: of the vocabulary.
        log_probability: natural logarithm, before temperature and top-p.
        top: the requested number of likeliest tokens with theirs, the likeliest first.
        ends: it ends the text, and is not part of it.
    """

    id: int
    log_probability: float
    top: tuple[tuple[int, float], ...]
    ends: bool


def draw(
    feed: Callable[[Sequence[int]], Any],
    ids: Sequence[int],
    ends: frozenset[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    top: int = 0,
) -> Iterator[Token]:
    """Draw tokens until one ends the text or there are `max_new_tokens`; greedy at temperature 0.

    Args:
        feed: reads the next tokens, and returns the logits of the one after them, float32 [vocab].
        ids: the prompt.
        ends: tokens that end the text.
        top_p: draw among the likeliest tokens whose probabilities reach this sum, 0 < top_p <= 1.
        seed: the same seed draws the same tokens on the same machine; None takes a random seed.
        top: how many of the likeliest tokens to report with each.

    Raises:
        ConfigError: the prompt is empty, or a number is out of range.
    """
    import torch

    if not ids or max_new_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            "generation",
            expected="a prompt, max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1",
            received=f"{len(ids)} tokens, max_new_tokens {max_new_tokens}, "
            f"temperature {temperature}, top_p {top_p}",
        )
    # Its own random numbers, on the CPU: draws do not depend on the device or on other requests.
    numbers = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
    new: Sequence[int] = ids
    for _ in range(max_new_tokens):
        logits = torch.as_tensor(feed(new))
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = _draw(logits / temperature, top_p, numbers)
        logs = torch.log_softmax(logits, -1)
        likeliest: tuple[tuple[int, float], ...] = ()
        if top:
            best = torch.topk(logs, top)
            likeliest = tuple(zip(best.indices.tolist(), best.values.tolist()))
        yield Token(token, float(logs[token]), likeliest, token in ends)
        if token in ends:
            return
        new = [token]


def _draw(logits: Tensor, top_p: float, numbers: Any) -> int:
    """Draw from the likeliest tokens whose probabilities sum to at least `top_p`."""
    import torch

    probabilities, order = torch.softmax(logits.double(), -1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    nucleus = torch.where(before < top_p, probabilities, 0.0)  # the likeliest always stays
    return int(order[torch.multinomial(nucleus, 1, generator=numbers)])
