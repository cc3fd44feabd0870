"""Numbers as they travel: 16-bit integers that share one power of two, so that every reader has the
same values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ondevice.core.errors import FleetError

LIMIT = 32767
"""The largest mantissa; -32768 is not used, so that a number and its negative are alike."""
LOWEST = -126
HIGHEST = 126
"""Exponents that a reply may have; every value is then an ordinary float64, and exact in it."""


@dataclass(frozen=True)
class Numbers:
    """Values `mantissa * 2^exponent`.

    Attributes:
        mantissas: each in -32767 .. 32767.
        exponent: shared by all.
    """

    mantissas: tuple[int, ...]
    exponent: int

    def values(self) -> list[float]:
        """Return the values as float64, exactly."""
        return [math.ldexp(mantissa, self.exponent) for mantissa in self.mantissas]


def pack(values: Iterable[float], lowest: int = LOWEST, highest: int = HIGHEST) -> Numbers:
    """Round `values` to 15 bits of the largest among them, halves to even.

    The exponent is the smallest from `lowest` that holds the largest value; beyond `highest` values
    are clamped.

    Raises:
        FleetError: a value is not finite.
    """
    given = [float(value) for value in values]
    if not all(math.isfinite(value) for value in given):
        raise FleetError(
            "a number is not finite", expected="finite numbers", received=str(given[:8])
        )
    largest = max((abs(value) for value in given), default=0.0)
    exponent = lowest
    if largest > 0:
        # frexp: largest = m * 2^e with m in [1/2, 1), so 2^(e - 15) gives a mantissa below 2^15;
        # rounding may reach it.
        exponent = min(max(math.frexp(largest)[1] - 15, lowest), highest)
        if round(math.ldexp(largest, -exponent)) > LIMIT and exponent < highest:
            exponent += 1
    mantissas = tuple(
        max(-LIMIT, min(LIMIT, round(math.ldexp(value, -exponent)))) for value in given
    )
    return Numbers(mantissas, exponent)
