"""One JSON document as records: a list of objects, alone or as the only list of an object, or one object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.untrusted import parse_row
from ondevice.data.records import Record, describe, unique_keys
from ondevice.data.rows import BadRow


def read_list(path: Path, content: bytes) -> Iterator[Record] | None:
    """Read a file that is one JSON document; None where it is none and may be JSON lines.

    Raises:
        DataError: a list breaks off or is empty, an object has several lists of objects, or it is not UTF-8.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        if content.lstrip()[:1] == b"{":
            return None
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"byte 0x{content[error.start]:02x} in line {line}"
        raise DataError(f"{path} is not UTF-8", expected="UTF-8", received=reason, hint="save it as UTF-8") from None
    start = len(text) - len(text.lstrip())
    if text[start] == "{":
        try:
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
            raise DataError(f"{path} has several lists", expected="one list", received=", ".join(lists), hint=hint)
        found = re.search(rf"{re.escape(json.dumps(lists[0], ensure_ascii=False))}\s*:\s*\[", text)
        if found is None:  # the key is written with escapes: the rows are right, their lines are not known
            return (Record(number, row) for number, row in enumerate(document[lists[0]], 1))
        start = found.end() - 1
    return iter(_elements(path, text, start + 1))


def _elements(path: Path, text: str, place: int) -> list[Record]:
    """Read the elements of the list that begins before `place`, each with the line on which it begins."""
    decoder, records, line, counted = json.JSONDecoder(object_pairs_hook=_pairs), [], 1, 0

    def skip(place: int) -> int:
        match = re.compile(r"\s*").match(text, place)
        return match.end() if match else place

    place = skip(place)
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, place = decoder.raw_decode(text, place)
            place = skip(place)
            if text[place : place + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, place)
        except json.JSONDecodeError as error:
            reason = f"{error.msg} in line {error.lineno}, column {error.colno}"
            raise DataError(f"{path} is not JSON: {reason}", expected="a list of objects",
                            received=describe(text[error.pos : error.pos + 30])) from None  # fmt: skip
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {type(error).__name__} in the element of line {line}") from None
        records.append(Record(line, _record(value)))
        if text[place] == ",":
            place = skip(place + 1)
    if not records:
        raise DataError(f"{path} is empty", expected="at least one row", received="a list without elements")
    return records


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
