"""JSON lines as records, and the choice between JSON lines and one JSON document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ondevice.core.untrusted import Refused, parse_row
from ondevice.data.readers.json_list import read_list, read_object, unique_keys
from ondevice.data.readers.source import UNLIMITED, Limits, Record, Source
from ondevice.data.readers.text import read_begin, read_lines, utf8
from ondevice.data.rows import BadRow, describe

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
