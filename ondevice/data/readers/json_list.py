"""One JSON document as records: a list of objects, alone or as the only list of an object, or one object.

A list is read an element at a time. An object is read whole, because only its end says what it holds.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.untrusted import MOST_DEPTH, check_depth, parse_row
from ondevice.data.readers.source import UNLIMITED, Limits, Record
from ondevice.data.rows import BadRow, describe

PIECE_BYTES = 1 << 20
"""Read at once of a list."""


def read_list(path: Path, limits: Limits = UNLIMITED) -> Iterator[Record]:
    """Read a file that begins with `[`.

    Raises:
        DataError: the list breaks off or is empty, an element is too long, or the file is not UTF-8.
    """
    text = _Text(_decoded(path))
    return _elements(path, text, text.skip(0) + 1, limits)


def read_object(path: Path, limits: Limits = UNLIMITED) -> Iterator[Record] | None:
    """Read a file that is one JSON object; None where it is none and may be JSON lines.

    Raises:
        DataError: it has several lists of objects, its list is empty, or it is too long to be read whole.
    """
    size_bytes = path.stat().st_size
    if size_bytes > limits.whole_bytes:
        raise DataError(
            f"{path}: the first line is not a whole JSON object, and the file is too large to be one object",
            expected=f"an object a line, or at most {limits.whole_bytes >> 20} MiB",
            received=f"{size_bytes >> 20} MiB",
            hint="write the rows as JSON lines, or as a list: [{...}, {...}]",
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
        document = parse_row(text)
    except ValueError:
        return None
    lists = [key for key, value in document.items() if isinstance(value, list) and value
             and all(isinstance(item, dict) for item in value)]  # fmt: skip
    # A conversation's turns are a list of objects, too: an object that is itself a row is one.
    if not lists or {"messages", "conversations", "chosen"} & set(document):
        return iter([Record(1, document)])
    if len(lists) > 1:
        hint = f"write one of them into a file of its own: jq '.{lists[0]}' '{path.name}' > '{lists[0]}.json'"
        raise DataError(
            f"{path} has several lists", expected="one list", received=", ".join(lists), hint=hint
        )
    found = re.search(rf"{re.escape(json.dumps(lists[0], ensure_ascii=False))}\s*:\s*\[", text)
    if (
        found is None
    ):  # the key is written with escapes: the rows are right, their lines are not known
        return (Record(number, row) for number, row in enumerate(document[lists[0]], 1))
    return _elements(path, _Text(iter([text])), found.end(), limits)


class _Text:
    """The part of a text that is held in memory, and the line and column of every place in it."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self.pieces = pieces
        self.held = next(pieces, "")
        self.ended = False
        self._line, self._counted = (
            1,
            0,
        )  # the line of a place, which only moves on: counting is linear
        self._column = 0  # characters of the held text's first line that were dropped

    def grow(self, place: int, least: int = 1) -> int:
        """Drop the text before `place` and read `least` characters or more behind it; return the new place, 0."""
        self._column = self.column_of(place) - 1
        self.line_of(place)
        self._counted = 0
        parts, read = [self.held[place:]], 0
        while read < least and not self.ended:
            piece = next(self.pieces, "")
            self.ended = not piece
            parts.append(piece)
            read += len(piece)
        self.held = "".join(parts)
        return 0

    def line_of(self, place: int) -> int:
        """Return the line of a place, counted from 1. Ask for places in their order."""
        self._line += self.held.count("\n", self._counted, place)
        self._counted = place
        return self._line

    def column_of(self, place: int) -> int:
        """Return the column of a place, counted from 1."""
        before = self.held.rfind("\n", 0, place)
        return self._column + place + 1 if before < 0 else place - before

    def skip(self, place: int) -> int:
        """Return the place behind white space; more text is read if the held part ends there."""
        while True:
            match = _SPACE(self.held, place)
            place = match.end() if match else place
            if place < len(self.held) or self.ended:
                return place
            place = self.grow(place)


NEAR_END = 64
"""Characters before the end of the held text in which a mistake may be the cut: the longest word is `-Infinity`."""
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
                raise DataError(f"{path} is not UTF-8", expected="UTF-8", received=reason,
                                hint="save it as UTF-8") from None  # fmt: skip
            lines += text.count("\n")
            if text:
                yield text
            if not content:
                return


def _elements(path: Path, text: _Text, place: int, limits: Limits) -> Iterator[Record]:
    """Read the elements of the list that begins before `place`, each with the line on which it begins."""
    decoder, empty = json.JSONDecoder(object_pairs_hook=_pairs), True
    place = text.skip(place)
    while text.held[place : place + 1] != "]":
        line, empty = text.line_of(place), False
        try:
            value, place = _element(path, text, place, decoder, limits)
            place = text.skip(place)
            if text.held[place : place + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text.held, place)
        except json.JSONDecodeError as error:
            where = f"line {text.line_of(error.pos)}, column {text.column_of(error.pos)}"
            raise DataError(f"{path} is not JSON: {error.msg} in {where}", expected="a list of objects",
                            received=describe(text.held[error.pos : error.pos + 30])) from None  # fmt: skip
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path} is not JSON: {type(error).__name__} in the element of line {line}"
            ) from None
        yield Record(line, _record(value))
        if text.held[place] == ",":
            place = text.skip(place + 1)
    if empty:
        raise DataError(
            f"{path} is empty", expected="at least one row", received="a list without elements"
        )


def _element(
    path: Path, text: _Text, place: int, decoder: json.JSONDecoder, limits: Limits
) -> tuple[Any, int]:
    """Decode the element at `place`, with as much more of the file as it needs; return it and the place behind it."""
    while True:
        try:
            value, end = decoder.raw_decode(text.held, place)
            whole = not isinstance(value, int | float)  # a number may go on: 3, 3.2, 3.25
            if whole or text.ended or len(text.held) - end >= NEAR_END:
                if text.held.count("[", place, end) + text.held.count("{", place, end) > MOST_DEPTH:
                    check_depth(value)
                return value, end
        except json.JSONDecodeError as error:
            # The end of the held text cuts strings and words, and is not the end of the file.
            cut = (
                error.msg.startswith("Unterminated string") or error.pos > len(text.held) - NEAR_END
            )
            if text.ended or not cut:
                raise
        length = len(text.held) - place
        if length > limits.row_bytes:
            raise DataError(f"{path}: the element in line {text.line_of(place)} is too long",
                            expected=f"at most {limits.row_bytes >> 20} MiB an element",
                            received="more") from None  # fmt: skip
        place = text.grow(place, max(1, length))


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    """An object, or the BadRow of one with a key twice: raised here it would end the whole list."""
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
    """Build a JSON object; BadRow where a key occurs twice."""
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:  # json.loads alone would keep the last in silence
            raise BadRow(key, "the key occurs twice")
        record[key] = value
    return record
