"""Which linear layers carry a pair of LoRA matrices, what the pairs are called, and where they start.

The same numbers on every backend: A is drawn from the project's generator, B is zero. Names are PEFT's, for
adapters and for checkpoints alike, so that a run may go on with another backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ondevice.artifact.adapter import Adapter
from ondevice.errors import ArtifactError, ModelError, TrainingError
from ondevice.runtime_ops import generator

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import Family, ModelDims

A_TENSOR = 1
"""Stream of the initial A matrices; one step number for each pair."""


@dataclass(frozen=True)
class Pair:
    """A float32 [rank, inputs] and B float32 [outputs, rank] beside one linear layer.

    Attributes:
        name: the linear layer's full name, such as `model.layers.0.self_attn.q_proj`.
        number: position among the run's pairs, in order of layers and of `config.targets`.
    """

    layer: int
    target: str
    name: str
    number: int
    rank: int
    inputs: int
    outputs: int

    @property
    def a_name(self) -> str:
        return f"{self.name}.lora_A.weight"

    @property
    def b_name(self) -> str:
        return f"{self.name}.lora_B.weight"

    @property
    def count(self) -> int:
        """Trained numbers."""
        return self.rank * (self.inputs + self.outputs)

    def initial_a(self, seed: int) -> np.ndarray:
        """float32 [rank, inputs], Gaussian with the variance of PEFT's initial A, 1 / (3 inputs)."""
        values = generator.normal(seed, self.number, A_TENSOR, 1, 0, self.inputs * self.rank)[0]
        scale = np.float32(1.0 / np.sqrt(3.0 * self.inputs))
        return np.ascontiguousarray(values.reshape(self.inputs, self.rank).T * scale, dtype=np.float32)


def check_family(dims: ModelDims) -> None:
    """Refuse what the hand-written backward pass does not know.

    Raises:
        ModelError: the block has no gated MLP between RMS norms, or has experts.
    """
    if not dims.gated or dims.experts:
        raise ModelError(
            f"mesp has no backward pass for {dims.family}",
            expected="llama, mistral or qwen2: RMS norms, rotary embedding, a gated MLP",
            received=dims.family,
            hint="--method lora trains an adapter by automatic differentiation",
        )


def pairs_of(dims: ModelDims, family: type[Family], config: MespConfig) -> tuple[Pair, ...]:
    """Every pair of a run, layer by layer."""
    check_family(dims)
    found: list[Pair] = []
    for layer in range(dims.layers):
        for target in config.targets:
            name = f"model.layers.{layer}.{family.linear_parents[target]}.{target}"
            found.append(Pair(layer, target, name, len(found), config.rank, *dims.linear_shape(target)))
    return tuple(found)


def initial_tensors(pairs: tuple[Pair, ...], seed: int) -> dict[str, np.ndarray]:
    """A drawn, B zero: the adapter changes nothing."""
    tensors: dict[str, np.ndarray] = {}
    for pair in pairs:
        tensors[pair.a_name] = pair.initial_a(seed)
        tensors[pair.b_name] = np.zeros((pair.outputs, pair.rank), np.float32)
    return tensors


def check_whole(torn: bool) -> None:
    """Refuse to go on from, or to keep, pairs of which a step that failed has updated some.

    Raises:
        TrainingError: `torn`.
    """
    if torn:
        raise TrainingError(
            "the step before ended half-way, with some pairs updated and others not",
            hint="resume from the run's last checkpoint",
        )


def check_adapter(adapter: Adapter, pairs: tuple[Pair, ...], config: MespConfig) -> dict[str, np.ndarray]:
    """The tensors of an adapter that is exactly of this run's shape.

    Raises:
        ArtifactError: another rank or alpha, layers that are missing, or layers that this run does not change.
    """
    for field, wanted, found in (("rank", config.rank, adapter.rank), ("alpha", config.alpha, adapter.alpha)):
        if wanted != found:
            raise ArtifactError(
                f"the adapter has another {field}",
                expected=f"{field} {wanted:g}",
                received=f"{field} {found:g}",
                hint=f"--set method.{field}={found:g}, or another adapter",
            )
    known = {name: shape for pair in pairs for name, shape in shapes(pair).items()}
    beyond = sorted(adapter.tensors.keys() - known.keys())
    if beyond:
        raise ArtifactError(
            f"the adapter changes layers that this run does not: {', '.join(beyond[:4])}",
            hint=f"--set 'method.targets=[{', '.join(adapter.targets)}]'",
        )
    for name, shape in known.items():
        value = adapter.tensors.get(name)
        if value is None or value.shape != shape:
            received = "no such tensor" if value is None else list(value.shape)
            raise ArtifactError(f"the adapter does not fit: {name}", expected=list(shape), received=received)
    return {name: adapter.tensors[name] for name in known}


def shapes(pair: Pair) -> dict[str, tuple[int, int]]:
    """Names and shapes of the two matrices."""
    return {pair.a_name: (pair.rank, pair.inputs), pair.b_name: (pair.outputs, pair.rank)}
