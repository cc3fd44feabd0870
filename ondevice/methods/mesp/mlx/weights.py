"""A model's frozen arrays by block: in memory, or in files that are read as a pass needs them.

Both give the same arrays. A folder of streamed weights, and an exported artifact's, holds `block-00000.safetensors`
and so on, `table.safetensors` (embedding, and head where it is another) and `final.safetensors`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.methods.mesp.mlx.schedule import Ref
from ondevice.methods.mesp.mlx.tensor_file import TensorFile

TABLE, FINAL = "table.safetensors", "final.safetensors"


def block_file(layer: int) -> str:
    """The name of a block's file."""
    return f"block-{layer:05d}.safetensors"


class ResidentBlock:
    """Arrays in memory."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def get(self, ref: Ref) -> Any:
        """An array, or a range of it."""
        return part(self.arrays[ref.name], ref)

    def rows(self, name: str, numbers: np.ndarray) -> Any:
        """Rows of these numbers."""
        return mx.take(self.arrays[name], mx.array(numbers.astype(np.int32)), axis=0)

    def drop(self, name: str) -> None:
        """It stays."""

    def announce(self) -> None:
        """It is there."""

    def close(self) -> None:
        self.arrays = {}


class StreamedBlock:
    """Arrays in a file: rows are read as they are asked for, columns from a matrix that stays until it is dropped."""

    def __init__(self, path: Path) -> None:
        self.file = TensorFile(path)
        self.held: dict[str, Any] = {}

    def get(self, ref: Ref) -> Any:
        if ref.axis == 0:
            return self.file.read(ref.name, ref.start, ref.stop)
        if ref.name not in self.held:
            self.held[ref.name] = self.file.read(ref.name)
        return part(self.held[ref.name], ref)

    def rows(self, name: str, numbers: np.ndarray) -> Any:
        return self.file.rows(name, numbers)

    def drop(self, name: str) -> None:
        self.held.pop(name, None)

    def announce(self) -> None:
        self.file.announce()

    def close(self) -> None:
        self.held = {}
        self.file.close()


class Renamed:
    """A table's arrays under the names that the schedule has for them: `embedding.weight` as `head.weight`."""

    def __init__(self, block: Any, old: str, new: str) -> None:
        self.block, self.old, self.new = block, old, new

    def _name(self, name: str) -> str:
        return self.new + name.removeprefix(self.old)

    def get(self, ref: Ref) -> Any:
        return self.block.get(Ref(self._name(ref.name), ref.axis, ref.start, ref.stop))

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
        self.parts = ("weight", "scales", "biases") if bits else ("weight",)

    @classmethod
    def in_files(cls, folder: Path, layers: int, *, tied: bool, bits: int | None) -> Weights:
        """Streamed from a folder.

        Raises:
            ModelError: a file is missing or torn.
        """
        blocks = [StreamedBlock(folder / block_file(i)) for i in range(layers)]
        table, final = StreamedBlock(folder / TABLE), StreamedBlock(folder / FINAL)
        return cls(blocks, table, final, tied=tied, bits=bits, streamed=True)

    @classmethod
    def from_files(cls, folder: Path, layers: int, *, tied: bool, bits: int | None) -> Weights:
        """Read whole into memory from such a folder."""
        found = []
        for name in [*(block_file(i) for i in range(layers)), TABLE, FINAL]:
            file = TensorFile(folder / name)
            found.append(ResidentBlock({key: file.read(key) for key in file.entries}))
            file.close()
        return cls(found[:-2], *found[-2:], tied=tied, bits=bits, streamed=False)

    @property
    def head(self) -> Any:
        """The output head under the schedule's names."""
        return Renamed(self.table, "head", "embedding" if self.tied else "head")

    def embedding_rows(self, numbers: np.ndarray) -> dict[str, Any]:
        """`rows.*` of these tokens [n], as the schedule's `embed` takes them."""
        return {f"rows.{part}": self.table.rows(f"embedding.{part}", numbers) for part in self.parts}

    def head_rows(self, numbers: np.ndarray) -> dict[str, Any]:
        """`rows.*` of the head for these labels [n], as the schedule's `loss` takes them."""
        name = "embedding" if self.tied else "head"
        return {f"rows.{part}": self.table.rows(f"{name}.{part}", numbers) for part in self.parts}

    def announce(self, layer: int) -> None:
        """That block comes next."""
        if 0 <= layer < len(self.blocks):
            self.blocks[layer].announce()

    def close(self) -> None:
        """Let files and memory go."""
        for block in (*self.blocks, self.table, self.final):
            block.close()


def part(array: Any, ref: Ref) -> Any:
    """What `ref` names of an array."""
    if ref.whole:
        return array
    index = [slice(None)] * array.ndim
    index[ref.axis] = slice(ref.start, ref.stop)
    return array[tuple(index)]
