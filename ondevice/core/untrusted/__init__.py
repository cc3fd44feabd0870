"""Read what comes from outside: JSON, YAML, tensors, tables and the paths that they name.

Adapters, artifacts, checkpoints, models, data files, run files and messages can be damaged or
made to harm. Everything here has limits on depth, size, count and place, and raises `Refused`
for unexpected content; `read_object` raises the error of its caller's kind.
No other module calls `json.loads`, `yaml.safe_load` or a library's reader on such bytes (a test
checks this). JSON, tensors and files are here; YAML, tables and GGUF in modules of their own.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ondevice.core.errors import OndeviceError


class Refused(ValueError):
    """Content from outside is damaged, of another kind, or over a limit; a caller names the file."""


MOST_NAME_LETTERS = 1024


def check_name(name: object) -> str:
    """Return `name` if it is a relative path that stays below a folder, by its letters only.

    The app's `Storage.safeRelative` has the same rule.

    Raises:
        Refused: it is absolute, steps up, has empty parts, or cannot be a file's name.
    """
    if not isinstance(name, str):
        raise Refused(f"a file's name is a {type(name).__name__}")
    parts = name.split("/")
    if not name or len(name) > MOST_NAME_LETTERS or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"a file's name leads outside the folder: {name[:80]!r}")
    if "\\" in name or not name.isprintable():
        raise Refused(f"a file's name has letters that no name has: {name[:80]!r}")
    return name


def inside(folder: Path, name: object) -> Path:
    """Return the path of `name` in `folder`; symbolic links may not lead outside either.

    In the cache of the Hugging Face hub every file is a link into `blobs`, which is allowed.

    Raises:
        Refused: the file would be outside the folder.
    """
    path = folder / check_name(name)
    home = Path(os.path.realpath(folder))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    place = Path(os.path.realpath(path))
    if not any(place.is_relative_to(home) for home in homes):
        raise Refused(f"a link leads outside the folder: {str(name)[:80]!r}")
    return path


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading.

    Raises:
        Refused: it is a folder, a pipe or a device.
        OSError: as `open` raises it.
    """
    # Opening a pipe would wait for its writer, for ever; a device may have no end.
    file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115 - returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Refused(f"{path.name} is not a plain file")
    return file


def read_plain(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a plain file; Refused if it is another thing, or larger than `most_bytes`."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise Refused(f"it is larger than {most_bytes} bytes")
        return file.read()


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
        if pairs is None or text.startswith("\ufeff"):
            value = json.loads(text, object_pairs_hook=pairs)
        else:
            value = _decoder(pairs).decode(text)
    except RecursionError:
        raise Refused("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        check_depth(value)
    return value


@lru_cache(maxsize=8)
def _decoder(pairs: Pairs) -> json.JSONDecoder:
    """Return a decoder; `json.loads` builds one for each row, which takes longer than most rows."""
    return json.JSONDecoder(object_pairs_hook=pairs)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        Refused: as `parse_json`, or it is not a plain file.
        OSError: as `open` raises it.
    """
    return parse_json(read_plain(path, MOST_BYTES))


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


def check_depth(value: Any) -> None:
    """Raise Refused if lists and dictionaries are nested more than `MOST_DEPTH` deep; never recurses."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [
            child
            for item in containers
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not containers:
            return
    raise Refused(f"it is nested more than {MOST_DEPTH} deep")


def _check_numbers(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (dict, list)):
            stack.extend(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, int) and abs(item) >= 10**39:
            raise Refused("it has a number with too many digits")


BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of an element, by the format's names."""
LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 32 << 20
"""A header takes some 150 bytes a tensor; the format itself allows 100 MB."""
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = 1 << 62


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a file.

    Attributes:
        dtype: a key of `BITS`.
        start: its first byte, counted from the beginning of the file.
        end: the byte behind its last.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class TensorHeader:
    """The tensors of a file by name, in the file's order, and its texts by name."""

    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]


def read_header(path: Path) -> TensorHeader:
    """Read the header of a safetensors file.

    Raises:
        Refused: it is not a whole safetensors file.
        OSError: as `open` raises it.
    """
    with open_plain(path) as file:
        return _header(file, os.fstat(file.fileno()).st_size)


def parse_header(data: bytes) -> TensorHeader:
    """Read the header of a safetensors file that is in memory; Refused as in `read_header`."""
    return _header(io.BytesIO(data), len(data))


def _header(file: BinaryIO, size: int) -> TensorHeader:
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if not 0 < length <= size - LENGTH_BYTES:
        raise Refused(
            f"truncated, or another kind of file: a header of {length} bytes in a file of {size}"
        )
    if length > _MOST_HEADER_BYTES:
        raise Refused(f"its header is larger than {_MOST_HEADER_BYTES >> 20} MiB")
    header = parse_json(file.read(length), most_bytes=_MOST_HEADER_BYTES)
    if not isinstance(header, dict):
        raise Refused("its header is not an object")
    metadata = header.pop("__metadata__", None) or {}  # MLX writes null
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise Refused("the texts of its header ('__metadata__') are not texts")
    start = LENGTH_BYTES + length
    tensors = {name: _place(name, entry, start, size) for name, entry in header.items()}
    end = start
    for name, place in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start < end:
            raise Refused(f"tensor '{name}' begins inside another")
        end = place.end
    return TensorHeader(tensors, metadata)


def _place(name: str, entry: Any, start: int, size: int) -> TensorPlace:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise Refused(f"tensor '{name[:80]}' has no dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise Refused(f"tensor '{name[:80]}' is of an unknown dtype: {str(dtype)[:20]}")
    if (
        not _whole(shape)
        or len(shape) > _MOST_DIMENSIONS
        or not _whole(offsets)
        or len(offsets) != 2
    ):
        raise Refused(f"tensor '{name[:80]}': shape or data_offsets are not whole numbers")
    first, last = offsets
    if prod(shape) > _MOST_ELEMENTS or prod(shape) * BITS[dtype] != (last - first) * 8:
        raise Refused(f"tensor '{name[:80]}' has another size than its shape {shape}")
    if start + last > size:
        raise Refused(f"truncated: tensor '{name[:80]}' ends at byte {start + last}, of {size}")
    return TensorPlace(dtype, tuple(shape), start + first, start + last)


def _whole(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value <= _MOST_ELEMENTS for value in values)
