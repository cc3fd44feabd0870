"""The text of tokens as they are generated: only complete characters, and nothing of a stop
text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ondevice.generation.token_bytes import token_bytes

if TYPE_CHECKING:
    from ondevice.generation.sample import Token


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
    """A part of a text: what became certain, and the tokens that end in it.

    Attributes:
        offsets: for each token the character of the whole text with which it begins.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()


class Text:
    """The text of tokens as they come.

    Args:
        stop: texts that end the generated text, and are not part of it.
        shows_special: write the names of special tokens.

    Attributes:
        ending: how it ended, or how many tokens it has so far.
        is_done: a token or a stop text has ended it.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), shows_special: bool = False
    ) -> None:
        self.stop = stop
        self.ending = Ending()
        self.is_done = False
        self._bytes = token_bytes(tokenizer)
        self._hidden = frozenset() if shows_special else self._bytes.hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        """Complete characters."""
        self._waiting: list[tuple[int, int, Token]] = []
        """Tokens that were not returned, each with its first character and the one after it."""
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
        begin = len(self._text)
        if token.id not in self._hidden:
            self._text += self._decoder.decode(self._bytes.of(token.id))
        pending = bool(self._decoder.getstate()[0])
        self._waiting.append((begin, len(self._text) + pending, token))
        stops = [index for word in self.stop if (index := self._text.find(word)) >= 0]
        if stops:
            self.is_done = True
            return self._part(min(stops))
        uncertain = max((_overlap(self._text, word) for word in self.stop), default=0)
        return self._part(len(self._text) - uncertain)

    def rest(self) -> Part:
        """End the text; return what remains, with incomplete characters."""
        self.is_done = True
        self._text += self._decoder.decode(b"", final=True)
        return self._part(len(self._text))

    def _part(self, end: int) -> Part:
        """Return the text up to a character, and the tokens that end in it."""
        new = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        done = [one for one in self._waiting if one[1] <= self._sent]
        self._waiting = self._waiting[len(done) :]
        return Part(new, tuple(one[2] for one in done), tuple(one[0] for one in done))


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
