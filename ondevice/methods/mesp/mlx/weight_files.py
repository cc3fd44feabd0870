"""A folder of a model's frozen arrays, as a run streams them and as an exported artifact has them.

It holds `block-00000.safetensors` and so on, `table.safetensors` (embedding, and head where it is
another) and `final.safetensors`. What comes next is announced to the system, which reads it next to
the computation into its own cache; that costs this process no memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ondevice.core.dims import LLAMA
from ondevice.methods.mesp.mlx.instructions import Operand
from ondevice.methods.mesp.mlx.weights import ResidentBlock, Source, TensorFile, Weights, select
from ondevice.models.sources import cache

if TYPE_CHECKING:
    from ondevice.methods.mesp.mlx.settings import Settings
    from ondevice.models import ModelFiles

TABLE, FINAL = "table.safetensors", "final.safetensors"


def block_file(layer: int) -> str:
    """Return the name of a block's file."""
    return f"block-{layer:05d}.safetensors"


class StreamedBlock:
    """Arrays in a file: rows are read as they are asked for, columns from a matrix that stays until
    it is dropped."""

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


def open_weights(folder: Path, layers: int, *, tied: bool, bits: int | None) -> Weights:
    """Open weights that are streamed from a folder.

    Raises:
        ModelError: a file is missing or damaged.
    """
    blocks = [StreamedBlock(folder / block_file(i)) for i in range(layers)]
    table, final = StreamedBlock(folder / TABLE), StreamedBlock(folder / FINAL)
    return Weights(blocks, table, final, tied=tied, bits=bits, streamed=True)


def load_weights(folder: Path, layers: int, *, tied: bool, bits: int | None) -> Weights:
    """Read the weights of such a folder into memory."""
    blocks = []
    for name in [*(block_file(i) for i in range(layers)), TABLE, FINAL]:
        file = TensorFile(folder / name)
        blocks.append(ResidentBlock({key: file.read(key) for key in file.entries}))
        file.close()
    return Weights(blocks[:-2], *blocks[-2:], tied=tied, bits=bits, streamed=False)


def write_weights(source: Source, folder: Path) -> None:
    """Write the files of streamed weights, into an empty folder."""
    for name, arrays in files_of(source):
        mx.save_safetensors(str(folder / name), arrays)
        del arrays
        mx.clear_cache()


def files_of(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arrays of each file, one at a time."""
    yield TABLE, source.table()
    yield FINAL, source.final()
    for layer in range(source.settings.dims.layers):
        yield block_file(layer), source.block(layer)


def streamed_folder(files: ModelFiles, settings: Settings, source: Source) -> Path:
    """Return the files of streamed weights in the cache, converted once."""
    packing = f"{settings.bits}-bit-{settings.group_size}" if settings.bits else "dense"
    key = f"mlx/{files.source.sha256[:16]}-{settings.dtype}-{packing}"
    if settings.dims.traits != LLAMA:  # they decide what is in the files
        traits = repr((settings.dims.traits, settings.rope)).encode()
        key += f"-{hashlib.sha256(traits).hexdigest()[:8]}"

    def build(folder: Path) -> dict[str, Any]:
        write_weights(source, folder)
        return {
            "sha256": files.source.sha256,
            "settings": json.dumps([settings.dtype, settings.bits]),
        }

    folder = cache.convert_once(key, files.source.source, build)
    cache.read_record(folder)
    return folder
