"""The header of a safetensors file: where each tensor lies, checked against the file's size."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ondevice.core.untrusted.documents import parse_json
from ondevice.core.untrusted.places import open_plain
from ondevice.core.untrusted.refused import Refused

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
    import io

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
