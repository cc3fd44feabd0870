"""A d-sparse projector (LSP-Offload, Definition 1): rows x size, with d values other than zero in
each row.

The d positions of a row are in d equal blocks of the columns, one in each (Kane and Nelson's block
construction), so they are distinct without rejection. Values begin as N(0, 1 / d), by which E[P
P^T] = I and P P^T G Q Q^T is an unbiased estimate of G; `fit.py` changes them. A side that is no
longer than the subspace is not projected: P = I.

Signs of size 1 / sqrt(d) are unbiased, too, and closer: every row has length 1. Their positions are
balanced, so that no column is empty while others have many rows. With d = 1 the columns are
orthogonal (count sketch), and the estimate's error is the least that s numbers a side allow.

A projector that follows the gradient is dense: orthonormal columns, which a step of subspace
iteration a check turns towards the leading eigenvectors of a moving mean of G G^T / ||G||^2. Of the
mean only the subspace is retained, with each direction's share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ondevice.runtime_ops import generator

KEPT = 0.8
"""Factor of the moving mean at each check."""
FIRST_TURNS = 3
"""Steps of subspace iteration on the first gradient, before which the subspace was drawn."""
DRAWN_KEPT = 1e-3
"""Weight of the drawn subspace in these: directions that the gradient lacks stay as they were."""
POSITIONS = 1
"""The generator's query that positions are drawn from; values are query 0."""


@dataclass
class Projector:
    """One side of a weight matrix.

    Attributes:
        rows: of the side; `size` of the subspace.
        positions: int64 [rows, d]; None if the side is dense or not projected.
        values: float32 [rows, d], or [rows, size] of a dense one; None if the side is not
            projected.
        shares: float32 [size], of a dense one: each direction's in the moving mean; zero if it was
            only drawn.
    """

    rows: int
    size: int
    device: torch.device
    positions: Tensor | None = None
    values: Tensor | None = None
    shares: Tensor | None = None

    @property
    def exact(self) -> bool:
        """True for the identity."""
        return self.values is None

    @property
    def is_dense(self) -> bool:
        """True if every value is stored."""
        return self.positions is None and self.values is not None

    @property
    def bytes(self) -> int:
        """Of positions, as they are stored, and values."""
        return sum(t.nbytes for t in (self.positions, self.values, self.shares) if t is not None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return [rows, size] in `dtype`."""
        if self.values is None:
            return torch.eye(self.rows, dtype=dtype, device=self.device)
        if self.positions is None:
            return self.values.to(dtype)
        table = torch.zeros(self.rows, self.size, dtype=dtype, device=self.device)
        return table.scatter_(1, self.positions, self.values.to(dtype))

    def part(self, rows: slice) -> Projector:
        """Return the projector of some of the rows; the identity stays whole."""
        if self.values is None:
            return self
        positions = None if self.positions is None else self.positions[rows]
        values = self.values[rows]
        return Projector(len(values), self.size, self.device, positions, values)

    def rows_of(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows int64 [R] of it, dense: [R, size]."""
        if self.is_dense:
            return self.dense(dtype)[rows]
        dense = torch.zeros(rows.numel(), self.size, dtype=dtype, device=self.device)
        if self.positions is None or self.values is None:
            return dense.scatter_(1, rows[:, None], 1.0)
        return dense.scatter_(1, self.positions[rows], self.values[rows].to(dtype))


def draw(
    rows: int,
    size: int,
    nonzeros: int,
    seed: int,
    turn: int,
    tensor: int,
    device: torch.device | str = "cpu",
    signs: bool = False,
) -> Projector:
    """Return a random projector, a pure function of its arguments; the identity if `rows` is at
    most `size`.

    Args:
        nonzeros: d, in each row; at most `size`.
        turn: how often the subspace was drawn before.
        tensor: number of the side, different for every one in a model.
        signs: draw balanced positions and signs.
    """
    where = torch.device(device)
    if rows <= size:
        return Projector(rows, rows, where)
    nonzeros = min(nonzeros, size)
    count = rows * nonzeros
    words = generator.words(generator.stream_key(seed, turn, POSITIONS, tensor), 0, count).reshape(
        rows, nonzeros
    )
    edges = np.arange(nonzeros + 1, dtype=np.int64) * size // nonzeros
    width = np.diff(edges)
    if signs:
        order = np.argsort(words >> np.uint64(1), axis=0, kind="stable")
        ranks = np.argsort(order, axis=0, kind="stable")
        positions = edges[:-1] + ranks % width
        values = 1 - 2 * (words & np.uint64(1)).astype(np.float32)
    else:
        positions = edges[:-1] + (
            (words >> np.uint64(32)) * width.astype(np.uint64) >> np.uint64(32)
        ).astype(np.int64)
        values = generator.normal(seed, turn, tensor, 1, 0, count).reshape(rows, nonzeros)
    values = values / np.float32(nonzeros**0.5)
    return Projector(
        rows, size, where, torch.from_numpy(positions).to(where), torch.from_numpy(values).to(where)
    )


def widened(side: Projector) -> Projector:
    """Return drawn signs, one a row, as a dense projector: its columns are orthonormal."""
    if side.exact:
        return side
    values = side.dense(torch.float32)
    values = values / torch.linalg.vector_norm(values, dim=0)
    return replace(side, positions=None, values=values, shares=values.new_zeros(side.size))


def followed(side: Projector, gradient: Tensor) -> Projector:
    """Return a dense projector turned towards the leading left singular vectors of a gradient.

    Args:
        side: dense, orthonormal columns [m, s]; one that is not projected stays.
        gradient: [m, n], any floating dtype, not all zero.
    """
    if side.values is None or side.shares is None:
        return side
    g = gradient.float()
    g = g / torch.linalg.vector_norm(g)
    known = KEPT * side.shares
    is_first = not known.any()
    weights = known + DRAWN_KEPT * (1.0 if is_first else float(known.mean()))
    basis = side.values
    for _ in range(FIRST_TURNS if is_first else 1):
        basis, upper = torch.linalg.qr(g @ (g.T @ basis) + weights * basis)
        basis = basis * torch.where(upper.diagonal() < 0, -1.0, 1.0)
    shares = known @ (side.values.T @ basis).square() + (g.T @ basis).square().sum(0)
    # QR's result is laid out by columns; products of one that is read again would round otherwise.
    return replace(side, values=basis.contiguous(), shares=shares)
