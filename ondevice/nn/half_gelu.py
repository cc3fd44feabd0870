"""Tanh-GELU in operators that float16 and QNN compute: QNN's own GELU is of the error function,
whatever is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GELU = (math.sqrt(8.0 / math.pi), math.sqrt(8.0 / math.pi) * 0.044715)
"""Factors of x and x^3 in the sigmoid's argument of tanh-GELU."""
GELU_RANGE = 8.0
"""Beyond it that sigmoid is 0 or 1 in float16."""


def gelu_angle(x: Tensor) -> Tensor:
    """Return u with gelu_tanh(x) = x sigmoid(u); x^3 beyond `GELU_RANGE` could be too
    large for float16."""
    x = x.clamp(-GELU_RANGE, GELU_RANGE)
    return x * (GELU[0] + GELU[1] * (x * x))


def gelu_angle_slope(x: Tensor) -> Tensor:
    """Return the slope of u; beyond `GELU_RANGE` that at its end, where the sigmoid has none."""
    x = x.clamp(-GELU_RANGE, GELU_RANGE)
    return GELU[0] + 3.0 * GELU[1] * (x * x)
