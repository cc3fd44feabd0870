"""A model's frozen arrays by block: in memory, or in files that are read as a pass needs them.

A folder of streamed weights, and an exported artifact's, holds `block-00000.safetensors` and so on,
`table.safetensors` (embedding, and head where it is another) and `final.safetensors`. Files are read with plain reads,
not through a memory map: a file that is cut off, or on a disk that goes away, is an error that names it, where a memory
map would end the process. What comes next is announced to the system, which reads it beside the computation into its
own cache; that costs this process no memory.
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

from ondevice.core.errors import ModelError
from ondevice.methods.mesp.mlx.instructions import Operand
from ondevice.methods.mesp.mlx.settings import matrix_parts

TABLE, FINAL = "table.safetensors", "final.safetensors"
_TYPES = {
    "F32": (np.float32, None),
    "F16": (np.float16, None),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, None),
}
_READ_ADVICE = 44
"""macOS's fcntl F_RDADVISE, which Python does not name."""


def block_file(layer: int) -> str:
    """Return the name of a block's file."""
    return f"block-{layer:05d}.safetensors"


class ResidentBlock:
    """Arrays in memory."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def get(self, operand: Operand) -> Any:
        """Return an array, or a range of it."""
        return select(self.arrays[operand.name], operand)

    def rows(self, name: str, numbers: np.ndarray) -> Any:
        """Return rows of these numbers."""
        return mx.take(self.arrays[name], mx.array(numbers.astype(np.int32)), axis=0)

    def drop(self, name: str) -> None:
        """Keep it: it stays."""

    def announce(self) -> None:
        """Do nothing: it is there."""

    def close(self) -> None:
        self.arrays = {}


class StreamedBlock:
    """Arrays in a file: rows are read as they are asked for, columns from a matrix that stays until it is dropped."""

    def __init__(self, path: Path) -> None:
        self.file = TensorFile(path)
        self.loaded: dict[str, Any] = {}

    def get(self, operand: Operand) -> Any:
        if operand.axis == 0:
            return self.file.read(operand.name, operand.start, operand.stop)
        if operand.name not in self.loaded:
            self.loaded[operand.name] = self.file.read(operand.name)
        return select(self.loaded[operand.name], operand)

    def rows(self, name: str, numbers: np.ndarray) -> Any:
        return self.file.rows(name, numbers)

    def drop(self, name: str) -> None:
        self.loaded.pop(name, None)

    def announce(self) -> None:
        self.file.announce()

    def close(self) -> None:
        self.loaded = {}
        self.file.close()


class Renamed:
    """A table's arrays under the names that the instructions have for them: `embedding.weight` as `head.weight`."""

    def __init__(self, block: Any, old: str, new: str) -> None:
        self.block, self.old, self.new = block, old, new

    def _name(self, name: str) -> str:
        return self.new + name.removeprefix(self.old)

    def get(self, operand: Operand) -> Any:
        return self.block.get(Operand(self._name(operand.name), operand.axis, operand.start, operand.stop))

    def drop(self, name: str) -> None:
        self.block.drop(self._name(name))


class Weights:
    """All blocks, the table and the final norm.

    Attributes:
        blocks: one of each layer.
        table: `embedding.*`, and `head.*` where it is not tied.
        final: `final_norm.weight`.
        streamed: they are in files.
    """

    def __init__(
        self, blocks: list[Any], table: Any, final: Any, *, tied: bool, bits: int | None, streamed: bool
    ) -> None:
        self.blocks, self.table, self.final = blocks, table, final
        self.tied, self.streamed = tied, streamed
        self.parts = matrix_parts(bits)

    @classmethod
    def in_files(cls, folder: Path, layers: int, *, tied: bool, bits: int | None) -> Weights:
        """Open weights that are streamed from a folder.

        Raises:
            ModelError: a file is missing or damaged.
        """
        blocks = [StreamedBlock(folder / block_file(i)) for i in range(layers)]
        table, final = StreamedBlock(folder / TABLE), StreamedBlock(folder / FINAL)
        return cls(blocks, table, final, tied=tied, bits=bits, streamed=True)

    @classmethod
    def from_files(cls, folder: Path, layers: int, *, tied: bool, bits: int | None) -> Weights:
        """Read the weights of such a folder into memory."""
        blocks = []
        for name in [*(block_file(i) for i in range(layers)), TABLE, FINAL]:
            file = TensorFile(folder / name)
            blocks.append(ResidentBlock({key: file.read(key) for key in file.entries}))
            file.close()
        return cls(blocks[:-2], *blocks[-2:], tied=tied, bits=bits, streamed=False)

    @property
    def head(self) -> Any:
        """The output head under the instructions' names."""
        return Renamed(self.table, "head", "embedding" if self.tied else "head")

    def embedding_rows(self, numbers: np.ndarray) -> dict[str, Any]:
        """Return `rows.*` of these tokens [n], as the stage `embed` takes them."""
        return {f"rows.{part}": self.table.rows(f"embedding.{part}", numbers) for part in self.parts}

    def head_rows(self, numbers: np.ndarray) -> dict[str, Any]:
        """Return `rows.*` of the head for these labels [n], as the stages of the loss take them."""
        name = "embedding" if self.tied else "head"
        return {f"rows.{part}": self.table.rows(f"{name}.{part}", numbers) for part in self.parts}

    def announce(self, layer: int) -> None:
        """Announce that this block comes next."""
        if 0 <= layer < len(self.blocks):
            self.blocks[layer].announce()

    def close(self) -> None:
        """Let files and memory go."""
        for block in (*self.blocks, self.table, self.final):
            block.close()


def select(array: Any, operand: Operand) -> Any:
    """Return the range of an array that `operand` names."""
    if operand.whole:
        return array
    index = [slice(None)] * array.ndim
    index[operand.axis] = slice(operand.start, operand.stop)
    return array[tuple(index)]


class TensorFile:
    """An open safetensors file.

    Raises:
        ModelError: it is missing, damaged, or of another format.
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
            raise self._error("damaged", str(error)) from None
        self.entries.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in self.entries.values()]
        if self.start + max(ends, default=0) > size:
            raise self._error("truncated", f"{size} bytes, of {self.start + max(ends, default=0)}")

    def _error(self, state: str, received: str) -> ModelError:
        return ModelError(f"{self.path} is {state}", expected="a whole safetensors file", received=received,
                          hint="copy the model again, or delete the folder where it was converted")  # fmt: skip

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def read(self, name: str, low: int = 0, high: int | None = None) -> Any:
        """Return a tensor, or rows `low` to `high` of it.

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
        """Return the rows of these numbers [n], one read each where they are not neighbours."""
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
        """Announce that the whole file is needed soon."""
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
