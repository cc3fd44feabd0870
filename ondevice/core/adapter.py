"""A LoRA adapter in memory; `ondevice.artifact.adapter` reads and writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ondevice.core.dims import is_expert_parameter
from ondevice.core.errors import VerificationError

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: each named linear layer W becomes W + (alpha / rank) B A.

    Attributes:
        tensors: float32 `<linear>.lora_A.weight` [rank, inputs] and `<linear>.lora_B.weight` [outputs, rank],
            `<linear>` being the module's full name: `model.layers.0.self_attn.q_proj`. Of experts' parameters see
            `ondevice.artifact.expert_pairs`.
        rank: of every pair.
        alpha: numerator of the scale.
        target_modules: last part of the names, sorted: `("q_proj", "v_proj")`.
        base_model: the source string of the model it was trained on; may be empty.
    """

    tensors: dict[str, np.ndarray]
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str

    @property
    def linears(self) -> tuple[str, ...]:
        """Full names of the linear layers that it changes, in order of the layers."""
        suffix = ".lora_A.weight"
        names = {name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix)}
        return tuple(sorted(names, key=lambda name: (layer_of(name), name)))

    @property
    def expert_parameters(self) -> tuple[str, ...]:
        """Those of `linears` that are parameters with a matrix for each expert."""
        return tuple(filter(is_expert_parameter, self.linears))

    @property
    def changes_nothing(self) -> bool:
        """True when every product B A is zero because A or B is."""
        pairs = (self.pair(name) for name in self.linears)
        return not any(a.any() and b.any() for a, b in pairs)

    def check_changes(self, folder: str | Path) -> None:
        """Refuse an adapter that changes nothing, as one that was never trained; `folder` names it.

        Raises:
            VerificationError: it `changes_nothing`.
        """
        if self.changes_nothing:
            raise VerificationError(
                f"the adapter in {folder} changes nothing: every product B A is zero",
                expected="at least one A and B that are both not zero",
                received=f"{len(self.linears)} pairs, each with a zero side",
                hint="train it for at least one step, or use the base model",
            )

    def pair(self, linear: str) -> tuple[np.ndarray, np.ndarray]:
        """Return A float32 [rank, inputs] and B float32 [outputs, rank] of one linear layer."""
        return self.tensors[f"{linear}.lora_A.weight"], self.tensors[f"{linear}.lora_B.weight"]


def layer_of(linear: str) -> int:
    match = _LAYER.search(linear)
    return int(match[1]) if match else -1
