"""The text of tokens as they are generated: only complete characters, and nothing of a stop
text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.generation.sample import Token

INCOMPLETE = "\ufffd"
"""The text that a tokenizer returns for bytes that do not form a character yet."""


@dataclass
class Ending:
    """How a text ended.

    Attributes:
        finish: `stop` or `length`.
        tokens: tokens that were drawn, including the one that ended the text.
    """

    finish: str = "length"
    tokens: int = 0


@dataclass(frozen=True)
class Part:
    """A part of a text: what became certain, and the tokens that end in it."""

    text: str
    tokens: tuple[Token, ...]


class Text:
    """The text of tokens as they come.

    Args:
        stop: texts that end the generated text, and are not part of it.

    Attributes:
        ending: how it ended, or how many tokens it has so far.
        is_done: a token or a stop text has ended it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.ending = Ending()
        self.is_done = False
        self._ids: list[int] = []
        self._waiting: list[tuple[int, Token]] = []
        self._sent = 0
        """Characters that were returned."""

    def take(self, token: Token) -> Part:
        """Take a token; return what became certain, and after the last token all the rest."""
        self.ending.tokens += 1
        if token.ends:
            self.ending.finish = "stop"
            return self.rest()
        part = self._add(token)
        if self.is_done:
            self.ending.finish = "stop"
        return part

    def _add(self, token: Token) -> Part:
        """Return the text that is complete and cannot become a stop text."""
        self._ids.append(token.id)
        text = self._decode()
        self._waiting.append((len(text), token))
        stops = [index for word in self.stop if (index := text.find(word)) >= 0]
        if stops:
            self.is_done = True
            return self._part(text[: min(stops)])
        certain = text.rstrip(INCOMPLETE)
        uncertain = max((_overlap(certain, word) for word in self.stop), default=0)
        return self._part(certain[: len(certain) - uncertain])

    def rest(self) -> Part:
        """End the text; return what remains, with incomplete characters."""
        self.is_done = True
        part = self._part(self._decode())
        return Part(part.text, (*part.tokens, *(token for _, token in self._waiting)))

    def _decode(self) -> str:
        return str(self.tokenizer.decode(self._ids, skip_special_tokens=True))

    def _part(self, text: str) -> Part:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        done = [token for end, token in self._waiting if end <= self._sent]
        self._waiting = self._waiting[len(done) :]
        return Part(new, tuple(done))


def parts(
    tokens: Iterable[Token], tokenizer: Any, stop: Sequence[str], ending: Ending
) -> Iterator[Part]:
    """Yield the text of tokens as it becomes certain, and fill in `ending`.

    Args:
        stop: texts that end the generated text, and are not part of it.
    """
    text = Text(tokenizer, stop)
    text.ending = ending
    for token in tokens:
        part = text.take(token)
        if part.text or part.tokens:
            yield part
        if text.is_done:
            return
    part = text.rest()
    if part.text or part.tokens:
        yield part


def _overlap(text: str, word: str) -> int:
    """Return how many characters at the end of `text` begin `word`."""
    for count in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:count]):
            return count
    return 0
