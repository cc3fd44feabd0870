"""A model's safetensors files as a run's frozen arrays: by the instructions' names, in the run's dtype, packed into 4
bits where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from ondevice.core.errors import ModelError
from ondevice.methods.mesp.mlx.settings import NORMS, SHARED, Settings, matrix_parts
from ondevice.methods.mesp.mlx.weights import FINAL, TABLE, ResidentBlock, TensorFile, Weights, block_file

PACKED_ROWS = 16384
"""Rows of the table that are packed at once."""
EXPERTS = {"gate_up": ("gate", "up"), "down": ("down",)}
"""Parameters with a matrix for each expert, and the matrices that each is put together of."""


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
        arrays = {f"{NORMS[at]}.weight": self.factor(f"{place}.{module}.weight") for at, module in traits.norms}
        if traits.windows:
            arrays["window.weight"] = mx.array([traits.window(layer) or float("inf")], dtype=mx.float32)
        if settings.rope_by_layer:
            rotation = settings.rope.of_layer(settings.rotary_width, traits.rotated(layer), bool(traits.window(layer)))
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
                        _join([self.vector(f"{mlp}.experts.{number}.{part}_proj.weight") for part in parts])
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
        packed = dict(zip(parts, mx.quantize(weight, group_size=settings.group_size, bits=settings.bits), strict=True))
        mx.eval(packed)
        return packed

    def table(self) -> dict[str, Any]:
        """Return the embedding, and the head where it is another."""
        tables = {"embedding": "model.embed_tokens"} | ({} if self.settings.dims.tied else {"head": "lm_head"})
        return {
            f"{ours}.{part}": array for ours, theirs in tables.items() for part, array in self.matrix(theirs).items()
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
        """Read a matrix and pack it where the run's are packed, `PACKED_ROWS` rows at a time."""
        file = self._file(f"{name}.weight")
        if f"{name}.scales" in self.of:
            if not self.settings.bits:
                raise ModelError(f"{self.folder}: the weights are packed", expected="method.bits: 4")
            return {part: self._packed(f"{name}.{part}") for part in matrix_parts(self.settings.bits)}
        if not self.settings.bits:
            weight = file.read(f"{name}.weight").astype(self.dtype)
            mx.eval(weight)
            return {"weight": weight}
        tiles: list[tuple[Any, ...]] = []
        count = file.shape(f"{name}.weight")[0]
        for low in range(0, count, PACKED_ROWS):
            rows = file.read(f"{name}.weight", low, min(low + PACKED_ROWS, count)).astype(self.dtype)
            tiles.append(tuple(mx.quantize(rows, group_size=self.settings.group_size, bits=self.settings.bits)))
            mx.eval(tiles[-1])
        joined = {part: _join([tile[i] for tile in tiles]) for i, part in enumerate(matrix_parts(self.settings.bits))}
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
    return Weights(blocks, table, final, tied=settings.dims.tied, bits=settings.bits, streamed=False)


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
