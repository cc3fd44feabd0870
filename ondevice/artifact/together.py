"""A safetensors file that several processes write, each its own bytes, with nobody holding all of
it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = {"BF16": 2, "F32": 4}
ALIGNMENT = 8


def layout(shapes: dict[str, tuple[int, ...]], kind: str) -> tuple[bytes, dict[str, int], int]:
    """Return the file's head, the byte at which each tensor begins, and the file's size; the same
    in every process.

    Args:
        shapes: of tensors by name.
        kind: `BF16` or `F32`, of all of them.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = {}
    offset = 0
    for name in sorted(shapes):
        end = offset + prod(shapes[name]) * WIDTHS[kind]
        header[name] = {"dtype": kind, "shape": list(shapes[name]), "data_offsets": [offset, end]}
        starts[name], offset = offset, end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(len(head) + 8) % ALIGNMENT)
    first = 8 + len(head)
    return (
        len(head).to_bytes(8, "little") + head,
        {name: first + at for name, at in starts.items()},
        first + offset,
    )


def make(path: Path, shapes: dict[str, tuple[int, ...]], kind: str) -> None:
    """Write the head, and make room for the tensors; one process, before the others write.

    Raises:
        OSError: from the disk.
    """
    head, _, size = layout(shapes, kind)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


def write_parts(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    kind: str,
    parts: Iterable[tuple[str, int, np.ndarray]],
) -> None:
    """Write this process' parts of the tensors, and wait for the disk.

    Args:
        parts: tensor, its first element that is here, and the elements, flat and of `kind`
            (bfloat16 as uint16).

    Raises:
        OSError: from the disk; the file is missing if `make` wrote to another disk.
    """
    _, starts, _ = layout(shapes, kind)
    with path.open("r+b") as file:
        for name, first, array in parts:
            file.seek(starts[name] + first * WIDTHS[kind])
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
