"""Adam of a fleet's adapter, in float64, operation by operation: each is rounded separately, so all
machines have the same bits.

Kingma and Ba, 2015, "Adam: A Method for Stochastic Optimization", algorithm 1.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import numpy as np

BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8
_COUNT = struct.Struct("<q")


@functools.lru_cache(maxsize=4)
def _power(base: float, exponent: int) -> float:
    """The product of so many factors, from the left: a library's power may differ in a last bit."""
    value = 1.0
    for _ in range(exponent):
        value *= base
    return value


@dataclass(frozen=True)
class Moments:
    """Moments of the estimates since a subspace began.

    Attributes:
        mean, square: float64 [size].
        first_step: number of the first local step in the subspace.
    """

    mean: np.ndarray
    square: np.ndarray
    first_step: int = 0

    @classmethod
    def zeros(cls, size: int, first_step: int = 0) -> Moments:
        """Return the moments before `first_step`."""
        return cls(np.zeros(size), np.zeros(size), first_step)

    def stepped(self, estimate: np.ndarray, step: int) -> tuple[np.ndarray, Moments]:
        """Return the change before the learning rate, float64 [size], and the moments after a
        step's estimate."""
        count = step - self.first_step + 1
        mean = self.mean * BETA_1 + estimate * (1.0 - BETA_1)
        square = self.square * BETA_2 + (estimate * estimate) * (1.0 - BETA_2)
        above = mean / (1.0 - _power(BETA_1, count))
        below = np.sqrt(square / (1.0 - _power(BETA_2, count))) + EPSILON
        return above / below, Moments(mean, square, self.first_step)

    def to_bytes(self) -> bytes:
        """Return the moments, float64 each, and the step that they begin at, int64."""
        return (
            self.mean.astype("<f8").tobytes()
            + self.square.astype("<f8").tobytes()
            + _COUNT.pack(self.first_step)
        )

    @classmethod
    def from_bytes(cls, data: bytes, size: int) -> Moments:
        """Return what `to_bytes` gave."""
        values = np.frombuffer(data[: 16 * size], "<f8").astype(np.float64)
        return cls(values[:size], values[size:], _COUNT.unpack(data[16 * size :])[0])
