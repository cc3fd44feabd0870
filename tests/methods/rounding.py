"""How far float32 may be from exact: an error model of a computation, not a number that one processor gave.

Each operation of a float64 run is given the relative error that float32 would make, drawn anew for each element: one
unit roundoff for an elementwise operation, the square root of the number of terms times as much for a sum (Higham,
"Accuracy and Stability of Numerical Algorithms", section 2.8). What becomes of these errors in the result is the
condition of the computation on these very inputs. A correct float32 implementation errs about that much, whatever its
kernels, instructions and order of summation. A wrong one, or one that sums in half precision, errs a hundred times
more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ROUNDOFF = 2.0**-24
HALF = 2.0**-11
"""float16's unit roundoff."""
RUNS = 6
ALLOWED = 6.0
"""Times the modelled error. An error may lie in one direction, as of a tensor of rank 1: then its ratio to the root
mean square of `RUNS` draws has Student's distribution with `RUNS` degrees of freedom. Implementations err about a
third of the model (over 30 random models of MeSP's test the median ratio was 0.25), so 6 is 18 of these deviations,
which one tensor in 500,000 passes. With 4 draws and twice the model it was one in 380, and a run has thousands.
Half precision, or a wrong term, errs a hundred times more."""
EXACT = (
    "detach", "clone", "_to_copy", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like",
    "new_empty", "new_zeros", "index", "index_select", "slice", "cat", "where", "masked_fill", "embedding",
    "lift_fresh",
)  # fmt: skip
"""Operations that move numbers, and so round none."""
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Position of the left factor, whose last dimension is summed over."""
SUMS = ("sum", "mean")
NORMALISED = ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")


class Rounding(TorchDispatchMode):
    """Give every float64 operation within the block, of backward passes too, float32's relative error."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        if function.is_view or name.endswith("_") or name in EXACT:
            return out
        relative = self.relative_error(name, args, out)

        def rounded(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
                return value
            return value * (
                1 + relative * torch.randn(value.shape, generator=self.generator, dtype=value.dtype)
            )

        return tree_map(rounded, out)

    def relative_error(self, name: str, args: Any, out: Any) -> float:
        """Return the standard deviation of an element's relative error."""
        return ROUNDOFF * math.sqrt(_terms(name, args, out))


class HalfRounding(Rounding):
    """Give every float64 operation float16's relative error, but for those on tensors with a dimension of `exact_width`
    (logits, which stay float32). Sums are kept in a wider format, and only their result is rounded.
    """

    def __init__(self, seed: int, exact_width: int) -> None:
        super().__init__(seed)
        self.exact_width = exact_width

    def relative_error(self, name: str, args: Any, out: Any) -> float:
        shapes = [one.shape for one in (*args, out) if isinstance(one, torch.Tensor)]
        return 0.0 if any(self.exact_width in shape for shape in shapes) else HALF


def _terms(name: str, args: Any, out: Any) -> int:
    """Return how many numbers are added for one of the result."""
    if name in PRODUCTS:
        return args[PRODUCTS[name]].shape[-1]
    if name in SUMS:
        return max(1, args[0].numel() // max(1, out.numel()))
    return args[0].shape[-1] if name in NORMALISED else 1


def modelled_errors(
    compute: Callable[[], dict[str, np.ndarray]],
    errors: Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], dict[str, float]],
    rounding: Callable[[int], Rounding] = Rounding,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the exact values, and for each the error that a format is modelled to make, by root mean square of `RUNS`.

    Args:
        compute: float64 values by name, the same at every call.
        errors: (values, exact values) to an error by name.
        rounding: seed to the format's errors.
    """
    exact, squares = compute(), dict[str, float]()
    for seed in range(RUNS):
        with rounding(seed):
            values = compute()
        for name, error in errors(values, exact).items():
            squares[name] = squares.get(name, 0.0) + error**2 / RUNS
    return exact, {name: math.sqrt(square) for name, square in squares.items()}
