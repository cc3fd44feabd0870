"""A model's frozen arrays by block: made of its safetensors files in the run's dtype, packed into 4
bits if requested, and kept in memory or streamed from a folder.

The folder holds `block-00000.safetensors` and so on, `table.safetensors` (the embedding, and the
head if it is another) and `final.safetensors`; an exported artifact has it too. The system is told
which file comes next, and reads it into its own cache, which costs this process no memory.

Files are read with plain reads, not through a memory map: a file that is cut off, or on a disk that
goes away, is an error that names it, while a memory map would end the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ondevice.core.dims import MoeDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import LLAMA
from ondevice.core.untrusted import read_header
from ondevice.methods.mesp.mlx.mixers import Operand
from ondevice.methods.mesp.mlx.settings import NORMS, SHARED, Settings, matrix_parts
from ondevice.models.families.base import BLOCKS
from ondevice.models.sources import cache
from ondevice.models.text_model import text_name

if TYPE_CHECKING:
    from ondevice.models import Family, ModelFiles

TABLE, FINAL = "table.safetensors", "final.safetensors"
_TYPES = {
    "F32": (np.float32, None),
    "F16": (np.float16, None),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, None),
}
PACKED_ROWS = 16384
"""Rows of the table that are packed at once."""
EXPERTS = {
    "gate_up": (
        ("experts.gate_up_proj", "input_linear.weight"),
        (("gate_proj", "up_proj"), ("w1", "w3")),
    ),
    "down": (("experts.down_proj", "output_linear.weight"), (("down_proj",), ("w2",))),
}
"""Parameters with a matrix for each expert: the names that files have for them, and for the
matrices of an expert that each is put together of."""
_READ_ADVICE = 44
"""macOS's fcntl F_RDADVISE, which Python does not name."""


class TensorFile:
    """An open safetensors file.

    Raises:
        ModelError: it is missing, damaged, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.entries = read_header(self.path).tensors
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - open as long as the model
        except (OSError, ValueError) as error:
            state = "truncated" if str(error).startswith("truncated") else "damaged"
            raise ModelError(
                f"{self.path} is {state}",
                expected="a complete safetensors file",
                received=str(error),
                hint="copy the model again, or delete the folder where it was converted",
            ) from None

    def read(self, name: str, *ranges: tuple[int, int]) -> Any:
        """Return the rows of `ranges`, or the entire tensor.

        Raises:
            ModelError: the file ends before the tensor does, or cannot be read.
        """
        return self._array(name, ranges, slice(None))

    def rows(self, name: str, numbers: np.ndarray) -> Any:
        """Return the rows of these numbers [n], each of which is read once."""
        different, order = np.unique(numbers, return_inverse=True)
        return self._array(name, [(int(row), int(row) + 1) for row in different], order)

    def _array(self, name: str, ranges: Iterable[tuple[int, int]], order: Any) -> Any:
        """Read `ranges` one after the other and return their rows in `order`."""
        entry = self.entries.get(name)
        if entry is None or entry.dtype not in _TYPES:
            received = "no such tensor" if entry is None else entry.dtype
            raise ModelError(
                f"{self.path}: tensor '{name}'", expected=", ".join(_TYPES), received=received
            )
        numpy_type, view = _TYPES[entry.dtype]
        ranges = [*ranges] or [(0, entry.shape[0])]
        array = np.empty((sum(high - low for low, high in ranges), *entry.shape[1:]), numpy_type)
        filled = 0
        for low, high in ranges:
            part = array[filled : filled + high - low]
            row_bytes = part.nbytes // max(1, high - low)
            self._fill(part, entry.start + low * row_bytes, name)
            filled += high - low
        result = mx.array(array[order])
        return result if view is None else result.view(view)

    def _fill(self, array: np.ndarray, offset: int, name: str) -> None:
        left = array.reshape(-1).view(np.uint8).data
        try:
            while left:
                count = os.preadv(self.file.fileno(), [left], offset)
                if not count:
                    raise ValueError(f"the file ends within '{name}'")
                left = left[count:]
                offset += count
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{self.path} cannot be read any more",
                received=str(error),
                hint="is its disk still there? the last checkpoint is complete: resume from it",
            ) from None

    def announce(self) -> None:
        """Tell the system that the entire file is needed soon."""
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            elif sys.platform == "darwin":
                import fcntl

                size = min(os.fstat(self.file.fileno()).st_size, 2**31 - 1)
                fcntl.fcntl(self.file.fileno(), _READ_ADVICE, struct.pack("qi", 0, size))
        except OSError:
            pass  # advice only


class Block:
    """Arrays by name: in memory, or read from a file when they are asked for.

    Of a file, rows are read at each use; a matrix whose columns are needed is read once and stays
    until it is dropped.
    """

    def __init__(
        self, arrays: dict[str, Any] | None = None, file: TensorFile | None = None
    ) -> None:
        self.arrays = arrays or {}
        self.file = file

    def get(self, operand: Operand) -> Any:
        """Return an array, or a range of it."""
        if self.file is not None:
            if operand.axis == 0:
                return self.file.read(operand.name, (operand.start, operand.stop))
            if operand.name not in self.arrays:
                self.arrays[operand.name] = self.file.read(operand.name)
        return select(self.arrays[operand.name], operand)

    def rows(self, name: str, numbers: np.ndarray) -> Any:
        """Return rows of these numbers."""
        if self.file is not None:
            return self.file.rows(name, numbers)
        return mx.take(self.arrays[name], mx.array(numbers.astype(np.int32)), axis=0)

    def drop(self, name: str) -> None:
        """Free an array that can be read again; one in memory stays."""
        if self.file is not None:
            self.arrays.pop(name, None)

    def announce(self) -> None:
        """Announce that this block comes next."""
        if self.file is not None:
            self.file.announce()

    def close(self) -> None:
        """Close the file and free all arrays."""
        self.arrays = {}
        if self.file is not None:
            self.file.file.close()


class Weights:
    """All blocks, the table and the final norm.

    Attributes:
        blocks: one of each layer.
        table: `embedding.*` and `head.*`, which are the same arrays if `tied`.
        final: `final_norm.weight`.
    """

    def __init__(
        self, blocks: list[Block], table: Block, final: Block, *, tied: bool, bits: int | None
    ) -> None:
        self.blocks = blocks
        self.table = table
        self.final = final
        self.tied = tied
        self.parts = matrix_parts(bits)
        if tied:
            arrays: dict[str, Any] = table.file.entries if table.file else table.arrays
            arrays |= {f"head.{part}": arrays[f"embedding.{part}"] for part in self.parts}

    def rows(self, matrix: str, numbers: np.ndarray) -> dict[str, Any]:
        """Return `rows.*` of the embedding or the head for these tokens [n]."""
        return {f"rows.{part}": self.table.rows(f"{matrix}.{part}", numbers) for part in self.parts}

    def announce(self, layer: int) -> None:
        """Announce that this block comes next."""
        if 0 <= layer < len(self.blocks):
            self.blocks[layer].announce()

    def close(self) -> None:
        """Close all files and free the memory."""
        for block in (*self.blocks, self.table, self.final):
            block.close()


def select(array: Any, operand: Operand) -> Any:
    """Return the range of an array that `operand` names."""
    if operand.whole:
        return array
    index = [slice(None)] * array.ndim
    index[operand.axis] = slice(operand.start, operand.stop)
    return array[tuple(index)]


class Source:
    """All safetensors files of a folder, under transformers' names.

    Args:
        folder: of the model.
        settings: what the arrays become.
        family: names the tensors.
    """

    def __init__(self, folder: Path, settings: Settings, family: type[Family]) -> None:
        self.folder = Path(folder)
        self.settings = settings
        self.family = family
        self.dtype = getattr(mx, settings.dtype)
        self.files = [TensorFile(path) for path in sorted(self.folder.glob("*.safetensors"))]
        if family.blocks != BLOCKS:
            for file in self.files:
                file.entries = {text_name(name): entry for name, entry in file.entries.items()}
        self.of = {name: file for file in self.files for name in file.entries}

    def close(self) -> None:
        for file in self.files:
            file.file.close()

    def blocks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the file's name and the arrays of each block, one at a time."""
        yield TABLE, self.table()
        yield FINAL, self.final()
        for layer in range(self.settings.dims.layers):
            yield block_file(layer), self.block(layer)

    def vector(self, name: str) -> Any:
        """Return an entire tensor in the run's dtype."""
        return self._file(name).read(name).astype(self.dtype)

    def factor(self, name: str) -> Any:
        """Return what a norm multiplies by: its weight, or 1 + w in float32."""
        weight = self.vector(name)
        return 1.0 + weight.astype(mx.float32) if self.settings.dims.traits.norm_offset else weight

    def block(self, layer: int) -> dict[str, Any]:
        """Return one block's arrays by their names in the instructions, evaluated."""
        prefix = f"model.layers.{layer}"
        settings = self.settings
        dims = settings.dims
        arrays = {
            f"{NORMS[position]}.weight": self.factor(f"{prefix}.{module}.weight")
            for position, module in dims.traits.norms_of(layer)
        }
        for name, values in settings.of_layer(layer).items():
            arrays[name] = mx.array(values, dtype=mx.float32)
        for part, one in dims.block_linears(layer).items():
            name = self.family.weight_path(layer, one.target)
            arrays |= self.matrix(name, part)
            if dims.linear_bias(one.target):
                arrays[f"{part}.bias"] = self.vector(f"{name}.bias")
        if dims.traits.layer_input:
            arrays |= self.layer_input(layer)
        for part, (name, (channels, *_)) in dims.mixer_tensors(layer).items():
            value = self.vector(f"{prefix}.{name}")
            if part == "taps":
                value = value.reshape(channels, -1)  # mlx-lm's have [channels, taps, 1]
            arrays[f"{part}.weight"] = value
        if isinstance(dims, MoeDims):
            family: Any = self.family
            for part in dims.dense_shapes(layer):
                arrays |= self.matrix(f"{prefix}.{family.dense_path(part)}", part)
        if settings.at(layer).routes or settings.beside:
            mlp, router = (f"{prefix}.{dims.traits.path(part)}" for part in ("mlp", "mlp.gate"))
            arrays |= self.experts(mlp.rstrip("."), router)
        mx.eval(arrays)
        return arrays

    def layer_input(self, layer: int) -> dict[str, Any]:
        """Return a layer's columns of the tokens' embeddings, and what projects their embedding."""
        width = self.settings.dims.traits.layer_input
        table, projection, norm = self.family.input_tensors
        own = (layer * width, (layer + 1) * width)
        file = self._file(table)
        count = file.entries[table].shape[0]
        tiles = [
            self._packed(
                file.read(table, (low, min(low + PACKED_ROWS, count)))[:, slice(*own)]
                .astype(self.dtype)
            )
            for low in range(0, count, PACKED_ROWS)
        ]  # fmt: skip
        parts = matrix_parts(self.settings.bits)
        arrays = {f"layer_rows.{part}": _join([tile[part] for tile in tiles]) for part in parts}
        packed = self._packed(self._file(projection).read(projection, own).astype(self.dtype))
        arrays |= {f"layer_projection.{part}": packed[part] for part in parts}
        return arrays | {"layer_input_norm.weight": self.factor(norm)}

    def experts(self, mlp: str, router: str) -> dict[str, Any]:
        """Return the arrays of a mixture of experts, whose matrices are [experts, outputs, inputs].

        A file has them so, or (as they are published) gate, up and down of each expert.
        """
        own = f"{router}.weight"
        arrays = {"router.weight": self.vector(own if own in self.of else f"{router}.layer.weight")}
        if self.settings.routing.bias:
            arrays["router.bias"] = self.vector(f"{mlp}.expert_bias")
        for name, (wholes, listed) in EXPERTS.items():
            whole = [path for path in (f"{mlp}.{one}" for one in wholes) if path in self.of]
            if whole:
                stacked = self._packed(self.vector(whole[0]))
            else:
                each: list[dict[str, Any]] = []
                first = f"{mlp}.experts.0"
                parts = next(
                    (some for some in listed if f"{first}.{some[0]}.weight" in self.of), listed[0]
                )
                for number in range(self.settings.dims.experts):
                    names = [f"{mlp}.experts.{number}.{part}.weight" for part in parts]
                    each.append(self._packed(_join([self.vector(name) for name in names])))
                stacked = {part: mx.stack([one[part] for one in each]) for part in each[0]}
            mx.eval(stacked)
            arrays |= {f"experts.{name}.{part}": array for part, array in stacked.items()}
        if self.settings.shared:
            arrays["shared_gate.weight"] = self.vector(f"{mlp}.shared_expert_gate.weight")
            for name in SHARED:
                linear = f"{name.removeprefix('shared.')}_proj"
                arrays |= self.matrix(f"{mlp}.shared_expert.{linear}", name)
        return arrays

    def table(self) -> dict[str, Any]:
        """Return the embedding, and the head if it is another."""
        embedding = self.matrix("model.embed_tokens", "embedding")
        return embedding if self.settings.dims.tied else embedding | self.matrix("lm_head", "head")

    def final(self) -> dict[str, Any]:
        weight = self.factor(f"{self.family.last_norm}.weight")
        scale = self.settings.dims.traits.logit_scale
        if scale != 1.0:  # logits are linear in the norm's output
            weight = weight.astype(mx.float32) * scale
        return {"final_norm.weight": weight}

    def matrix(self, name: str, target: str) -> dict[str, Any]:
        """Read a matrix as `target.*`, packed if the run's are, `PACKED_ROWS` rows at a time."""
        file = self._file(f"{name}.weight")
        parts = matrix_parts(self.settings.bits)
        if f"{name}.scales" in self.of:
            if not self.settings.bits:
                raise ModelError(f"{self.folder}: packed weights", expected="method.bits")
            read = {part: self._file(f"{name}.{part}").read(f"{name}.{part}") for part in parts}
            arrays = {
                part: array if array.dtype == mx.uint32 else array.astype(self.dtype)
                for part, array in read.items()
            }
        else:
            count = file.entries[f"{name}.weight"].shape[0]
            step = PACKED_ROWS if self.settings.bits else count
            tiles = [
                self._packed(
                    file.read(f"{name}.weight", (low, min(low + step, count))).astype(self.dtype)
                )
                for low in range(0, count, step)
            ]
            arrays = {part: _join([tile[part] for tile in tiles]) for part in parts}
        mx.eval(arrays)
        return {f"{target}.{part}": array for part, array in arrays.items()}

    def _packed(self, weight: Any) -> dict[str, Any]:
        settings = self.settings
        arrays = [weight]
        if settings.bits:
            arrays = mx.quantize(weight, group_size=settings.group_size, bits=settings.bits)
            mx.eval(arrays)
        return dict(zip(matrix_parts(settings.bits), arrays, strict=True))

    def _file(self, name: str) -> TensorFile:
        if name not in self.of:
            raise ModelError(
                f"{self.folder}: missing tensor in the weights files",
                expected=name,
                hint="copy the model again",
            )
        return self.of[name]


def _join(tiles: list[Any]) -> Any:
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles)


def block_file(layer: int) -> str:
    """Return the name of a block's file."""
    return f"block-{layer:05d}.safetensors"


def resident_weights(blocks: Iterable[tuple[str, dict[str, Any]]], settings: Settings) -> Weights:
    """Return weights in memory, of what `Source.blocks` yields."""
    by_name: dict[str, Block] = {}
    for name, arrays in blocks:
        by_name[name] = Block(arrays)
        mx.clear_cache()
    return _weights(by_name, settings)


def load_weights(folder: Path, settings: Settings) -> Weights:
    """Read the weights of a folder of blocks into memory."""

    def blocks() -> Iterator[tuple[str, dict[str, Any]]]:
        for name, block in _open(folder, settings.dims.layers).items():
            assert block.file is not None  # noqa: S101 - just opened
            yield name, {key: block.file.read(key) for key in block.file.entries}
            block.close()

    return resident_weights(blocks(), settings)


def open_weights(folder: Path, settings: Settings) -> Weights:
    """Open weights that are streamed from a folder.

    Raises:
        ModelError: a file is missing or damaged.
    """
    return _weights(_open(folder, settings.dims.layers), settings)


def _open(folder: Path, layers: int) -> dict[str, Block]:
    names = [TABLE, FINAL, *map(block_file, range(layers))]
    return {name: Block(file=TensorFile(folder / name)) for name in names}


def _weights(blocks: dict[str, Block], settings: Settings) -> Weights:
    table, final = blocks.pop(TABLE), blocks.pop(FINAL)
    return Weights([*blocks.values()], table, final, tied=settings.dims.tied, bits=settings.bits)


def write_weights(source: Source, folder: Path) -> None:
    """Write the files of streamed weights into an empty folder."""
    for name, arrays in source.blocks():
        mx.save_safetensors(str(folder / name), arrays)
        del arrays
        mx.clear_cache()


def streamed_folder(files: ModelFiles, settings: Settings, source: Source) -> Path:
    """Return the files of streamed weights in the cache, converted once."""
    packing = f"{settings.bits}-bit-{settings.group_size}" if settings.bits else "dense"
    key = f"mlx/{files.source.sha256[:16]}-{settings.dtype}-{packing}"
    if settings.dims.traits != LLAMA:  # the files depend on them
        traits = repr((settings.dims.traits, settings.rope)).encode()
        key += f"-{hashlib.sha256(traits).hexdigest()[:8]}"

    def build(folder: Path) -> dict[str, Any]:
        write_weights(source, folder)
        described = json.dumps([settings.dtype, settings.bits])
        return {"sha256": files.source.sha256, "settings": described}

    folder = cache.convert_once(key, files.source.source, build)
    cache.read_record(folder)
    return folder
