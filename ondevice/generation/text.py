"""The text of an answer while its tokens come: whole characters only, and nothing of a text that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.generation.sample import Token

HALF = "\ufffd"
"""The text that a tokenizer gives for bytes that are no character yet."""


class Text:
    """The text of the tokens so far.

    Args:
        tokenizer: of the model.
        stop: texts that end the answer, and are no part of it.

    Attributes:
        given: letters that were given out.
        stopped: one of `stop` has come.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.ids: list[int] = []
        self.given, self.stopped = 0, False

    def add(self, token: int) -> str:
        """Take a token; return what is whole now and cannot become a stop text."""
        self.ids.append(token)
        whole = self.decode()
        ends = [place for word in self.stop if (place := whole.find(word)) >= 0]
        if ends:
            self.stopped = True
            return self._new(whole[: min(ends)])
        certain = whole.rstrip(HALF)
        held = max((_overlap(certain, word) for word in self.stop), default=0)
        return self._new(certain[: len(certain) - held])

    def rest(self) -> str:
        """Return what was held back."""
        return self._new(self.decode())

    def decode(self) -> str:
        """Return all of it, with what is half."""
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True))

    def _new(self, text: str) -> str:
        new, self.given = text[self.given :], max(self.given, len(text))
        return new


@dataclass
class Ending:
    """How an answer ended: `finish` is stop or length; `tokens` were drawn, the one that ends it included."""

    finish: str = "length"
    tokens: int = field(default=0)


def pieces(
    tokens: Iterable[Token], tokenizer: Any, stop: Sequence[str], ending: Ending
) -> Iterator[str]:
    """Yield the text of tokens as it becomes certain; `ending` is filled in."""
    text = Text(tokenizer, stop)
    for token in tokens:
        ending.tokens += 1
        if token.ends:
            ending.finish = "stop"
            break
        if piece := text.add(token.id):
            yield piece
        if text.stopped:
            ending.finish = "stop"
            return
    if piece := text.rest():
        yield piece


def _overlap(text: str, word: str) -> int:
    """Return how many letters at the end of `text` begin `word`."""
    return next(
        (n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0
    )
