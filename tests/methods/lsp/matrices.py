"""Matrices as the tests want them, and their dense counterparts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from ondevice.methods.lsp.config import ProjectorConfig  # noqa: E402
from ondevice.methods.lsp.matrix import (  # noqa: E402
    Group,
    Matrix,
    Plane,
)
from tests.methods.lsp.dense import normal, sides, table  # noqa: E402

SHAPES = [
    (41, 29, 13, 4),
    (29, 41, 13, 3),
    (90, 14, 11, 11),
    (11, 50, 12, 5),
    (50, 12, 12, 1),
    (30, 31, 1, 1),
]
"""Rows, columns, subspace, nonzeros; one side is exact in two."""
each_shape = pytest.mark.parametrize(("m", "n", "size", "nonzeros"), SHAPES)


def matrix(
    m: int,
    n: int,
    size: int,
    nonzeros: int,
    number: int = 0,
    plane: Plane | None = None,
    **config: Any,
) -> Matrix:
    """In a group of its own."""
    group = Group(plane or Plane(), "cpu")
    projection = Matrix(
        "w",
        (m, n),
        number,
        ProjectorConfig(subspace=size, nonzeros=nonzeros, **{"learned": True, **config}),
        5,
        group,
    )
    projection.gradient = torch.zeros(projection.sizes)
    return projection


def larger() -> Plane:
    """Memory with the values of a larger matrix in it."""
    plane = Plane()
    matrix(120, 130, 40, 7, 1, plane).collect(normal(3, 120), normal(3, 130))
    return plane


MEMBERS = [(41, 29), (11, 50), (29, 41), (50, 12), (9, 8), (90, 14), (12, 13)]
"""Rows and columns in a group of subspace 12: the left side, the right side and both sides of one are exact, and the
left one of the last."""


def members(
    plane: Plane, shapes: list[tuple[int, int]] = MEMBERS, first: int = 0, device: str = "cpu"
) -> list[Matrix]:
    """Matrices of one group."""
    group, config = (
        Group(plane, device),
        ProjectorConfig(subspace=12, nonzeros=5, threshold=0.0, learned=True),
    )
    collected = [
        Matrix(f"w{i}", shape, first + i, config, 5, group) for i, shape in enumerate(shapes)
    ]
    for one in collected:
        one.gradient = torch.zeros(one.sizes)
    return collected


def shows(group: list[Matrix], dtype: Any) -> None:
    """Dense projectors of all members are there together, and are right to the bit."""
    pairs = [one.dense_projectors(dtype) for one in reversed(group)][::-1]
    for one, pair in zip(group, pairs, strict=True):
        for side, actual in zip((one.left, one.right), pair, strict=True):
            assert (actual is None) == side.exact == (side.rows <= 12)
            if actual is not None:
                assert actual.dtype == dtype
                assert torch.equal(actual, table(side).to(dtype))


def projected(built: Matrix, gradient: Tensor) -> Tensor:
    p, q = sides(built.left, built.right)
    return p.T @ gradient.double() @ q


def changed(built: Matrix, base: Tensor, change: Tensor, decay: float) -> Tensor:
    p, q = sides(built.left, built.right)
    gain = 1.0
    for side, dense in ((built.left, p), (built.right, q)):
        if not side.exact:
            gain *= float(dense.square().sum() / len(dense)) ** -0.5
    return decay * base.double() + gain * p @ change.double() @ q.T
