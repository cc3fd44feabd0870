"""Tensors of a safetensors file as MLX arrays, read when they are asked for, whole or some of their rows.

Plain reads, not a memory map: a file that is cut off or on a disk that goes away is an error that names it, where
a memory map would end the process. What comes next is announced to the system, which reads it beside the computation
into its own cache; that costs this process no memory.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.errors import ModelError

_TYPES = {
    "F32": (np.float32, None),
    "F16": (np.float16, None),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, None),
}
_READ_ADVICE = 44
"""macOS's fcntl F_RDADVISE, which Python does not name."""


class TensorFile:
    """An open safetensors file.

    Raises:
        ModelError: it is missing, torn, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - held while the model is
            size = os.fstat(self.file.fileno()).st_size
            length = int.from_bytes(self.file.read(8), "little")
            if length > size:
                raise ValueError("the header is longer than the file")
            self.entries: dict[str, Any] = json.loads(self.file.read(length))
            self.start = 8 + length
        except (OSError, ValueError) as error:
            raise self._torn(str(error)) from None
        self.entries.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in self.entries.values()]
        if self.start + max(ends, default=0) > size:
            raise self._torn(f"{size} bytes, of {self.start + max(ends, default=0)}")

    def _torn(self, received: str) -> ModelError:
        return ModelError(f"{self.path} is torn", expected="a whole safetensors file", received=received,
                          hint="copy the model again, or delete the folder where it was converted")  # fmt: skip

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def read(self, name: str, low: int = 0, high: int | None = None) -> Any:
        """A tensor, or rows `low` to `high` of it.

        Raises:
            ModelError: the file ends before the tensor does, or cannot be read.
        """
        kind, start, shape = self._place(name)
        numpy_type, view = _TYPES[kind]
        row = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(numpy_type).itemsize
        high = shape[0] if high is None else high
        array = np.empty((high - low, *shape[1:]), dtype=numpy_type)
        self._fill(array, start + low * row, name)
        result = mx.array(array)
        return result if view is None else result.view(view)

    def rows(self, name: str, numbers: np.ndarray) -> Any:
        """The rows of these numbers [n], one read each where they are not neighbours."""
        kind, start, shape = self._place(name)
        numpy_type, view = _TYPES[kind]
        row = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(numpy_type).itemsize
        wanted, where = np.unique(numbers, return_inverse=True)
        array = np.empty((len(wanted), *shape[1:]), dtype=numpy_type)
        for i, number in enumerate(wanted):
            self._fill(array[i : i + 1], start + int(number) * row, name)
        result = mx.array(array[where])
        return result if view is None else result.view(view)

    def _place(self, name: str) -> tuple[str, int, tuple[int, ...]]:
        entry = self.entries.get(name)
        if entry is None or entry["dtype"] not in _TYPES:
            received = "no such tensor" if entry is None else entry["dtype"]
            raise ModelError(f"{self.path}: tensor '{name}'", expected=", ".join(_TYPES), received=received)
        return entry["dtype"], self.start + entry["data_offsets"][0], tuple(entry["shape"])

    def _fill(self, array: np.ndarray, offset: int, name: str) -> None:
        left = array.reshape(-1).view(np.uint8).data
        try:
            while left:
                count = os.preadv(self.file.fileno(), [left], offset)
                if not count:
                    raise ValueError(f"the file ends within '{name}'")
                left, offset = left[count:], offset + count
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{self.path} cannot be read any more",
                received=str(error),
                hint="is its disk still there? the last checkpoint is whole: resume from it",
            ) from None

    def announce(self) -> None:
        """The whole file is needed soon."""
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            elif sys.platform == "darwin":
                import fcntl

                size = min(os.fstat(self.file.fileno()).st_size, 2**31 - 1)
                fcntl.fcntl(self.file.fileno(), _READ_ADVICE, struct.pack("qi", 0, size))
        except OSError:
            pass  # advice only

    def close(self) -> None:
        self.file.close()
