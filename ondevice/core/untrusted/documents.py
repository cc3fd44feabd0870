"""JSON as values of bounded depth and size, which can be printed, converted and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ondevice.core.errors import OndeviceError
from ondevice.core.untrusted.places import read_plain
from ondevice.core.untrusted.refused import Refused

MOST_BYTES = 16 << 20
"""Of a document: the largest that we know, the index of a model with 100,000 tensors, has 8 MiB."""
MOST_DEPTH = 64
"""Of lists and objects in each other. Python's own limit is about 1,000 calls, and code that walks
a value may need several calls a level."""
_BYTES_A_CONTAINER = 16
"""An empty list takes 2 bytes here and 64 in memory: so there may be one for so many bytes."""
_LONG_NUMBER = re.compile(r"[0-9]{40}")
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")

Pairs = Callable[[list[tuple[str, Any]]], Any]
"""Builds an object from its keys and values, as `json.loads` takes it."""


def parse_json(data: bytes | str, *, most_bytes: int = MOST_BYTES) -> Any:
    """Read one JSON document.

    Raises:
        Refused: it is not UTF-8, not JSON, too large, nested too deeply, or has a number or a text
            that other code could not convert.
    """
    if len(data) > most_bytes:
        raise Refused(f"it is larger than {most_bytes >> 20} MiB")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        if text.count("[") + text.count("{") > most_bytes // _BYTES_A_CONTAINER:
            raise Refused("it has too many lists and objects")
        value = parse_row(text)
        if _LONG_NUMBER.search(text):
            _check_numbers(value)
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except Refused:
        raise
    except ValueError as error:  # JSONDecodeError, UnicodeError, an integer of too many digits
        raise Refused(str(error)[:300]) from None
    return value


def parse_row(text: str, pairs: Pairs | None = None) -> Any:
    """Read the JSON of one row of a data file, whose texts and numbers are checked by field.

    Raises:
        Refused: it is nested too deeply.
        ValueError: as `json.loads` raises it; also from `pairs`.
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise Refused("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        check_depth(value)
    return value


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        Refused: as `parse_json`, or it is not a plain file.
        OSError: as `open` raises it.
    """
    return parse_json(read_plain(path, most_bytes), most_bytes=most_bytes)


def read_object(
    path: Path, error: type[OndeviceError], *, hint: str | None = None
) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        FileNotFoundError: the file does not exist.
        OndeviceError: of the class `error`; it cannot be read, or holds something else.
    """
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as reason:
        raise error(f"{path} is not readable JSON", received=str(reason), hint=hint) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise error(f"{path} is not a JSON object", expected="an object", received=kind, hint=hint)
    return value


@contextmanager
def well_formed(
    where: object, error: type[OndeviceError], *, hint: str | None = None
) -> Iterator[None]:
    """Turn what Python raises for a field that is missing or of a wrong type into an error of the class `error`.

    For the few lines that take a document apart whose fields no pydantic model describes.
    """
    try:
        yield
    except OndeviceError:
        raise
    except KeyError as reason:
        raise error(f"{where} lacks a field", expected=str(reason), hint=hint) from None
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        MemoryError,
    ) as reason:
        message = f"{where} has a field of a wrong type or size"
        raise error(
            message, received=f"{type(reason).__name__}: {str(reason)[:300]}", hint=hint
        ) from None


def check_depth(value: Any, most: int = MOST_DEPTH) -> None:
    """Raise Refused if lists and dictionaries are nested more than `most` deep; never recurses."""
    level = [value]
    for _ in range(most + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [
            child
            for item in containers
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not containers:
            return
    raise Refused(f"it is nested more than {most} deep")


def _check_numbers(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (dict, list)):
            stack.extend(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, int) and abs(item) >= 10**39:
            raise Refused("it has a number with too many digits")
