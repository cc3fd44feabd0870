"""Encoded rows: sequences of token ids with labels, and what a row is judged by."""

from __future__ import annotations

from dataclasses import dataclass, field

from ondevice.data.rows import Format, RowProblem

IGNORE = -100
"""The label of a token that is not trained on."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. `labels[t]` is `ids[t]` where token t is trained on, else -100; the program shifts."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        """Targets that count towards the loss: labels other than -100, without the first position."""
        return sum(label != IGNORE for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class Item:
    """One row, encoded: what is trained on, and what it is judged by."""

    example: Example
    candidates: tuple[Example, ...] = ()
    """One per class or choice, answer tokens labelled; empty where there is nothing to choose."""

    gold: int | None = None
    """Index of the right candidate."""

    answers: tuple[str, ...] = ()
    """Accepted answers of a question answering row."""

    line: int = 0
    """Line of the data file, from 1."""

    prompt_tokens: int = 0
    """Tokens before the answer (for chat before the last assistant turn): `ids[:prompt_tokens]` is what
    a model continues when it answers."""

    dropped_tokens: int = 0
    """Tokens cut from the front of the prompt to fit the maximum length."""


@dataclass(slots=True)
class Dataset:
    """Encoded rows, the rows left out (by the reader and here), and how they were encoded."""

    items: list[Item] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    format: Format = "text"
    max_length_tokens: int = 0
    too_long_tokens: list[int] = field(default_factory=list)
    """Full lengths of the rows left out because their answer does not fit."""

    template: str = ""
    """What framed the rows: "chat template", "instruction prompt", a task's name, or ""."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def truncated(self) -> int:
        """Rows that lost tokens at the front of their prompt."""
        return sum(item.dropped_tokens > 0 for item in self.items)
