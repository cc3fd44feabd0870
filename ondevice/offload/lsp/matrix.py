"""A weight matrix that is updated in a subspace: its projectors, what is known of its gradient there, and its refresh.

The gradient itself is not made. Of G = dY^T X the subspace needs S = (dY P)^T (X Q): for T tokens T s (m + n + s)
multiplications where G takes T m n, and no memory of G's size. Only a look at the bias, every `check_every` steps,
makes G, of one matrix at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.lsp.learn import learn, relative_bias
from ondevice.offload.lsp.plane import Group, Pair
from ondevice.offload.lsp.projector import Projector, draw

if TYPE_CHECKING:
    from ondevice.offload.lsp.config import ProjectorConfig


@dataclass(frozen=True)
class Look:
    """What a look at a matrix found.

    Attributes:
        before: relative bias of the projectors that were there (Theorem 1's alpha on this gradient).
        after: that of the new ones; None where the old ones stay.
        carry: P_new^T P_old and Q_old^T Q_new, both [s, s], for `carried`; None where the old ones stay.
        energy: the squared norm of this gradient in the new subspace over what `carried` makes of its squares in the
            old one.
    """

    before: float
    after: float | None = None
    carry: tuple[Tensor, Tensor] | None = None
    energy: float = 1.0


class Matrix:
    """One weight of m x n.

    Attributes:
        name: the parameter's.
        number: of the matrix in the model: its random numbers are its own.
        left, right: projectors of rows and columns.
        turn: how often they were drawn before.
        gain: what makes P D Q^T as large as D is: learned values are smaller than drawn ones, and AdamW's steps
            should not shrink with them.
        gradient: [s, s], in the compute dtype or float32, to which gradients are added; set by who trains.
        watch: called once with the whole gradient [m, n] before it is added; for a look at the bias.
    """

    def __init__(
        self, name: str, shape: tuple[int, int], number: int, config: ProjectorConfig, seed: int, group: Group
    ) -> None:
        self.name, self.shape, self.number, self.config, self.seed = name, shape, number, config, seed
        self.group, self.device, self.turn = group, group.device, 0
        self.gradient: Tensor | None = None
        self.watch: Callable[[Matrix, Tensor], None] | None = None
        self.put(*self.drawn(0))
        self.place, self.starts = len(group.members), group.add(self)

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
        self.group.changed(self)

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
        self._add(self._narrow(0, rows).T, self._narrow(1, columns))

    def collect_whole(self, gradient: Tensor) -> None:
        """Add a gradient [m, n] that is there."""
        self._look(lambda: gradient)
        narrow = self._narrow(1, gradient)
        left = self.dense_pair(gradient.dtype)[0]
        if left is None:
            self.gradient_there.add_(narrow)
        else:
            self._add(left.T, narrow)

    def collect_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Add a gradient that is zero but for `rows`, int64 [R]: [R, n]."""
        self._look(lambda: gradient.new_zeros(self.shape).index_add_(0, rows, gradient))
        self._add(self.left.rows_of(rows, gradient.dtype).T, self._narrow(1, gradient))

    def effective(self, base: Tensor, change: Tensor, decay: float, out: Tensor) -> Tensor:
        """decay * base + gain * P change Q^T.

        Args:
            base: [m, n]; `out` may be the same memory.
            change: [s, s], both in the dtype of `out`.
        """
        return add_change(base, change, self.dense_pair(out.dtype), self.gain, decay, out)

    def effective_rows(self, base: Tensor, rows: Tensor, change: Tensor, decay: float) -> Tensor:
        """The same for some rows, int64 [R] of [R, n]."""
        pair = self.left.rows_of(rows, base.dtype), self.dense_pair(base.dtype)[1]
        return add_change(base, change, pair, self.gain, decay, torch.empty_like(base))

    def dense_pair(self, dtype: torch.dtype) -> Pair:
        """Both projectors, dense, in memory that is shared."""
        return self.group.pairs(dtype)[self.place]

    def refresh(self, gradient: Tensor) -> Look:
        """Look at the bias on a gradient [m, n], and draw and learn other projectors where it is too large."""
        before = relative_bias(self.left, self.right, gradient)
        if not before >= self.config.threshold or before == math.inf or (self.left.exact and self.right.exact):
            return Look(before)
        c, old = self.config, (self.left, self.right)
        self.turn += 1
        pair = self.drawn(self.turn)
        if c.learned:
            found = learn(*pair, gradient, c.learn_rounds, c.learn_steps, c.gamma, self.group.plane.descents)
            pair, after = (found.left, found.right), found.bias
            if not after < before:
                return Look(before)
        else:
            after = relative_bias(*pair, gradient)
        self.put(*pair)
        carry = _between(self.left, old[0]), _between(self.right, old[1]).T
        return Look(before, after, carry, _energy(gradient, pair, old, carry))

    def _look(self, gradient: Callable[[], Tensor]) -> None:
        if self.watch is not None:
            watch, self.watch = self.watch, None
            watch(self, gradient())

    @property
    def gradient_there(self) -> Tensor:
        """The memory that gradients are added to."""
        if self.gradient is None:
            raise RuntimeError(f"{self.name}: no memory for its gradient")
        return self.gradient

    def _narrow(self, side: int, x: Tensor) -> Tensor:
        dense = self.dense_pair(x.dtype)[side]
        return x if dense is None else x @ dense

    def _add(self, left: Tensor, right: Tensor) -> None:
        gradient = self.gradient_there
        if gradient.dtype == left.dtype:
            gradient.addmm_(left, right)
        else:
            gradient += left @ right


def add_change(base: Tensor, change: Tensor, pair: Pair, gain: float, decay: float, out: Tensor) -> Tensor:
    """decay * base + gain * P change Q^T into `out`, [m, n]; P and Q dense, or None for the identity."""
    left, right = pair
    wide = change if left is None else left @ change
    if right is None:
        return torch.add(base * decay, wide, alpha=gain, out=out)
    return torch.addmm(base, wide, right.T, beta=decay, alpha=gain, out=out)


def carried(m: Tensor, v: Tensor, look: Look) -> tuple[Tensor, Tensor]:
    """Adam's moments [s, s] in the new subspace (Algorithm 2): A M B, and A^2 V B^2 with squares by element.

    Of the gradients that made them only what the old subspace holds is known. The second moment is right where the old
    coordinates are uncorrelated, which learned ones are not: it comes out several times too small or, between drawn
    ones, too large. So it is multiplied by one factor, `Look.energy`, that makes it right on the gradient of the look.
    """
    if look.carry is None:
        return m, v
    a, b = look.carry
    return a @ m @ b, (a.square() @ v @ b.square()) * look.energy


def _energy(
    gradient: Tensor, new: tuple[Projector, Projector], old: tuple[Projector, Projector], carry: tuple[Tensor, Tensor]
) -> float:
    inside = []
    for left, right in (new, old):
        narrow = gradient @ right.dense(gradient.dtype)
        inside.append((left.dense(gradient.dtype).T @ narrow).float().square())
    known = float((carry[0].square() @ inside[1] @ carry[1].square()).sum())
    return float(inside[0].sum()) / known if known else 1.0


def _between(new: Projector, old: Projector) -> Tensor:
    """P_new^T P_old, float32 [s, s]."""
    return new.dense(torch.float32).T @ old.dense(torch.float32)
