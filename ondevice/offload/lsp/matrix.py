"""A weight matrix that is updated in a subspace: its projectors, what is known of its gradient there, and its refresh.

The gradient itself is not made. Of G = dY^T X the subspace needs S = (dY P)^T (X Q): for T tokens T s (m + n + s)
multiplications where G takes T m n, and no memory of G's size. Only a look at the bias, every `check_every` steps,
makes G, of one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.lsp.learn import learn, relative_bias
from ondevice.offload.lsp.projector import Projector, draw

if TYPE_CHECKING:
    from ondevice.offload.lsp.config import ProjectorConfig


class Scratch:
    """Memory for one dense projector of either side, shared by all matrices."""

    def __init__(self) -> None:
        self.sides: dict[str, Tensor] = {}

    def take(self, side: str, projector: Projector, dtype: torch.dtype) -> Tensor | None:
        """At least rows x size elements; nothing is allocated once the largest was asked for."""
        if projector.exact:
            return None
        size, held = projector.rows * projector.size, self.sides.get(side)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self.sides[side] = torch.empty(size, dtype=dtype, device=projector.device)
        return held


@dataclass(frozen=True)
class Look:
    """What a look at a matrix found.

    Attributes:
        before: relative bias of the projectors that were there (Theorem 1's alpha on this gradient).
        after: that of the new ones; None where the old ones stay.
        carry: P_new^T P_old and Q_old^T Q_new, both [s, s], for `carried`; None where the old ones stay.
    """

    before: float
    after: float | None = None
    carry: tuple[Tensor, Tensor] | None = None


class Matrix:
    """One weight of m x n.

    Attributes:
        name: the parameter's.
        number: of the matrix in the model: its random numbers are its own.
        left, right: projectors of rows and columns.
        turn: how often they were drawn before.
        gain: what makes P D Q^T as large as D is: learned values are smaller than drawn ones, and AdamW's steps
            should not shrink with them.
        gradient: float32 [s, s], to which gradients are added; set by who trains.
        watch: called once with the whole gradient [m, n] before it is added; for a look at the bias.
    """

    def __init__(
        self, name: str, shape: tuple[int, int], number: int, config: ProjectorConfig, seed: int,
        device: torch.device | str, scratch: Scratch,
    ) -> None:  # fmt: skip
        self.name, self.shape, self.number, self.config, self.seed = name, shape, number, config, seed
        self.device, self.scratch, self.turn = torch.device(device), scratch, 0
        self.gradient: Tensor | None = None
        self.watch: Callable[[Matrix, Tensor], None] | None = None
        self.put(*self.drawn(0))

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the subspace."""
        return self.left.size, self.right.size

    @property
    def numel(self) -> int:
        """Numbers that cross the bus in each direction."""
        return self.left.size * self.right.size

    def put(self, left: Projector, right: Projector) -> None:
        """Take these projectors."""
        self.left, self.right = left, right
        squares = [1.0 if p.values is None else float(p.values.square().sum()) / p.rows for p in (left, right)]
        self.gain = (squares[0] * squares[1]) ** -0.5

    def drawn(self, turn: int) -> tuple[Projector, Projector]:
        """The random pair of that turn."""
        c = self.config
        left, right = (
            draw(side, c.subspace, c.nonzeros, self.seed, turn, 2 * self.number + i, self.device)
            for i, side in enumerate(self.shape)
        )
        return left, right

    def collect(self, rows: Tensor, columns: Tensor) -> None:
        """Add what T tokens say: [T, m] and [T, n], of which the gradient is the product."""
        self._look(lambda: rows.T @ columns)
        p = self.left.narrow(rows, self._memory("left", rows.dtype))
        q = self.right.narrow(columns, self._memory("right", columns.dtype))
        self._add(p.T @ q)

    def collect_whole(self, gradient: Tensor) -> None:
        """Add a gradient [m, n] that is there."""
        self._look(lambda: gradient)
        narrow = self.right.narrow(gradient, self._memory("right", gradient.dtype))
        self._add(self.left.narrow(narrow.T, self._memory("left", gradient.dtype)).T)

    def collect_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Add a gradient that is zero but for `rows`, int64 [R]: [R, n]."""
        self._look(lambda: gradient.new_zeros(self.shape).index_add_(0, rows, gradient))
        narrow = self.right.narrow(gradient, self._memory("right", gradient.dtype))
        self._add(self.left.rows_of(rows, gradient.dtype).T @ narrow)

    def effective(self, base: Tensor, change: Tensor, decay: float, out: Tensor) -> Tensor:
        """decay * base + gain * P change Q^T.

        Args:
            base: [m, n]; `out` may be the same memory.
            change: float32 [s, s].
        """
        wide = self.left.widen((change * self.gain).to(out.dtype), self._memory("left", out.dtype))
        if self.right.exact:
            return torch.add(wide, base, alpha=decay, out=out)
        q = self.right.dense(out.dtype, self._memory("right", out.dtype))
        return torch.addmm(base, wide, q.T, beta=decay, out=out)

    def effective_rows(self, base: Tensor, rows: Tensor, change: Tensor, decay: float) -> Tensor:
        """The same for some rows, int64 [R] of [R, n]."""
        wide = self.left.rows_of(rows, base.dtype) @ (change * self.gain).to(base.dtype)
        if not self.right.exact:
            wide = wide @ self.right.dense(base.dtype, self._memory("right", base.dtype)).T
        return wide.add_(base, alpha=decay)

    def refresh(self, gradient: Tensor) -> Look:
        """Look at the bias on a gradient [m, n], and draw and learn other projectors where it is too large."""
        before = relative_bias(self.left, self.right, gradient)
        if before < self.config.threshold or (self.left.exact and self.right.exact):
            return Look(before)
        c, old = self.config, (self.left, self.right)
        self.turn += 1
        pair = self.drawn(self.turn)
        after = relative_bias(*pair, gradient) if not c.learned else None
        if after is None:
            found = learn(*pair, gradient, c.learn_rounds, c.learn_steps, c.gamma)
            pair, after = (found.left, found.right), found.bias
        self.put(*pair)
        return Look(before, after, (_between(self.left, old[0]), _between(self.right, old[1]).T))

    def _look(self, gradient: Callable[[], Tensor]) -> None:
        if self.watch is not None:
            watch, self.watch = self.watch, None
            watch(self, gradient())

    def _add(self, found: Tensor) -> None:
        if self.gradient is None:
            raise RuntimeError(f"{self.name}: no memory for its gradient")
        self.gradient += found

    def _memory(self, side: str, dtype: torch.dtype) -> Tensor | None:
        return self.scratch.take(side, self.left if side == "left" else self.right, dtype)


def carried(m: Tensor, v: Tensor, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Adam's moments [s, s] in the new subspace (Algorithm 2): A M B and A^2 V B^2 with squares by element.

    The first is exact: projecting is linear. The second would need the covariances of the old coordinates, of which V
    holds the diagonal alone; it is right where they are uncorrelated.
    """
    a, b = carry
    return a @ m @ b, a.square() @ v @ b.square()


def _between(new: Projector, old: Projector) -> Tensor:
    """P_new^T P_old, float32 [s, s]."""
    return new.dense(torch.float32).T @ old.dense(torch.float32)
