"""The last answers of the daemon, in memory only: a client rates one by the id of its response."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ondevice.server.store import MissingError

MOST = 1000
"""Answers that are remembered."""
MOST_CHARACTERS = 8 << 20
"""Longest texts of all of them together: at most 32 MiB of memory."""


@dataclass(frozen=True)
class Remembered:
    """An answer with its prompt: a text, or turns with role and content; empty if it was token ids.

    `model` is as the request names it: an adapter's id, too.
    """

    prompt: str | list[dict[str, str]]
    answer: str
    model: str
    adapter: str | None

    @property
    def characters(self) -> int:
        """Length of the texts."""
        if isinstance(self.prompt, str):
            return len(self.answer) + len(self.prompt)
        return len(self.answer) + sum(len(turn["content"]) for turn in self.prompt)


class Recent:
    """Remembers answers; the oldest ones are forgotten first. Only the event loop adds."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], Remembered] = OrderedDict()
        self._characters = 0

    def add(self, response: str, index: int, answer: Remembered) -> None:
        """Remember the choice `index` of a response."""
        self._kept[response, index] = answer
        self._characters += answer.characters
        while len(self._kept) > MOST or self._characters > MOST_CHARACTERS:
            _, forgotten = self._kept.popitem(last=False)
            self._characters -= forgotten.characters

    def get(self, response: str, index: int) -> Remembered:
        """Return an answer; raise MissingError if it is not remembered."""
        if (response, index) not in self._kept:
            raise MissingError(
                "no answer with this id is remembered",
                expected=f"one of the last {MOST} answers since the daemon started",
                received=f"{response}, index {index}",
                hint="POST /v1/thumbs takes the prompt and the answer themselves",
            )
        return self._kept[response, index]
