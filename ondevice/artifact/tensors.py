"""Named numpy arrays in one safetensors file, written in a stream with its hash and without a second copy.

Numpy has no bfloat16: a session hands out such a tensor as uint16 or float32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.errors import CheckpointError


class TornError(CheckpointError):
    """A file is not what was written: cut off, changed or missing."""


_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_CHUNK_BYTES = 1 << 24


def write_tensors(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    written: Callable[[str], None] | None = None,
    bfloat16: bool = False,
) -> str:
    """Write `tensors` to `path` and give the SHA-256 of the file; the caller waits for the disk.

    Args:
        written: called with the name of each array that has been read and may change again; the arrays are then
            written in the order of `tensors`.
        bfloat16: uint16 arrays are bfloat16 numbers, and the file is one of transformers' weights.

    Raises:
        CheckpointError: if an array is of a type that safetensors has no name for.
        OSError: from the disk.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if bfloat16 else {}
    arrays, offset = [], 0
    items = list(tensors.items())
    if written is None:
        items.sort(key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, array in items:
        kind = "BF16" if bfloat16 and array.dtype.name == "uint16" else _NAMES.get(array.dtype.name)
        if kind is None:
            raise CheckpointError(
                f"the session's state '{name}' cannot be saved",
                expected=", ".join(_NAMES),
                received=array.dtype,
            )
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
        arrays.append((name, array))
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(head).to_bytes(8, "little"), head):
            digest.update(part)
            file.write(part)
        for name, array in arrays:
            little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
            flat = little.reshape(-1).view(np.uint8)
            for start in range(0, flat.size, _CHUNK_BYTES):
                chunk = flat[start : start + _CHUNK_BYTES].data
                digest.update(chunk)
                file.write(chunk)
            if written is not None:
                written(name)
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read what `write_tensors` wrote; the arrays can be written to.

    Raises:
        TornError: if the file is not whole.
    """
    kinds = {kind: name for name, kind in _NAMES.items()}
    tensors = {}
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(size))
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                array = np.empty(entry["shape"], dtype=kinds[entry["dtype"]])
                if array.nbytes != end - start or file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                    raise ValueError(f"'{name}' is cut off")
                tensors[name] = array
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TornError(f"{path}: not a whole safetensors file: {error}") from None
    return tensors
