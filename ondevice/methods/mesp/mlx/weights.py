"""A model's frozen arrays by block, and how they are made of its safetensors files: in the run's
dtype, packed into 4 bits if requested. `weight_files` has arrays that stay in files.

Files are read with plain reads, not through a memory map: a file that is cut off, or on a disk that
goes away, is an error that names it, where a memory map would end the process.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.core.errors import ModelError
from ondevice.core.untrusted import read_header
from ondevice.methods.mesp.mlx.instructions import Operand
from ondevice.methods.mesp.mlx.settings import NORMS, SHARED, Settings, matrix_parts

_TYPES = {
    "F32": (np.float32, None),
    "F16": (np.float16, None),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, None),
}
PACKED_ROWS = 16384
"""Rows of the table that are packed at once."""
EXPERTS = {"gate_up": ("gate", "up"), "down": ("down",)}
"""Parameters with a matrix for each expert, and the matrices that each is put together of."""
_READ_ADVICE = 44
"""macOS's fcntl F_RDADVISE, which Python does not name."""


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


class Renamed:
    """A table's arrays under the names that the instructions have for them: `embedding.weight` as
    `head.weight`."""

    def __init__(self, block: Any, old: str, new: str) -> None:
        self.block, self.old, self.new = block, old, new

    def _name(self, name: str) -> str:
        return self.new + name.removeprefix(self.old)

    def get(self, operand: Operand) -> Any:
        return self.block.get(
            Operand(self._name(operand.name), operand.axis, operand.start, operand.stop)
        )

    def drop(self, name: str) -> None:
        self.block.drop(self._name(name))


class Weights:
    """All blocks, the table and the final norm.

    Attributes:
        blocks: one of each layer.
        table: `embedding.*`, and `head.*` if it is not tied.
        final: `final_norm.weight`.
        streamed: they are in files.
    """

    def __init__(
        self,
        blocks: list[Any],
        table: Any,
        final: Any,
        *,
        tied: bool,
        bits: int | None,
        streamed: bool,
    ) -> None:
        self.blocks, self.table, self.final = blocks, table, final
        self.tied, self.streamed = tied, streamed
        self.parts = matrix_parts(bits)

    @property
    def head(self) -> Any:
        """The output head under the instructions' names."""
        return Renamed(self.table, "head", "embedding" if self.tied else "head")

    def embedding_rows(self, numbers: np.ndarray) -> dict[str, Any]:
        """Return `rows.*` of these tokens [n], as the stage `embed` takes them."""
        return {
            f"rows.{part}": self.table.rows(f"embedding.{part}", numbers) for part in self.parts
        }

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
            self.entries = read_header(self.path).tensors
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - held while the model is
        except (OSError, ValueError) as error:
            state = "truncated" if str(error).startswith("truncated") else "damaged"
            raise ModelError(
                f"{self.path} is {state}",
                expected="a whole safetensors file",
                received=str(error),
                hint="copy the model again, or delete the folder where it was converted",
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

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
        """Return the rows of these numbers [n], one read each if they are not neighbours."""
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
        if entry is None or entry.dtype not in _TYPES:
            received = "no such tensor" if entry is None else entry.dtype
            raise ModelError(
                f"{self.path}: tensor '{name}'", expected=", ".join(_TYPES), received=received
            )
        return entry.dtype, entry.start, entry.shape

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


class Source:
    """All safetensors files of a folder, under transformers' names.

    Args:
        folder: of the model.
        settings: what the arrays become.
        parents: the module that holds each linear layer (`Family.linear_parents`).
    """

    def __init__(self, folder: Path, settings: Settings, parents: dict[str, str]) -> None:
        self.folder, self.settings, self.parents = Path(folder), settings, parents
        self.dtype = getattr(mx, settings.dtype)
        self.files = [TensorFile(path) for path in sorted(self.folder.glob("*.safetensors"))]
        self.of = {name: file for file in self.files for name in file.entries}

    def close(self) -> None:
        for file in self.files:
            file.close()

    def vector(self, name: str) -> Any:
        """Return a whole small tensor in the run's dtype."""
        return self._file(name).read(name).astype(self.dtype)

    def block(self, layer: int) -> dict[str, Any]:
        """Return one block's arrays by their names in the instructions, evaluated."""
        place, settings, dims = f"model.layers.{layer}", self.settings, self.settings.dims
        traits = dims.traits
        arrays = {
            f"{NORMS[at]}.weight": self.factor(f"{place}.{module}.weight")
            for at, module in traits.norms
        }
        if traits.windows:
            arrays["window.weight"] = mx.array(
                [traits.window(layer) or float("inf")], dtype=mx.float32
            )
        if settings.rope_by_layer:
            rotation = settings.rope.of_layer(
                settings.rotary_width, traits.rotated(layer), bool(traits.window(layer))
            )
            arrays["rope.weight"] = mx.array(rotation, dtype=mx.float32)
        for target in dims.linear_shapes:
            name = f"{place}.{self.parents[target]}.{target}"
            arrays |= {f"{target}.{part}": array for part, array in self.matrix(name).items()}
            if dims.linear_bias(target):
                arrays[f"{target}.bias"] = self.vector(f"{name}.bias")
        if settings.active_experts:
            arrays |= self.experts(f"{place}.mlp")
        mx.eval(arrays)
        return arrays

    def experts(self, mlp: str) -> dict[str, Any]:
        """Return the arrays of a mixture of experts, whose matrices are [experts, outputs, inputs].

        A file has them so, or each expert's gate, up and down apart (as they are published).
        """
        arrays = {"router.weight": self.vector(f"{mlp}.gate.weight")}
        for name, parts in EXPERTS.items():
            if (whole := f"{mlp}.experts.{name}_proj") in self.of:
                stacked = self._packed_or_dense(self._file(whole).read(whole).astype(self.dtype))
            else:
                each = [
                    self._packed_or_dense(
                        _join(
                            [
                                self.vector(f"{mlp}.experts.{number}.{part}_proj.weight")
                                for part in parts
                            ]
                        )
                    )
                    for number in range(self.settings.dims.experts)
                ]
                stacked = {part: mx.stack([one[part] for one in each]) for part in each[0]}
            mx.eval(stacked)
            arrays |= {f"experts.{name}.{part}": array for part, array in stacked.items()}
        if self.settings.shared:
            arrays["shared_gate.weight"] = self.vector(f"{mlp}.shared_expert_gate.weight")
            for name in SHARED:
                matrix = self.matrix(f"{mlp}.shared_expert.{name.removeprefix('shared.')}_proj")
                arrays |= {f"{name}.{part}": array for part, array in matrix.items()}
        return arrays

    def _packed_or_dense(self, weight: Any) -> dict[str, Any]:
        settings = self.settings
        parts = matrix_parts(settings.bits)
        if not settings.bits:
            return {"weight": weight}
        packed = dict(
            zip(
                parts,
                mx.quantize(weight, group_size=settings.group_size, bits=settings.bits),
                strict=True,
            )
        )
        mx.eval(packed)
        return packed

    def table(self) -> dict[str, Any]:
        """Return the embedding, and the head if it is another."""
        tables = {"embedding": "model.embed_tokens"} | (
            {} if self.settings.dims.tied else {"head": "lm_head"}
        )
        return {
            f"{ours}.{part}": array
            for ours, theirs in tables.items()
            for part, array in self.matrix(theirs).items()
        }

    def final(self) -> dict[str, Any]:
        weight, scale = self.factor("model.norm.weight"), self.settings.dims.traits.logit_scale
        # Logits are linear in it, so their factor is its.
        return {"final_norm.weight": weight if scale == 1.0 else weight.astype(mx.float32) * scale}

    def factor(self, name: str) -> Any:
        """Return what a norm multiplies by: its weight, or 1 + w in float32."""
        weight = self.vector(name)
        return 1.0 + weight.astype(mx.float32) if self.settings.dims.traits.norm_offset else weight

    def matrix(self, name: str) -> dict[str, Any]:
        """Read a matrix and pack it if the run's are packed, `PACKED_ROWS` rows at a time."""
        file = self._file(f"{name}.weight")
        if f"{name}.scales" in self.of:
            if not self.settings.bits:
                raise ModelError(
                    f"{self.folder}: the weights are packed", expected="method.bits: 4"
                )
            return {
                part: self._packed(f"{name}.{part}") for part in matrix_parts(self.settings.bits)
            }
        if not self.settings.bits:
            weight = file.read(f"{name}.weight").astype(self.dtype)
            mx.eval(weight)
            return {"weight": weight}
        tiles: list[tuple[Any, ...]] = []
        count = file.shape(f"{name}.weight")[0]
        for low in range(0, count, PACKED_ROWS):
            rows = file.read(f"{name}.weight", low, min(low + PACKED_ROWS, count)).astype(
                self.dtype
            )
            tiles.append(
                tuple(
                    mx.quantize(rows, group_size=self.settings.group_size, bits=self.settings.bits)
                )
            )
            mx.eval(tiles[-1])
        joined = {
            part: _join([tile[i] for tile in tiles])
            for i, part in enumerate(matrix_parts(self.settings.bits))
        }
        mx.eval(joined)
        return joined

    def _packed(self, name: str) -> Any:
        array = self._file(name).read(name)
        array = array if array.dtype == mx.uint32 else array.astype(self.dtype)
        mx.eval(array)
        return array

    def _file(self, name: str) -> TensorFile:
        if name not in self.of:
            raise ModelError(
                f"{self.folder}: the weights lack a tensor",
                expected=name,
                hint="copy the model again",
            )
        return self.of[name]


def _join(tiles: list[Any]) -> Any:
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles)


def read_weights(source: Source) -> Weights:
    """Read all of a model into memory."""
    settings = source.settings
    table, final = ResidentBlock(source.table()), ResidentBlock(source.final())
    blocks: list[Any] = []
    for layer in range(settings.dims.layers):
        blocks.append(ResidentBlock(source.block(layer)))
        mx.clear_cache()
    return Weights(
        blocks, table, final, tied=settings.dims.tied, bits=settings.bits, streamed=False
    )
