"""From a model's safetensors files to a block's arrays: in the run's dtype, packed into 4 bits where that is asked for.

A block is in memory at a time, and the table is packed some rows at a time. Streamed weights are converted once into
the cache; an mlx-lm model that is packed already keeps its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ondevice.errors import ModelError
from ondevice.methods.mesp.mlx.settings import Rope, Settings
from ondevice.methods.mesp.mlx.tensor_file import TensorFile
from ondevice.methods.mesp.mlx.weights import FINAL, TABLE, ResidentBlock, Weights, block_file

if TYPE_CHECKING:
    from ondevice.models import ModelDims

PACKED_ROWS = 16384
"""Rows of the table that are packed at once."""
NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
PARTS = ("weight", "scales", "biases")


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
        """A whole small tensor in the run's dtype."""
        return self._file(name).read(name).astype(self.dtype)

    def block(self, layer: int) -> dict[str, Any]:
        """One block's arrays by their names in the schedule, evaluated."""
        place, dims = f"model.layers.{layer}", self.settings.dims
        found = {f"{ours}.weight": self.vector(f"{place}.{theirs}.weight") for ours, theirs in NORMS.items()}
        for target in dims.linear_shapes:
            name = f"{place}.{self.parents[target]}.{target}"
            found |= {f"{target}.{part}": array for part, array in self.matrix(name).items()}
            if dims.linear_bias(target):
                found[f"{target}.bias"] = self.vector(f"{name}.bias")
        mx.eval(found)
        return found

    def table(self) -> dict[str, Any]:
        """The embedding, and the head where it is another."""
        tables = {"embedding": "model.embed_tokens"} | ({} if self.settings.dims.tied else {"head": "lm_head"})
        return {
            f"{ours}.{part}": array for ours, theirs in tables.items() for part, array in self.matrix(theirs).items()
        }

    def final(self) -> dict[str, Any]:
        """The final norm."""
        return {"final_norm.weight": self.vector("model.norm.weight")}

    def matrix(self, name: str) -> dict[str, Any]:
        """A matrix in the run's form, `PACKED_ROWS` rows at a time."""
        file = self._file(f"{name}.weight")
        if f"{name}.scales" in self.of:
            if not self.settings.bits:
                raise ModelError(f"{self.folder}: the weights are packed", expected="method.bits: 4")
            return {part: self._packed(f"{name}.{part}") for part in PARTS}
        if not self.settings.bits:
            whole = file.read(f"{name}.weight").astype(self.dtype)
            mx.eval(whole)
            return {"weight": whole}
        pieces: list[tuple[Any, ...]] = []
        count = file.shape(f"{name}.weight")[0]
        for low in range(0, count, PACKED_ROWS):
            rows = file.read(f"{name}.weight", low, min(low + PACKED_ROWS, count)).astype(self.dtype)
            pieces.append(tuple(mx.quantize(rows, group_size=self.settings.group_size, bits=self.settings.bits)))
            mx.eval(pieces[-1])
        joined = {part: _join([piece[i] for piece in pieces]) for i, part in enumerate(PARTS)}
        mx.eval(joined)
        return joined

    def _packed(self, name: str) -> Any:
        array = self._file(name).read(name)
        array = array if array.dtype == mx.uint32 else array.astype(self.dtype)
        mx.eval(array)
        return array

    def _file(self, name: str) -> TensorFile:
        if name not in self.of:
            raise ModelError(f"{self.folder}: the weights lack a tensor", expected=name, hint="copy the model again")
        return self.of[name]


def _join(pieces: list[Any]) -> Any:
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)


def read_weights(source: Source) -> Weights:
    """All of a model in memory."""
    settings = source.settings
    table, final = ResidentBlock(source.table()), ResidentBlock(source.final())
    blocks: list[Any] = []
    for layer in range(settings.dims.layers):
        blocks.append(ResidentBlock(source.block(layer)))
        mx.clear_cache()
    return Weights(blocks, table, final, tied=settings.dims.tied, bits=settings.bits, streamed=False)


def write_weights(source: Source, folder: Path) -> None:
    """The files of streamed weights, into an empty folder."""
    for name, arrays in files_of(source):
        mx.save_safetensors(str(folder / name), arrays)
        del arrays
        mx.clear_cache()


def files_of(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and arrays of each file, one at a time."""
    yield TABLE, source.table()
    yield FINAL, source.final()
    for layer in range(source.settings.dims.layers):
        yield block_file(layer), source.block(layer)


def read_rope(config: dict[str, Any], dims: ModelDims, where: str) -> Rope:
    """The rotary embedding of a `config.json`.

    Raises:
        ModelError: a scaling that is more than other wavelengths (`yarn`).
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    if dims.rope_type == "default":
        return Rope(dims.rope_theta)
    if dims.rope_type == "linear":
        return Rope(dims.rope_theta, scale=1.0 / float(rope["factor"]))
    if dims.rope_type != "llama3":
        raise ModelError(
            f"{where}: the rotary embedding's scaling does not run in MLX",
            expected="default, linear or llama3",
            received=dims.rope_type,
            hint="--backend torch",
        )
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(rope["original_max_position_embeddings"])
    found = []
    for pair in range(dims.head_dim // 2):
        wavelength = dims.rope_theta ** (2 * pair / dims.head_dim)
        turns = trained / (2 * math.pi * wavelength)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1.0 / ((1 - smooth) / (factor * wavelength) + smooth / wavelength))
    return Rope(dims.rope_theta, wavelengths=tuple(found))
