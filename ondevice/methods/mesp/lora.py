"""The trained LoRA matrices of a run: their linear layers, names, first values, and positions in
the flat vector of an exported program.

The same numbers on every backend: A is drawn from the project's generator, B is zero. Names are
PEFT's, for adapters and for checkpoints alike, so that a run may go on with another backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.adapter_fit import check_fits
from ondevice.core.errors import CheckpointError, TrainingError
from ondevice.methods.mesp.check import check_family
from ondevice.runtime_ops import generator

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ondevice.artifact.adapter import Adapter
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import Family

A_TENSOR = 1
"""Stream of the initial A matrices; one step number for each linear layer."""
ALIGNMENT = 64
"""Elements: where a matrix begins in the flat vector."""


@dataclass(frozen=True)
class LoraParameters:
    """A float32 [rank, inputs] and B float32 [outputs, rank] of one linear layer.

    For the matrices of a layer's experts they are [experts * rank, inputs] and [outputs, rank *
    experts], as PEFT lays them out (`ondevice.nn.experts.pair_of`).

    Attributes:
        target: the linear layer's name in its block, such as `q_proj`.
        name: its full name, such as `model.layers.0.self_attn.q_proj`.
        number: position among the run's, in order of layers and of `config.target_modules`.
    """

    layer: int
    target: str
    name: str
    number: int
    rank: int
    inputs: int
    outputs: int
    experts: int = 1

    @property
    def a_name(self) -> str:
        return f"{self.name}.lora_A.weight"

    @property
    def b_name(self) -> str:
        return f"{self.name}.lora_B.weight"

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of A and B by name."""
        ranks = self.rank * self.experts
        return {self.a_name: (ranks, self.inputs), self.b_name: (self.outputs, ranks)}

    @property
    def count(self) -> int:
        """Trained numbers."""
        return self.rank * self.experts * (self.inputs + self.outputs)

    def initial_a(self, seed: int) -> np.ndarray:
        """Draw A, float32: Gaussian with the variance of PEFT's initial A, 1 / (3 inputs)."""
        ranks = self.rank * self.experts
        values = generator.normal(seed, self.number, A_TENSOR, 1, 0, self.inputs * ranks)[0]
        scale = np.float32(1.0 / np.sqrt(3.0 * self.inputs))
        return np.ascontiguousarray(values.reshape(self.inputs, ranks).T * scale, dtype=np.float32)


def lora_parameters(
    dims: ModelDims,
    family: type[Family],
    config: MespConfig,
    known: Collection[str] = (),
    what: str = "",
) -> tuple[LoraParameters, ...]:
    """List the parameters of a run, layer by layer.

    Raises:
        ModelError: see `check_family`.
    """
    check_family(dims, known, what or "this form of mesp")
    listed: list[LoraParameters] = []
    for one in dims.adapted(config):
        name = family.adapter_name(family.weight_path(one.layer, one.target))
        shape = (one.inputs, one.outputs, one.experts)
        listed.append(LoraParameters(one.layer, one.target, name, len(listed), config.rank, *shape))
    return tuple(listed)


def initial_tensors(parameters: tuple[LoraParameters, ...], seed: int) -> dict[str, np.ndarray]:
    """Draw every A and make every B zero, by PEFT's names: this adapter changes nothing."""
    tensors: dict[str, np.ndarray] = {}
    for lora in parameters:
        tensors[lora.a_name] = lora.initial_a(seed)
        tensors[lora.b_name] = np.zeros(lora.shapes[lora.b_name], np.float32)
    return tensors


def check_not_partially_updated(partially_updated: bool) -> None:
    """Refuse to go on from, or to keep, parameters of which a step that failed has updated some.

    Raises:
        TrainingError: `partially_updated`.
    """
    if partially_updated:
        raise TrainingError(
            "the step before ended half-way, with some LoRA parameters updated and others not",
            hint="resume from the run's last checkpoint",
        )


def check_state(state: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint that lacks one of these tensors.

    Raises:
        CheckpointError: naming the first tensor that is missing or of another shape.
    """
    for name, shape in shapes.items():
        value = state.get(name)
        if value is None or value.shape != shape:
            raise CheckpointError(
                f"the checkpoint is not of this run: {name}",
                expected=list(shape),
                received=None if value is None else list(value.shape),
            )


def check_adapter(
    adapter: Adapter, parameters: tuple[LoraParameters, ...], config: MespConfig, dims: ModelDims
) -> dict[str, np.ndarray]:
    """Return the tensors of an adapter that is exactly of this run's shape.

    Raises:
        ArtifactError: another rank or alpha, layers that are missing, or layers that this run does
            not change.
    """
    shapes = {name: shape for lora in parameters for name, shape in lora.shapes.items()}
    return check_fits(adapter, shapes, config.rank, config.alpha, dims)


@dataclass(frozen=True)
class FlatEntry:
    """First elements of one linear layer's A and B in the flat vector."""

    parameters: LoraParameters
    a: int
    b: int

    def moved(self, by: int) -> FlatEntry:
        """Return the entry in a vector that begins so many elements earlier."""
        return FlatEntry(self.parameters, self.a + by, self.b + by)

    def pair(self, vector: Any) -> tuple[Any, Any]:
        """Return A [rank, inputs] and B [rank, outputs] as views of a vector of numpy or torch, or
        of the same in rows whose width divides every range."""
        rank = self.parameters.rank
        inputs = self.parameters.inputs
        outputs = self.parameters.outputs
        width = vector.shape[1] if vector.ndim == 2 else 1
        a = vector[self.a // width : (self.a + rank * inputs) // width].reshape(rank, inputs)
        b = vector[self.b // width : (self.b + rank * outputs) // width].reshape(rank, outputs)
        return a, b


@dataclass(frozen=True)
class FlatLayout:
    """The flat vector that a program takes and gives; moments lie in vectors of the same layout.

    Layer by layer, A float32 [rank, inputs] and then B transposed, [rank, outputs], so that no
    product of the program needs another order. Every layer has as many elements as the largest.

    Attributes:
        entries: in order of the layers.
        size: elements of the vector; what no matrix uses is zero and stays zero.
    """

    entries: tuple[FlatEntry, ...]
    size: int

    @classmethod
    def build(cls, parameters: tuple[LoraParameters, ...], layers: int) -> FlatLayout:
        """Lay out `parameters`, which are in order of the layers."""
        sizes: dict[int, int] = {}
        places = []
        for lora in parameters:
            a = sizes.get(lora.layer, 0)
            b = a + _aligned(lora.rank * lora.inputs)
            sizes[lora.layer] = b + _aligned(lora.rank * lora.outputs)
            places.append(FlatEntry(lora, a, b))
        size = max(sizes.values())
        entries = (one.moved(one.parameters.layer * size) for one in places)
        return cls(tuple(entries), layers * size)

    def of_layer(self, layer: int) -> tuple[FlatEntry, ...]:
        return tuple(entry for entry in self.entries if entry.parameters.layer == layer)

    def to_flat(self, tensors: dict[str, np.ndarray]) -> np.ndarray:
        """Lay tensors of PEFT's names and shapes into one vector, float32 [size]; the inverse of
        `to_tensors`."""
        flat = np.zeros(self.size, np.float32)
        for entry in self.entries:
            a = tensors[entry.parameters.a_name]
            b = tensors[entry.parameters.b_name]
            flat[entry.a : entry.a + a.size] = a.reshape(-1)
            flat[entry.b : entry.b + b.size] = b.T.reshape(-1)
        return flat

    def to_tensors(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Take a vector apart into A [rank, inputs] and B [outputs, rank] of each layer, by PEFT's
        names."""
        tensors = {}
        for entry in self.entries:
            lora = entry.parameters
            a, b = entry.pair(flat)
            tensors[lora.a_name], tensors[lora.b_name] = a.copy(), np.ascontiguousarray(b.T)
        return tensors


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
