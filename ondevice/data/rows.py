"""What a data file becomes: rows that can be encoded, and the problems of those that cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["chat", "instruct", "completion", "text", "classification", "multiple_choice", "qa"]


class BadRow(ValueError):
    """Why one row cannot be used; the reader turns it into a `RowProblem`.

    Args:
        field: the dotted name of the offending key, or "" when the whole row is at fault.
        reason: what is wrong and what would have been right.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field
        self.reason = reason


class AnswerTooLong(BadRow):
    """The answer does not fit into the maximum length; `length_tokens` would hold the whole row."""

    def __init__(self, reason: str, length_tokens: int) -> None:
        super().__init__("", reason)
        self.length_tokens = length_tokens


@dataclass(frozen=True, slots=True)
class RowProblem:
    """One row that was left out. `line` counts from 1; it is 0 when no single line is at fault."""

    file: str
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: '{self.field}': {self.reason}" if self.field else f"{where}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """The problem as the JSON object that `--json` prints."""
        return {"file": self.file, "line": self.line, "field": self.field, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row, as text, before any tokenizer.

    Either `pairs` or `messages` is filled; instruct rows fill both, so that a tokenizer without
    a chat template can still train on them.
    """

    line: int
    """Line of the file on which the row begins, from 1."""

    pairs: tuple[tuple[str, str], ...] = ()
    """(prompt, answer) texts. One pair, or one per candidate for classification and multiple choice."""

    gold: int | None = None
    """Index of the right candidate in `pairs`; None where there are no candidates."""

    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) turns that end with an assistant turn."""

    answers: tuple[str, ...] = ()
    """Every accepted answer of a question answering row."""

    label: str | None = None
    """The answer text of the right label, for counting; None where rows have no labels."""

    end: bool = True
    """Whether the end-of-sequence token follows the answer."""


@dataclass(slots=True)
class Rows:
    """All rows of one file and every row that was left out."""

    file: str
    format: Format
    items: list[Row] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    task: str | None = None

    def __len__(self) -> int:
        return len(self.items)


def check_text(value: Any, name: str, *, empty: bool = False) -> str:
    """`value` as a text that every tokenizer accepts.

    Raises:
        BadRow: not a string, empty (unless `empty`), a NUL character, or half a surrogate pair
            (which is how bytes that are not UTF-8 arrive from a CSV file).
    """
    if not isinstance(value, str):
        raise BadRow(name, f"expected a text, received {describe(value)}")
    if not empty and not value.strip():
        raise BadRow(name, "is empty")
    if "\0" in value:
        raise BadRow(name, "contains a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRow(name, "is not valid UTF-8 (half a surrogate pair)")
    return value


def describe(value: Any) -> str:
    """A short, safe description of a JSON value for messages."""
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    if value is None:
        return "null"
    if isinstance(value, str):
        shown = value if len(value) <= 40 else value[:37] + "..."
        return "'" + shown.encode("utf-8", "backslashreplace").decode("utf-8") + "'"
    short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**20)
    shown = str(value) if short else ""
    return f"{names.get(type(value), type(value).__name__)} {shown.lower()}".strip()
