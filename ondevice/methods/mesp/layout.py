"""Where each pair's A and B lie in the flat vector that a program takes and gives.

Layer by layer, A float32 [rank, inputs] and then B transposed, [rank, outputs], so that no product of the program
needs another order. Moments lie in vectors of the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ondevice.methods.mesp.pairs import Pair

ALIGNMENT = 64
"""Elements: where a range begins."""


@dataclass(frozen=True)
class Ranges:
    """A pair's places, elements of the flat vector."""

    pair: Pair
    a: int
    b: int


@dataclass(frozen=True)
class FlatLayout:
    """All pairs of a run, in order of the layers.

    Attributes:
        size: elements of the vector; what no pair uses is zero and stays zero.
    """

    entries: tuple[Ranges, ...]
    size: int

    @classmethod
    def build(cls, pairs: tuple[Pair, ...]) -> FlatLayout:
        """Lay out `pairs`, which are in order of the layers."""
        entries, offset = [], 0
        for pair in pairs:
            a = offset
            b = a + _aligned(pair.rank * pair.inputs)
            offset = b + _aligned(pair.rank * pair.outputs)
            entries.append(Ranges(pair, a, b))
        return cls(tuple(entries), offset)

    def of_layer(self, layer: int) -> tuple[Ranges, ...]:
        return tuple(entry for entry in self.entries if entry.pair.layer == layer)

    def layer_range(self, layer: int) -> tuple[int, int]:
        """First element and the one after the last."""
        entries = self.of_layer(layer)
        last = entries[-1]
        return entries[0].a, last.b + _aligned(last.pair.rank * last.pair.outputs)

    def to_flat(self, tensors: dict[str, np.ndarray]) -> np.ndarray:
        """Float32 [size] from PEFT's names and shapes; the inverse of `to_tensors`."""
        flat = np.zeros(self.size, np.float32)
        for entry in self.entries:
            a, b = tensors[entry.pair.a_name], tensors[entry.pair.b_name]
            flat[entry.a : entry.a + a.size] = a.reshape(-1)
            flat[entry.b : entry.b + b.size] = b.T.reshape(-1)
        return flat

    def to_tensors(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """PEFT's `<linear>.lora_A.weight` [rank, inputs] and `<linear>.lora_B.weight` [outputs, rank]."""
        tensors = {}
        for entry in self.entries:
            pair = entry.pair
            a = flat[entry.a : entry.a + pair.rank * pair.inputs]
            b = flat[entry.b : entry.b + pair.rank * pair.outputs]
            tensors[pair.a_name] = np.ascontiguousarray(a.reshape(pair.rank, pair.inputs))
            tensors[pair.b_name] = np.ascontiguousarray(b.reshape(pair.rank, pair.outputs).T)
        return tensors


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
