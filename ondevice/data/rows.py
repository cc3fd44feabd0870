"""A file's records as rows that can be encoded, and the problems of those that cannot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

Format = Literal[
    "chat", "instruct", "completion", "text", "classification",
    "multiple_choice", "qa", "regression", "preference", "thumbs",
]  # fmt: skip

Turn = tuple[str, str] | tuple[str, str, dict[str, Any]]
"""(role, content), and every other key of the turn, such as `tool_calls`, `name` or `weight`."""


def keys_of(turn: Turn) -> dict[str, Any]:
    """Return the keys of a turn other than its role and its content."""
    return turn[2] if len(turn) > 2 else {}


class BadRow(ValueError):
    """One row cannot be used; the reader turns it into a `RowProblem`.

    Args:
        field: the dotted name of the offending key, or "" if the row as a whole is at fault.
        reason: the fault, and what was expected.
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
    """A row that cannot be used."""

    file: str
    line: Annotated[int, Field(description="From 1; 0 if no single line is at fault.")]
    field: str
    reason: str

    def __str__(self) -> str:
        text = f"{self.file}: "
        if self.line:
            text = f"{self.file}:{self.line}: "
        if self.field:
            text += f"'{self.field}': "
        return text + self.reason

    def to_dict(self) -> dict[str, Any]:
        """Return the problem as the JSON object that `--json` prints."""
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
    """(prompt, answer) texts: one pair, or for classification and multiple choice one a candidate."""

    gold: int | None = None
    """Index of the right candidate in `pairs`; None without candidates."""

    messages: tuple[Turn, ...] = ()
    """Turns that end with an assistant turn; in a preference pair, with the chosen answer."""

    answers: tuple[str, ...] = ()
    """Every accepted answer of a question-answering row."""

    label: str | None = None
    """The text of the right label, for counting; None if rows have no labels."""

    end: bool = True
    """True if the end-of-sequence token follows the answer."""

    file: str = ""
    """The file inside a folder of files; empty if the data is one file."""

    tools: tuple[dict[str, Any], ...] = ()
    """The tools of a conversation, as chat templates take them."""

    rejected: tuple[Turn, ...] = ()
    """The turns with the rejected answer of a preference pair."""

    value: float | None = None
    """The target of a regression row."""

    images: tuple[Any, ...] = ()
    """Pictures of the turns, as the file has them: paths, or bytes; `pictures.MARK` is their place."""

    rest: Mapping[str, Any] = field(default_factory=dict)
    """Columns that the format does not read; a chat template may read some of them. Only rows with
    `messages` keep their values."""


class Fields(dict[str, Any]):
    """A record that records which of its columns were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a column's value, or the default."""
        self.read.add(key)
        return super().get(key, default)

    def unread(self, prefix: str = "") -> dict[str, Any]:
        """Return the columns that hold something and were not read."""
        return {
            f"{prefix}{key}": value
            for key, value in super().items()
            if key not in self.read and value not in (None, "", [], {})
        }


@dataclass(slots=True)
class Rows:
    """All rows of one file, and every row that was left out."""

    file: str
    format: Format
    items: list[Row] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    task: str | None = None
    notes: list[str] = field(default_factory=list)
    """How the file was understood, if that is not obvious: a separator, a sheet, columns."""

    metric: str = ""
    """The metric of a custom template; empty for the format's usual figures."""

    values: tuple[float, ...] = ()
    """The number that each candidate of a regression stands for."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """The classes of classification rows, {label key: label text}, in the candidates' order."""

    def __len__(self) -> int:
        return len(self.items)


_RECEIVED = re.compile(r"[;,] received |: byte ")
"""Begins the part of a reason that differs from row to row."""
_NUMBERS = re.compile(r"\d+(?= tokens)|(?<=column )\d+|(?<=\.)\d+(?=[.:])")
MOST_REASONS = 20


def count_reasons(problems: Sequence[RowProblem]) -> dict[str, int]:
    """Count the rows left out by field and reason, the most frequent first.

    Reasons do not name the rows' own values; the rarest of many reasons are counted together.
    """
    counts = Counter[str]()
    for problem in problems:
        text = f"{problem.field}: {_RECEIVED.split(problem.reason)[0]}".removeprefix(": ")
        counts[_NUMBERS.sub("N", text)] += 1
    frequent = dict(counts.most_common(MOST_REASONS))
    others = counts.total() - sum(frequent.values())
    if others:
        frequent["other reasons"] = others
    return frequent


_SURROGATE = re.compile("[\ud800-\udfff]").search
_RAW_BYTE = re.compile("[\udc80-\udcff]").search  # a byte of the file, decoded as a surrogate


def check_text(value: Any, name: str, *, empty: bool = False) -> str:
    """Check that `value` is a text that every tokenizer accepts, and return it.

    Raises:
        BadRow: not a string, empty (unless `empty`), with a NUL character or with half a surrogate
            pair, which a CSV reader makes of bytes that are not UTF-8.
    """
    if not isinstance(value, str):
        raise BadRow(name, f"expected a text, received {describe(value)}")
    if not empty and not value.strip():
        raise BadRow(name, "is empty")
    if "\0" in value:
        raise BadRow(name, "contains a NUL character")
    if not value.isascii() and _SURROGATE(value):
        if _RAW_BYTE(value):
            raise BadRow(name, "is not UTF-8: save the file as UTF-8 (Excel's 'CSV UTF-8')")
        raise BadRow(name, "is not valid UTF-8 (half a surrogate pair)")
    return value


def describe(value: Any) -> str:
    """Describe a JSON value for messages, briefly and safely."""
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    if value is None:
        return "null"
    if isinstance(value, str):
        shown = value if len(value) <= 40 else value[:37] + "..."
        return "'" + shown.encode("utf-8", "backslashreplace").decode("utf-8") + "'"
    short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**20)
    shown = str(value) if short else ""
    return f"{names.get(type(value), type(value).__name__)} {shown.lower()}".strip()
