"""Layout of the LoRA-FA matrices in the flat adapter vector.

All trained B matrices are one float32 vector, layer by layer, so that a program has one state
tensor, a layer's noise is one range of one stream, and a host needs one buffer. Ranges start at
multiples of 64 elements, because one generator word holds 64 Rademacher signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ondevice.artifact.adapter_fit import check_fits, check_frozen_a
from ondevice.runtime_ops import generator

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.artifact.adapter import Adapter
    from ondevice.core.dims import ModelDims
    from ondevice.methods.prge.config import PrgeConfig

ALIGNMENT = 64
DIRECTIONS = 4
"""Directions of a gradient's subspace a unit of rank."""
KEPT_BLOCKS = 3
"""Changes of earlier subspaces are kept to so many times their directions, which is exact for so
many of them."""
NOISE_TENSOR = 0
"""Stream of the perturbations (the generator's tensor id)."""
FROZEN_A_TENSOR = 1
"""Stream of the frozen A matrices; one step number for each (layer, target)."""


@dataclass(frozen=True)
class Entry:
    """One trained matrix: float32 [rank, width] at `offset` (elements) of the flat vector."""

    layer: int
    target: str
    offset: int
    rank: int
    inputs: int
    outputs: int
    diagonal: bool = False
    """True if a diagonal R, its `rank` numbers, is trained between fixed A and C, rather than B.
    """

    @property
    def name(self) -> str:
        """Name in files: layer and target."""
        return f"{self.layer}.{self.target}"

    @property
    def width(self) -> int:
        """Columns of the trained matrices."""
        return 1 if self.diagonal else self.outputs

    @property
    def count(self) -> int:
        return self.rank * self.width

    def shaped(self, copies: Tensor) -> Tensor:
        """Return copies of the trained matrix, [copies, rank, width]."""
        return copies.reshape(-1, self.rank, self.width)


@dataclass(frozen=True)
class Factors:
    """A and C of one linear layer: a float32 [inputs, rank], c float32 [rank, outputs]."""

    a: Tensor
    c: Tensor


@dataclass(frozen=True)
class AdapterLayout:
    """All B matrices of a run, in layer order."""

    entries: tuple[Entry, ...]
    size: int
    """Elements of the flat vector, padding included."""
    seed: int

    @classmethod
    def build(cls, dims: ModelDims, config: PrgeConfig, seed: int) -> AdapterLayout:
        """Lay out `config.target_modules` of the perturbed layers of a model with dimensions
        `dims`. A small matrix has no more directions of a gradient's subspace than its sides."""
        first = max(0, dims.layers - (config.top_layers or dims.layers))
        entries = []
        offset = 0
        diagonal = config.subspace == "gradient"
        for linear in dims.adapted(config, first):
            inputs = linear.inputs
            outputs = linear.outputs
            rank = config.rank
            if diagonal:
                rank = min(DIRECTIONS * rank, inputs, outputs)
            entries.append(
                Entry(linear.layer, linear.target, offset, rank, inputs, outputs, diagonal)
            )
            offset += -(-entries[-1].count // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), offset, seed)

    @property
    def first_layer(self) -> int:
        return self.entries[0].layer

    def of_layer(self, layer: int) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.layer == layer)

    def layer_range(self, layer: int) -> tuple[int, int]:
        """Start and count (elements) of a layer's range; (0, 0) if none of its layers is
        trained."""
        entries = self.of_layer(layer)
        if not entries:
            return 0, 0
        return entries[0].offset, entries[-1].offset + entries[-1].count - entries[0].offset

    def frozen_a(self, entry: Entry) -> np.ndarray:
        """Return the frozen A of `entry`: float32 [inputs, rank], Gaussian with PEFT's variance
        1/(3 inputs)."""
        count = entry.inputs * entry.rank
        position = self.entries.index(entry)
        values = generator.normal(self.seed, position, FROZEN_A_TENSOR, 1, 0, count)[0]
        scale = np.float32(1.0 / np.sqrt(3.0 * entry.inputs))
        return values.reshape(entry.inputs, entry.rank) * scale

    def to_tensors(
        self, flat: np.ndarray, names: dict[tuple[int, str], str]
    ) -> dict[str, np.ndarray]:
        """Return PEFT's tensors: `<linear>.lora_A.weight` [rank, inputs], `<linear>.lora_B.weight`
        [outputs, rank]."""
        tensors = {}
        for entry in self.entries:
            name = names[(entry.layer, entry.target)]
            b = flat[entry.offset : entry.offset + entry.count].reshape(entry.rank, entry.outputs)
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(self.frozen_a(entry).T)
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b.T)
        return tensors

    def from_adapter(
        self, adapter: Adapter, names: dict[tuple[int, str], str], alpha: float
    ) -> np.ndarray:
        """Return the flat vector of `adapter`; the inverse of `to_tensors`.

        Raises:
            ArtifactError: it has another alpha, rank, linear layers or shapes than this layout, or
                another A.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            name = names[(entry.layer, entry.target)]
            shapes[f"{name}.lora_A.weight"] = (entry.rank, entry.inputs)
            shapes[f"{name}.lora_B.weight"] = (entry.outputs, entry.rank)
        tensors = check_fits(adapter, shapes, self.entries[0].rank, alpha)
        flat = np.zeros(self.size, dtype=np.float32)
        for entry in self.entries:
            name = names[(entry.layer, entry.target)]
            a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
            check_frozen_a(name, a, self.frozen_a(entry).T, self.seed)
            flat[entry.offset : entry.offset + entry.count] = b.T.reshape(-1)
        return flat
