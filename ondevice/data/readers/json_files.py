"""JSON as records: JSON lines, a list of objects, an object with one such list, or an object.

A list is read one element at a time. An object is read in one piece, because only its end shows
what it holds.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.untrusted import MOST_DEPTH, Refused, check_depth, parse_row
from ondevice.data.readers.source import (
    UNLIMITED,
    Limits,
    Record,
    Source,
    read_begin,
    read_lines,
    utf8,
)
from ondevice.data.rows import BadRow, describe

PIECE_BYTES = 1 << 20
"""Bytes of a list that are read at once."""


def read_list(path: Path, limits: Limits = UNLIMITED) -> Iterator[Record]:
    """Read a file that begins with `[`.

    Raises:
        DataError: the list is cut off or empty, an element is too long, or it is not UTF-8.
    """
    text = _Text(_decoded(path))
    return _elements(path, text, text.skip(0) + 1, limits)


def read_object(path: Path, limits: Limits = UNLIMITED) -> Iterator[Record] | None:
    """Read a file that is one JSON object; return None if it is not one and may be JSON lines.

    Raises:
        DataError: it has several lists of objects, its list is empty, or it is too large.
    """
    size_bytes = path.stat().st_size
    if size_bytes > limits.whole_bytes:
        raise DataError(
            f"{path}: the first line is not a JSON object, and the file is too large to be one",
            expected=f"an object a line, or at most {limits.whole_bytes >> 20} MiB",
            received=f"{size_bytes >> 20} MiB",
            hint="write the rows as JSON lines, or as a list: [{...}, {...}]",
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
        document = parse_row(text)
    except ValueError:
        return None
    lists = [
        key
        for key, value in document.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    ]
    # A conversation's turns are a list of objects, too: then the object is itself a row.
    if not lists or {"messages", "conversations", "chosen"} & set(document):
        return iter([Record(1, document)])
    if len(lists) > 1:
        command = f"jq '.{lists[0]}' '{path.name}' > '{lists[0]}.json'"
        raise DataError(
            f"{path} has several lists",
            expected="one list",
            received=", ".join(lists),
            hint=f"write one of them into its own file: {command}",
        )
    key = re.escape(json.dumps(lists[0], ensure_ascii=False))
    match = re.search(rf"{key}\s*:\s*\[", text)
    if match is None:  # the key is written with escapes: the rows are right, their lines unknown
        return (Record(number, row) for number, row in enumerate(document[lists[0]], 1))
    return _elements(path, _Text(iter([text])), match.end(), limits)


class _Text:
    """The part of a text that is in memory, and the line and column of each position in it."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self.pieces = pieces
        self.buffer = next(pieces, "")
        self.ended = False
        self._line = 1  # of the position `_counted`, which only moves on: counting is linear
        self._counted = 0
        self._column = 0  # characters of the first line that were dropped

    def grow(self, position: int, least: int = 1) -> int:
        """Drop the text before `position`, read `least` characters or more, and return the new
        position, 0."""
        self._column = self.column_of(position) - 1
        self.line_of(position)
        self._counted = 0
        parts, read = [self.buffer[position:]], 0
        while read < least and not self.ended:
            piece = next(self.pieces, "")
            self.ended = not piece
            parts.append(piece)
            read += len(piece)
        self.buffer = "".join(parts)
        return 0

    def line_of(self, position: int) -> int:
        """Return the line of a position, counted from 1; ask for positions in their order."""
        self._line += self.buffer.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def column_of(self, position: int) -> int:
        """Return the column of a position, counted from 1."""
        before = self.buffer.rfind("\n", 0, position)
        return self._column + position + 1 if before < 0 else position - before

    def skip(self, position: int) -> int:
        """Return the position after white space; read more text if the buffer ends there."""
        while True:
            if match := _SPACE(self.buffer, position):
                position = match.end()
            if position < len(self.buffer) or self.ended:
                return position
            position = self.grow(position)


NEAR_END = 64
"""Characters at the buffer's end in which an error may be due to the cut (longest: `-Infinity`)."""
_SPACE = re.compile(r"\s*").match


def _decoded(path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces; DataError if it is not UTF-8."""
    decoder, lines = codecs.getincrementaldecoder("utf-8-sig")(), 1
    with path.open("rb") as file:
        while True:
            content = file.read(PIECE_BYTES)
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                line = lines + error.object.count(b"\n", 0, error.start)
                reason = f"byte 0x{error.object[error.start]:02x} in line {line}"
                raise DataError(
                    f"{path} is not UTF-8",
                    expected="UTF-8",
                    received=reason,
                    hint="save it as UTF-8",
                ) from None
            lines += text.count("\n")
            if text:
                yield text
            if not content:
                return


def _elements(path: Path, text: _Text, position: int, limits: Limits) -> Iterator[Record]:
    """Yield the elements of the list that begins before `position`, each with its first line."""
    decoder, empty = json.JSONDecoder(object_pairs_hook=_pairs), True
    position = text.skip(position)
    while text.buffer[position : position + 1] != "]":
        line, empty = text.line_of(position), False
        try:
            value, position = _element(path, text, position, decoder, limits)
            position = text.skip(position)
            if text.buffer[position : position + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text.buffer, position)
        except json.JSONDecodeError as error:
            where = f"line {text.line_of(error.pos)}, column {text.column_of(error.pos)}"
            raise DataError(
                f"{path} is not JSON: {error.msg} in {where}",
                expected="a list of objects",
                received=describe(text.buffer[error.pos : error.pos + 30]),
            ) from None
        except (ValueError, RecursionError) as error:
            reason = f"{type(error).__name__} in the element of line {line}"
            raise DataError(f"{path} is not JSON: {reason}") from None
        yield Record(line, _record(value))
        if text.buffer[position] == ",":
            position = text.skip(position + 1)
    if empty:
        received = "a list without elements"
        raise DataError(f"{path} is empty", expected="at least one row", received=received)


def _element(
    path: Path, text: _Text, position: int, decoder: json.JSONDecoder, limits: Limits
) -> tuple[Any, int]:
    """Decode the element at `position`, reading on as needed; return it and its end."""
    while True:
        try:
            value, end = decoder.raw_decode(text.buffer, position)
            complete = not isinstance(value, int | float)  # a number may go on: 3, 3.2, 3.25
            if complete or text.ended or len(text.buffer) - end >= NEAR_END:
                if (
                    text.buffer.count("[", position, end) + text.buffer.count("{", position, end)
                    > MOST_DEPTH
                ):
                    check_depth(value)
                return value, end
        except json.JSONDecodeError as error:
            # The end of the buffer cuts strings and words, and is not the end of the file.
            is_cut = error.msg.startswith("Unterminated string")
            is_cut |= error.pos > len(text.buffer) - NEAR_END
            if text.ended or not is_cut:
                raise
        length = len(text.buffer) - position
        if length > limits.row_bytes:
            raise DataError(
                f"{path}: the element in line {text.line_of(position)} is too long",
                expected=f"at most {limits.row_bytes >> 20} MiB an element",
                received="more",
            ) from None
        position = text.grow(position, max(1, length))


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    """Return an object, or the BadRow of one with a key twice: raised, it would end the list."""
    try:
        return unique_keys(pairs)
    except BadRow as problem:
        return problem


def _record(value: Any) -> dict[str, Any] | BadRow:
    if isinstance(value, dict):
        return next((item for item in value.values() if isinstance(item, BadRow)), value)
    if isinstance(value, BadRow):
        return value
    return BadRow("", f"expected a JSON object, received {describe(value)}")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise BadRow if a key occurs twice."""
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:  # json.loads itself silently takes the last
            raise BadRow(key, "the key occurs twice")
        record[key] = value
    return record


_WRAPPED = re.compile(rb'"(data|rows|examples|items|records|train)"\s*:\s*\[\s*\{').search
"""Finds a list of rows in an object on one line; without one, the object itself is a row."""


def read_json(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Read JSON lines, a JSON list of objects, or one JSON object.

    Raises:
        DataError: as `read_begin`, `read_list` and `read_object`.
    """
    begin = read_begin(path)
    if begin[:1] == b"[":
        return Source("json", read_list(path, limits))
    if begin[:1] == b"{" and _is_document(path, limits):
        records = read_object(path, limits)
        if records is not None:
            return Source("json", records)
    return Source("json", json_lines(read_lines(path, limits)))


def _is_document(path: Path, limits: Limits) -> bool:
    """Return True if a file that begins with `{` looks like one object.

    One object spans several lines, or has a list of rows on a single line.
    """
    lines = (line for line in read_lines(path, limits) if isinstance(line, BadRow) or line.strip())
    first = next(lines)
    if isinstance(first, BadRow) or not first.rstrip().endswith(b"}"):
        return True
    return _WRAPPED(first) is not None and next(lines, None) is None


def json_lines(lines: Iterable[bytes | BadRow], skip: int = 0) -> Iterator[Record]:
    """Yield one record for each line after the first `skip` records; blank lines do not count."""
    for number, line in enumerate(lines, 1):
        if not isinstance(line, BadRow) and not line.strip():
            continue
        if skip:
            skip -= 1
        elif isinstance(line, BadRow):
            yield Record(number, line)
        else:
            try:
                yield Record(number, _json_object(line.removesuffix(b"\n")))
            except BadRow as problem:
                yield Record(number, problem)


def _json_object(line: bytes) -> dict[str, Any]:
    if b"\0" in line:
        raise BadRow("", "contains a NUL byte")
    try:
        value = parse_row(utf8(line), unique_keys)
    except json.JSONDecodeError as error:
        raise BadRow("", f"is not JSON: {error.msg} at column {error.colno}") from None
    except Refused:
        raise BadRow("", "is nested too deeply") from None
    except BadRow:
        raise
    except ValueError:  # an integer with more digits than Python converts
        raise BadRow("", "is not JSON: a number with too many digits") from None
    if not isinstance(value, dict):
        raise BadRow("", f"expected a JSON object, received {describe(value)}")
    return value
