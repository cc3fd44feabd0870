"""Draw tokens one at a time from the logits of a model or a program, each with its probability."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ondevice.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.artifact.adapter import Adapter


class TokenModel(Protocol):
    """What predicts the next token: a model in PyTorch, or a program in its runtime. It remembers
    the tokens it has read.

    Attributes:
        context_tokens: most tokens of a prompt and its text; 0 for no limit.
        piece_tokens: most tokens that `feed` reads in one pass.
    """

    context_tokens: int
    piece_tokens: int

    def feed(self, ids: Sequence[int]) -> Any:
        """Read the next tokens; return the logits of the one after them, float32 [vocab]."""

    def rewind(self, tokens: int) -> int:
        """Forget all but the first `tokens` tokens, or more; return how many are remembered."""
        ...

    def use(self, adapter: Adapter | None) -> None:
        """Change the adapter, and forget what was read; ArtifactError if it does not fit."""


@dataclass(frozen=True)
class Token:
    """A token that was drawn, or one of a prompt.

    Attributes:
        id: of the vocabulary.
        log_probability: natural logarithm, before anything of `Sampling`; None for the first token
            of a prompt.
        top: the requested number of likeliest tokens with theirs, the likeliest first.
        ends: it ends the text, and is not part of it.
    """

    id: int
    log_probability: float | None
    top: tuple[tuple[int, float], ...] = ()
    ends: bool = False


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the defaults take the likeliest token.

    Logits change in this order: `logit_bias`, `repetition_penalty`, `presence_penalty` and
    `frequency_penalty`, `temperature`. Of the tokens that `top_k` leaves, `top_p` and then `min_p`
    leave some.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: keep the likeliest tokens whose probabilities reach this sum, 0 < top_p <= 1.
        top_k: keep so many likeliest tokens; 0 for all.
        min_p: keep tokens with at least this share of the likeliest token's probability.
        repetition_penalty: divides positive logits, and multiplies negative ones, of all tokens of
            the prompt and the text.
        presence_penalty: subtracted from the logit of each token of the text.
        frequency_penalty: subtracted as often as the token occurs in the text.
        logit_bias: added to the logits of tokens, by id.
        seed: the same seed draws the same tokens on the same machine; None takes a random seed.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        fits = self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0
        if not (fits and 0 <= self.min_p <= 1 and self.repetition_penalty > 0):
            raise ConfigError(
                "sampling",
                expected="temperature >= 0, 0 < top_p <= 1, top_k >= 0, 0 <= min_p <= 1, "
                "repetition_penalty > 0",
                received=f"temperature {self.temperature}, top_p {self.top_p}, "
                f"top_k {self.top_k}, min_p {self.min_p}, "
                f"repetition_penalty {self.repetition_penalty}",
            )


class Sampler:
    """Draws the tokens of one text. Any number of them can take turns.

    Args:
        prompt: the tokens before the text.
        ends: tokens that end the text.
        top: how many of the likeliest tokens to report with each.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        ends: frozenset[int] = frozenset(),
        top: int = 0,
    ) -> None:
        import torch

        self.sampling = sampling
        self.ends = ends
        self.top = top
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        # On the CPU: draws do not depend on the device or on other requests.
        self._numbers = torch.Generator().manual_seed(seed)
        self._drawn: Counter[int] = Counter()
        self._seen: set[int] = set()
        if sampling.repetition_penalty != 1:
            self._seen = set(prompt)

    def next(self, logits: Tensor) -> Token:
        """Draw the next token from the model's logits, float32 [vocab]."""
        import torch

        changed = self._changed(logits)
        if self.sampling.temperature == 0:
            token = int(changed.argmax())
        else:
            token = _draw(changed / self.sampling.temperature, self.sampling, self._numbers)
        self._drawn[token] += 1
        logs = torch.log_softmax(logits, -1)
        return Token(token, float(logs[token]), likeliest(logs, self.top), token in self.ends)

    def _changed(self, logits: Tensor) -> Tensor:
        """Return the logits with the bias and the penalties."""
        import torch

        bias, s = self.sampling.logit_bias, self.sampling
        penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        if not bias and penalties == (1, 0, 0):
            return logits
        logits = logits.clone()
        if bias:
            logits[list(bias)] += torch.tensor(list(bias.values()), dtype=logits.dtype)
        if s.repetition_penalty != 1 and (seen := list(self._seen | self._drawn.keys())):
            old = logits[seen]
            penalty = s.repetition_penalty
            logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
        if self._drawn:
            counts = torch.tensor(list(self._drawn.values()), dtype=logits.dtype)
            lost = s.presence_penalty + s.frequency_penalty * counts
            logits[list(self._drawn)] -= lost
        return logits


class PlainSampler:
    """Draws from all tokens by one uniform number and without a sort, or takes the likeliest one.

    For many answers at once, in numpy on logits of any framework; it draws other tokens than
    `Sampler` does with the same seed.
    """

    def __init__(
        self, temperature: float, seed: int = 0, ends: frozenset[int] = frozenset()
    ) -> None:
        self.temperature = temperature
        self.ends = ends
        self._numbers = np.random.default_rng(seed)

    def next(self, logits: Any) -> Token:
        """Draw the next token from the model's logits, float32 [vocab]."""
        values = np.asarray(logits, dtype=np.float64)
        token = int(values.argmax())
        if self.temperature:
            sums = np.exp((values - values[token]) / self.temperature).cumsum()
            number = self._numbers.random() * sums[-1]
            token = min(int(np.searchsorted(sums, number, side="right")), len(sums) - 1)
        return Token(token, None, ends=token in self.ends)


def answers_of(
    model: TokenModel, prompt: Sequence[int], samplers: Sequence[PlainSampler], most_tokens: int
) -> list[list[int]]:
    """Return the tokens of each sampler's answer to one prompt, which is read once if the model
    can go back to its end."""
    model.rewind(0)
    read = model.feed(prompt)
    answers = []
    for number, sampler in enumerate(samplers):
        logits = read
        if number and (start := model.rewind(len(prompt))) < len(prompt):
            logits = model.feed(prompt[start:])
        drawn: list[int] = []
        while len(drawn) < most_tokens:
            if drawn:
                logits = model.feed(drawn[-1:])
            token = sampler.next(logits)
            drawn.append(token.id)
            if token.ends:
                break
        answers.append(drawn)
    return answers


def draw(
    feed: Callable[[Sequence[int]], Any],
    ids: Sequence[int],
    ends: frozenset[int],
    *,
    max_new_tokens: int,
    top: int = 0,
    prompt: Sequence[int] = (),
    **options: Any,
) -> Iterator[Token]:
    """Draw tokens until one ends the text or there are `max_new_tokens`.

    Args:
        feed: reads the next tokens, and returns the logits of the one after them, float32 [vocab].
        ids: the part of the prompt that is not read yet.
        ends: tokens that end the text.
        top: how many of the likeliest tokens to report with each.
        prompt: all of the prompt, for `repetition_penalty`; `ids` by default.
        options: of `Sampling`.

    Raises:
        ConfigError: the prompt is empty, or a number is out of range.
    """
    import torch

    if not ids or max_new_tokens < 1:
        raise ConfigError(
            "generation",
            expected="a prompt, max_new_tokens >= 1",
            received=f"{len(ids)} tokens, max_new_tokens {max_new_tokens}",
        )
    sampler = Sampler(Sampling(**options), prompt or ids, ends, top)
    new: Sequence[int] = ids
    for _ in range(max_new_tokens):
        token = sampler.next(torch.as_tensor(feed(new)))
        yield token
        if token.ends:
            return
        new = [token.id]


def likeliest(logs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens with their log probabilities, the likeliest first."""
    if not count:
        return ()
    best = logs.topk(min(count, len(logs)))
    return tuple(zip(best.indices.tolist(), best.values.tolist()))


def _draw(logits: Tensor, sampling: Sampling, numbers: Any) -> int:
    """Draw from the tokens that `top_k`, `top_p` and `min_p` leave; the likeliest always stays."""
    import torch

    probabilities, order = torch.softmax(logits.double(), -1).sort(descending=True, stable=True)
    if sampling.top_k:
        probabilities = probabilities[: sampling.top_k]
        probabilities = probabilities / probabilities.sum()
    before = probabilities.cumsum(-1) - probabilities
    stays = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
    nucleus = torch.where(stays, probabilities, 0.0)
    return int(order[torch.multinomial(nucleus, 1, generator=numbers)])
