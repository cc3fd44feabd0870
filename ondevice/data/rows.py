"""Files as raw records (JSON lines, CSV, plain text, Hugging Face data sets by name), and what they become: rows that
can be encoded, and the problems of those that cannot.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ondevice.core.errors import DataError, MissingPackageError

Format = Literal["chat", "instruct", "completion", "text", "classification", "multiple_choice", "qa"]


class BadRow(ValueError):
    """One row cannot be used; the reader turns it into a `RowProblem`.

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
    """True if the end-of-sequence token follows the answer."""


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
    """Check that `value` is a text that every tokenizer accepts, and return it.

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
    """Describe a JSON value for messages, shortly and safely."""
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    if value is None:
        return "null"
    if isinstance(value, str):
        shown = value if len(value) <= 40 else value[:37] + "..."
        return "'" + shown.encode("utf-8", "backslashreplace").decode("utf-8") + "'"
    short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**20)
    shown = str(value) if short else ""
    return f"{names.get(type(value), type(value).__name__)} {shown.lower()}".strip()


Record = tuple[int, dict[str, Any] | BadRow]
"""(line, fields), or (line, why the line is not a record)."""

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".txt": "txt"}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?")


def read_records(path: str | Path) -> tuple[str, Iterator[Record]]:
    """Read a file, or a data set named `name[:config][@split]`: ("jsonl" | "csv" | "txt" | "hub", records).

    A plain text file is one record {"text": whole file}. Lines that are not UTF-8 are problems and
    become blank, so that line numbers stay right.

    Raises:
        DataError: no such file, a folder, unreadable, empty, or a kind that is not read.
        MissingPackageError: not a file, could be a data set's name, and `datasets` is not installed.
    """
    path = Path(path)
    kind = SUFFIXES.get(path.suffix.lower())
    try:
        exists, folder = path.exists(), path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise DataError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    if not exists:
        match = _HUB_NAME.fullmatch(path.as_posix())
        if kind is None and match is not None:
            return "hub", read_hub(match["name"], match["config"], match["split"] or "train")
        hint = "check the path; relative paths start at the folder you are in"
        raise DataError(f"no such data file: {path}", received=str(path), hint=hint)
    if folder:
        raise DataError(f"{path} is a folder", expected="a .jsonl, .csv or .txt file", received="a folder")
    if kind is None:
        expected = "a name that ends with .jsonl, .csv or .txt"
        raise DataError(f"cannot tell what kind of data {path} is", expected=expected, received=path.name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="check the file's permissions") from None
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16", expected="UTF-8", received="UTF-16", hint="save it as UTF-8")
    content = content.removeprefix(b"\xef\xbb\xbf")  # the byte-order mark of Windows' editors
    if not content.strip():
        raise DataError(f"{path} is empty", expected="at least one row", received=f"{len(content)} bytes")
    if kind == "jsonl" and content.lstrip()[:1] == b"[":
        hint = f"write it as JSON lines: jq -c '.[]' '{path.name}' > '{path.stem}.jsonl'"
        raise DataError(f"{path} is one JSON list", expected="one JSON object a line", received="[", hint=hint)
    return kind, {"jsonl": _jsonl, "csv": _csv, "txt": _txt}[kind](content)


def _jsonl(content: bytes) -> Iterator[Record]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, _json_object(line)
            except BadRow as problem:
                yield number, problem


def _json_object(line: bytes) -> dict[str, Any]:
    if b"\0" in line:
        raise BadRow("", "contains a NUL byte")
    try:
        value = json.loads(_utf8(line), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise BadRow("", f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadRow("", "is nested too deeply") from None
    except BadRow:
        raise
    except ValueError:  # an integer of more digits than Python converts
        raise BadRow("", "is not JSON: a number with too many digits") from None
    if not isinstance(value, dict):
        raise BadRow("", f"expected a JSON object, received {describe(value)}")
    return value


def _utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("", f"is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:  # json.loads alone would keep the last in silence
            raise BadRow(key, "the key occurs twice")
        record[key] = value
    return record


def _csv(content: bytes) -> Iterator[Record]:
    # Bytes that are not UTF-8 survive as lone surrogates, which `check_text` names with their field.
    text = io.StringIO(content.decode("utf-8", "surrogateescape"), newline="")
    reader = csv.reader(text, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, BadRow("", f"is not CSV: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            twice = {name for name in header if header.count(name) > 1}
            if twice:
                raise DataError(f"the CSV header names a column twice: {', '.join(sorted(twice))}")
        elif len(cells) != len(header):
            yield line, BadRow("", f"expected {len(header)} columns as in the header, received {len(cells)}")
        else:
            yield line, dict(zip(header, cells, strict=True))


def _txt(content: bytes) -> Iterator[Record]:
    lines: list[str] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            if b"\0" in line:
                raise BadRow("", "contains a NUL byte")
            lines.append(_utf8(line.removesuffix(b"\r")))
        except BadRow as problem:
            yield number, problem
            lines.append("")
    yield 1, {"text": "\n".join(lines)}


def read_hub(name: str, config: str | None, split: str) -> Iterator[Record]:
    """Read the records of a Hugging Face data set; class labels become their names. `line` counts rows from 1.

    Raises:
        MissingPackageError: `datasets` is not installed.
        DataError: the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError:
        raise MissingPackageError(
            f"there is no file {name}, and reading a Hugging Face data set needs the package 'datasets'",
            expected="a .jsonl, .csv or .txt file, or the package 'datasets'",
            received=name,
            hint="check the path, or: pip install datasets",
        ) from None
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package raises many kinds, all meaning that there is no such data
        reason = str(error).strip().partition("\n")[0]
        hint = "data sets are named name[:config][@split], such as glue:sst2@validation"
        raise DataError(f"cannot load the data set {name}: {reason}", hint=hint) from None
    names = {key: feature.names for key, feature in loaded.features.items() if hasattr(feature, "names")}
    return _hub_records(loaded, names)


def _hub_records(loaded: Any, names: dict[str, list[str]]) -> Iterator[Record]:
    for number, row in enumerate(loaded, 1):
        for key, labels in names.items():
            if isinstance(row.get(key), int) and 0 <= row[key] < len(labels):
                row[key] = labels[row[key]]
        yield number, row
