"""A weight matrix that is updated in a subspace: its projectors, its projected gradient, its
refresh.

The gradient itself is not made. Of G = dY^T X the subspace needs S = (dY P)^T (X Q): for T tokens T
s (m + n + s) multiplications instead of T m n, and no memory of G's size. Only a check of the bias,
every `check_every` steps, makes G, of one matrix at a time. To multiply, the projectors of a
layer's matrices are scattered into one dense memory that all layers share (`Plane`), for tensor
cores; stored are only d values and positions a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.methods.lsp.config import checks_bias
from ondevice.methods.lsp.fit import Descents, fit, relative_bias
from ondevice.methods.lsp.projector import Projector, draw, followed, widened

if TYPE_CHECKING:
    from ondevice.methods.lsp.config import ProjectorConfig
    from ondevice.offload.graphs import Record

DenseProjectors = tuple[Tensor | None, Tensor | None]
"""Dense projectors of rows and columns, [rows, s]; None for the identity."""


class Plane:
    """Memory for the dense projectors of one group of matrices at a time, shared by all groups; one
    for each dtype. And `descents`, memory that all are fitted in.

    Args:
        record: makes graphs of the fitting.
    """

    def __init__(self, record: Record | None = None) -> None:
        self.descents = Descents(record)
        self.memory: dict[torch.dtype, Tensor] = {}
        self.shown: dict[torch.dtype, Group] = {}

    def room(self, group: Group, dtype: torch.dtype) -> Tensor:
        """Return memory for the group's dense projectors."""
        memory = self.memory.get(dtype)
        if memory is None or memory.numel() < group.numel or memory.device != group.device:
            memory = self.memory[dtype] = torch.empty(group.numel, dtype=dtype, device=group.device)
        return memory

    def show(self, group: Group, dtype: torch.dtype) -> Tensor:
        """Return the group's dense projectors, flat, in `dtype`; filled only if another group's
        were there."""
        if self.shown.get(dtype) is not group or dtype not in self.memory:
            self.fill(group, dtype)
        return self.memory[dtype]

    def fill(self, group: Group, dtype: torch.dtype) -> None:
        """Make them."""
        self.room(group, dtype)[: group.numel].zero_().scatter_(0, *group.flat(dtype))
        self.shown[dtype] = group


class Group:
    """Matrices whose projectors are made dense together: those of a layer, for one kernel instead
    of many."""

    def __init__(self, plane: Plane, device: torch.device | str) -> None:
        self.plane = plane
        self.device = torch.empty(0, device=device).device  # with its index, as tensors have
        self.members: list[Matrix] = []
        self.known: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self.views: dict[torch.dtype, tuple[Tensor | None, list[DenseProjectors]]] = {}
        self.wide: dict[tuple[torch.dtype, int, int], Tensor] = {}
        self.numel = 0

    def add(self, matrix: Matrix) -> tuple[int, int]:
        """Add a matrix; return the offsets of its dense projectors."""
        self.members.append(matrix)
        start = self.numel
        middle = self.numel + _scattered(matrix.left)
        self.numel = middle + _scattered(matrix.right)
        return start, middle

    def pairs(self, dtype: torch.dtype) -> list[DenseProjectors]:
        """Return the members' dense projectors, [rows, s], in memory that is shared, or their own
        if they are stored dense; None for the identity."""
        memory = self.plane.show(self, dtype) if self.numel else None
        if dtype not in self.views or self.views[dtype][0] is not memory:
            pairs = [
                (self._side(matrix, 0, dtype, memory), self._side(matrix, 1, dtype, memory))
                for matrix in self.members
            ]
            self.views[dtype] = memory, pairs
        return self.views[dtype][1]

    def _side(
        self, matrix: Matrix, side: int, dtype: torch.dtype, memory: Tensor | None
    ) -> Tensor | None:
        projector = (matrix.left, matrix.right)[side]
        if projector.values is not None and projector.is_dense:
            # A copy, in place for all time: a graph has its address.
            key = (dtype, matrix.place, side)
            if key not in self.wide:
                self.wide[key] = projector.values.to(dtype, copy=True)
            return self.wide[key]
        if projector.exact or memory is None:
            return None
        at = matrix.starts[side]
        return memory[at : at + projector.rows * projector.size].view(projector.rows, -1)

    def changed(self, matrix: Matrix) -> None:
        """Note that a member has other projectors of the same shape."""
        for dtype in self.views:
            for number, side in enumerate((matrix.left, matrix.right)):
                wide = self.wide.get((dtype, matrix.place, number))
                if wide is not None and side.values is not None:
                    wide.copy_(side.values)
        low = 0
        for member in self.members:
            for start, side in zip(member.starts, (member.left, member.right), strict=True):
                if side.positions is None or side.values is None:
                    continue
                span = slice(low, low := low + side.positions.numel())
                for dtype, (positions, values) in self.known.items() if member is matrix else ():
                    positions[span].copy_(self._places(start, side, side.positions))
                    values[span].copy_(side.values.view(-1))
                    if self.plane.shown.get(dtype) is self:
                        own = self.plane.memory[dtype][start : start + side.rows * side.size]
                        own.zero_().scatter_(0, positions[span] - start, values[span])

    def flat(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return positions, int64, and values of all members in the plane."""
        if dtype not in self.known:
            positions = [torch.empty(0, dtype=torch.int64, device=self.device)]
            values = [torch.empty(0, dtype=dtype, device=self.device)]
            for matrix in self.members:
                for start, side in zip(matrix.starts, (matrix.left, matrix.right), strict=True):
                    if side.positions is not None and side.values is not None:
                        positions.append(self._places(start, side, side.positions))
                        values.append(side.values.to(dtype).view(-1))
            self.known[dtype] = torch.cat(positions), torch.cat(values)
        return self.known[dtype]

    def _places(self, start: int, side: Projector, positions: Tensor) -> Tensor:
        return (
            torch.arange(start, start + side.rows * side.size, side.size, device=self.device)[
                :, None
            ]
            + positions
        ).view(-1)


@dataclass(frozen=True)
class BiasCheck:
    """Result of a check of a matrix' projectors.

    Attributes:
        before: relative bias of the projectors that were there (Theorem 1's alpha on this
            gradient).
        after: that of the new ones; None if the old ones stay.
        carry: P_new^T P_old and Q_old^T Q_new, both [s, s], for `carried`; None if the old ones
            stay.
        momentum: what multiplies this gradient, carried from the old subspace, to come nearest to
            it in the new one.
        energy: the squared norm of this gradient in the new subspace over what `carried` makes of
            its squares in the old one.
    """

    before: float
    after: float | None = None
    carry: tuple[Tensor, Tensor] | None = None
    momentum: float = 1.0
    energy: float = 1.0


class Matrix:
    """One weight of m x n.

    Attributes:
        name: the parameter's.
        number: of the matrix in the model: its random numbers are its own.
        left, right: projectors of rows and columns.
        turn: how often they were drawn before.
        gain: what makes P D Q^T as large as D is: learned values are smaller than drawn ones, and
            AdamW's steps should not shrink with them.
        gradient: [s, s], in the compute dtype or float32, to which gradients are added; set by who
            trains.
        watch: called once with the whole gradient [m, n] before it is added; for a check of the
            bias.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        number: int,
        config: ProjectorConfig,
        seed: int,
        group: Group,
    ) -> None:
        self.name = name
        self.shape = shape
        self.number = number
        self.config = config
        self.seed = seed
        self.group = group
        self.device = group.device
        self.turn = 0
        self.gradient: Tensor | None = None
        self.watch: Callable[[Matrix, Tensor], None] | None = None
        self.place = len(group.members)
        self.put(*self.drawn(0))
        self.starts = group.add(self)

    @property
    def sizes(self) -> tuple[int, int]:
        """Sides of the subspace, left and right."""
        return self.left.size, self.right.size

    @property
    def numel(self) -> int:
        """Numbers that cross the bus in each direction."""
        return self.left.size * self.right.size

    def put(self, left: Projector, right: Projector) -> None:
        """Take these projectors."""
        self.left = left
        self.right = right
        squares = [
            1.0 if p.values is None else float(p.values.square().sum()) / p.rows
            for p in (left, right)
        ]
        self.gain = (squares[0] * squares[1]) ** -0.5
        self.group.changed(self)

    def drawn(self, turn: int) -> tuple[Projector, Projector]:
        """Return the random pair of that turn."""
        c = self.config
        signs = self.follows or c.projector_values == "signs"
        nonzeros = 1 if self.follows else c.nonzeros
        left, right = (
            draw(side, c.subspace, nonzeros, self.seed, turn, tensor, self.device, signs)
            for tensor, side in enumerate(self.shape, 2 * self.number)
        )
        if self.follows:
            return widened(left), widened(right)
        return left, right

    def collect(self, rows: Tensor, columns: Tensor) -> None:
        """Add what T tokens say: [T, m] and [T, n], of which the gradient is the product."""
        self._show(lambda: rows.T @ columns)
        self._add(self._narrow(0, rows).T, self._narrow(1, columns))

    def collect_whole(self, gradient: Tensor) -> None:
        """Add a gradient [m, n] that is there."""
        self._show(lambda: gradient)
        narrow = self._narrow(1, gradient)
        left = self.dense_projectors(gradient.dtype)[0]
        if left is None:
            self.gradient_there.add_(narrow)
        else:
            self._add(left.T, narrow)

    def collect_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Add a gradient that is zero but for `rows`, int64 [R]: [R, n]."""
        self._show(lambda: gradient.new_zeros(self.shape).index_add_(0, rows, gradient))
        self._add(self.left.rows_of(rows, gradient.dtype).T, self._narrow(1, gradient))

    def effective(self, base: Tensor, change: Tensor, decay: float | Tensor, out: Tensor) -> Tensor:
        """Compute decay * base + gain * P change Q^T.

        Args:
            base: [m, n]; `out` may be the same memory.
            change: [s, s], both in the dtype of `out`.
            decay: a number, or float32 [1] on the accelerator, which a graph reads when it is
                replayed.
        """
        return add_change(base, change, self.dense_projectors(out.dtype), self.gain, decay, out)

    def effective_rows(self, base: Tensor, rows: Tensor, change: Tensor, decay: float) -> Tensor:
        """Return the same for some rows, int64 [R] of [R, n]."""
        pair = self.left.rows_of(rows, base.dtype), self.dense_projectors(base.dtype)[1]
        return add_change(base, change, pair, self.gain, decay, torch.empty_like(base))

    def dense_projectors(self, dtype: torch.dtype) -> DenseProjectors:
        """Return both projectors, dense, in memory that is shared."""
        return self.group.pairs(dtype)[self.place]

    def checks(self, step: int) -> bool:
        """Return True if step `step` (from 0) checks it. A projector that is to follow the gradient
        does so from the first on: an expert's is in the first step that has tokens for it."""
        return checks_bias(self.config, step) or (self.follows and self.turn == 0)

    @property
    def follows(self) -> bool:
        """True if projectors follow the gradient."""
        return self.config.projector_values == "followed"

    def refresh(
        self, gradient: Tensor, first: Callable[[Tensor], Tensor] | None = None
    ) -> BiasCheck:
        """Check the bias on a gradient [m, n], and draw and fit new projectors if it is too large.

        Args:
            first: returns rank 0's values, in the same memory: what several ranks decide by, and
                what they learn.
        """
        before = self._agreed(relative_bias(self.left, self.right, gradient), first)
        threshold = 0.0 if self.follows and self.turn == 0 else self.config.threshold
        if not before >= threshold or before == math.inf or (self.left.exact and self.right.exact):
            return BiasCheck(before)
        c = self.config
        old = (self.left, self.right)
        self.turn += 1
        if self.follows:
            pair = followed(old[0], gradient), followed(old[1], gradient.T)
        else:
            pair = self.drawn(self.turn)
        if c.learned:
            fitted = fit(
                *pair, gradient, c.learn_rounds, c.learn_steps, c.gamma, self.group.plane.descents
            )
            pair = (fitted.left, fitted.right)
            after = self._agreed(fitted.bias, first)
            if not after < before:
                return BiasCheck(before)
        for side in pair:
            if first is not None and side.values is not None:
                side.values = first(side.values)
            if first is not None and side.shares is not None:
                side.shares = first(side.shares)
        if not c.learned:
            after = relative_bias(*pair, gradient)
        self.put(*pair)
        carry = _between(self.left, old[0]), _between(self.right, old[1]).T
        if self.follows:
            # Orthonormal projectors carry lengths as they are. They fit this gradient better than
            # others, and a factor made of it would let the second moment grow with each check.
            return BiasCheck(before, after, carry)
        return BiasCheck(before, after, carry, *_factors(gradient, pair, old, carry))

    def _agreed(self, value: float, first: Callable[[Tensor], Tensor] | None) -> float:
        if first is None:
            return value
        return float(first(torch.tensor([value], dtype=torch.float64, device=self.device)))

    def _show(self, gradient: Callable[[], Tensor]) -> None:
        if self.watch is not None:
            watch = self.watch
            self.watch = None
            watch(self, gradient())

    @property
    def gradient_there(self) -> Tensor:
        """The memory that gradients are added to."""
        if self.gradient is None:
            raise RuntimeError(f"{self.name}: no memory for its gradient")
        return self.gradient

    def _narrow(self, side: int, x: Tensor) -> Tensor:
        dense = self.dense_projectors(x.dtype)[side]
        if dense is None:
            return x
        return x @ dense

    def _add(self, left: Tensor, right: Tensor) -> None:
        gradient = self.gradient_there
        if gradient.dtype == left.dtype:
            gradient.addmm_(left, right)
        else:
            gradient += left @ right


def add_change(
    base: Tensor,
    change: Tensor,
    pair: DenseProjectors,
    gain: float,
    decay: float | Tensor,
    out: Tensor,
) -> Tensor:
    """Compute decay * base + gain * P change Q^T into `out`, [m, n]; P and Q dense, or None for the
    identity."""
    left, right = pair
    wide = change
    if left is not None:
        wide = left @ change
    if isinstance(
        decay, Tensor
    ):  # of one element and one dimension: so the sum is rounded once, from float32
        wide = wide * gain
        return torch.addcmul(wide if right is None else wide @ right.T, base, decay, out=out)
    if right is None:
        return torch.add(base * decay, wide, alpha=gain, out=out)
    return torch.addmm(base, wide, right.T, beta=decay, alpha=gain, out=out)


def carried(m: Tensor, v: Tensor, check: BiasCheck) -> tuple[Tensor, Tensor]:
    """Return Adam's moments [s, s] in the new subspace (Algorithm 2): A M B, and A^2 V B^2 with
    squares by element, each multiplied by one factor that makes it right on the checked gradient.

    Of the gradients that made them only what the old subspace holds is known. P P^T of drawn
    projectors is far from the identity: A M B is several times as long as the gradients' mean in
    the new subspace, and nearly all of it is error, so steps would be several times too long, in
    any direction. It is shortened to the length at which it is nearest. The second moment is right
    if the old coordinates are uncorrelated, which learned ones are not: it comes out several times
    too small or, between drawn ones, too large."""
    if check.carry is None:
        return m, v
    a, b = check.carry
    return (a @ m @ b) * check.momentum, (a.square() @ v @ b.square()) * check.energy


def _factors(
    gradient: Tensor,
    new: tuple[Projector, Projector],
    old: tuple[Projector, Projector],
    carry: tuple[Tensor, Tensor],
) -> tuple[float, float]:
    """`momentum` and `energy` of a check."""
    here, there = (
        (left.dense(gradient.dtype).T @ (gradient @ right.dense(gradient.dtype))).float()
        for left, right in (new, old)
    )
    known = carry[0] @ there @ carry[1]
    length = float(known.square().sum())
    squares = float((carry[0].square() @ there.square() @ carry[1].square()).sum())
    momentum = 1.0
    if length:
        momentum = max(0.0, float((known * here).sum()) / length)
    return momentum, float(here.square().sum()) / squares if squares else 1.0


def _scattered(side: Projector) -> int:
    """Elements of the plane that a side takes."""
    return 0 if side.positions is None else side.rows * side.size


def _between(new: Projector, old: Projector) -> Tensor:
    """P_new^T P_old, float32 [s, s]."""
    return new.dense(torch.float32).T @ old.dense(torch.float32)
