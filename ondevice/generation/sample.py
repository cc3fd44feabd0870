"""Text from a loaded model a token at a time, with each probability: for answers that are shown as they grow."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.models.load import LoadedModel


@dataclass(frozen=True)
class Token:
    """A token that was drawn.

    Attributes:
        id: of the vocabulary.
        log_probability: natural logarithm, before temperature and top-p.
        top: the likeliest tokens with theirs, the likeliest first; as many as were asked for.
        ends: it ends the answer, and is no part of its text.
    """

    id: int
    log_probability: float
    top: tuple[tuple[int, float], ...]
    ends: bool


def sample(loaded: LoadedModel, ids: Sequence[int], **options: Any) -> Iterator[Token]:
    """Draw tokens from a loaded model, which keeps keys and values; arguments as for `draw`."""
    import torch

    model: Any = loaded.model
    device, cache = loaded.family.head_weight.device, None

    def feed(new: Sequence[int]) -> Tensor:
        nonlocal cache
        with torch.no_grad():
            output = model(
                torch.tensor([list(new)], device=device), past_key_values=cache, use_cache=True
            )
        cache = output.past_key_values
        return output.logits[0, -1].float().cpu()

    return draw(feed, ids, end_ids(loaded), **options)


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
    """Draw tokens until one ends the answer or there are `max_new_tokens`; greedy at temperature 0.

    Args:
        feed: reads tokens behind those that it has read, and gives the logits of the next one, float32 [vocab].
        ids: the prompt.
        ends: tokens that end an answer.
        top_p: draw among the likeliest tokens whose probabilities reach this sum, 0 < top_p <= 1.
        seed: the same seed draws the same tokens on the same machine; None draws anew.
        top: how many of the likeliest tokens to report with each.

    Raises:
        ConfigError: the prompt is empty, or a number is out of range.
    """
    import torch

    if not ids or max_new_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
        received = f"{len(ids)} tokens, max_new_tokens {max_new_tokens}, temperature {temperature}, top_p {top_p}"
        expected = "a prompt, max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1"
        raise ConfigError("generation", expected=expected, received=received)
    # A generator of its own, on the CPU: the seed's draws do not depend on the device or on other requests.
    drawn = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
    given: Sequence[int] = ids
    for _ in range(max_new_tokens):
        logits = torch.as_tensor(feed(given))
        token = (
            int(logits.argmax()) if temperature == 0 else _draw(logits / temperature, top_p, drawn)
        )
        logs = torch.log_softmax(logits, -1)
        best = torch.topk(logs, top) if top else None
        pairs = () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist()))
        yield Token(token, float(logs[token]), pairs, token in ends)
        if token in ends:
            return
        given = [token]


def end_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return the tokens that end an answer: those that the model's own generation stops at."""
    stops: Any = loaded.model.generation_config.eos_token_id
    stops = loaded.tokenizer.eos_token_id if stops is None else stops
    return frozenset([stops] if isinstance(stops, int) else stops or ())


def _draw(logits: Tensor, top_p: float, drawn: Any) -> int:
    """Draw from the likeliest tokens whose probabilities sum to at least `top_p`."""
    import torch

    probabilities, order = torch.softmax(logits.double(), -1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = torch.where(before < top_p, probabilities, 0.0)  # the likeliest always stays
    return int(order[torch.multinomial(kept, 1, generator=drawn)])
