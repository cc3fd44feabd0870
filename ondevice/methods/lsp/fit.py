"""Fitting a pair of projectors to a gradient (LSP-Offload, Algorithm 2, UpdateSubspace).

Minimised over the values, positions fixed, is

    ||P P^T G Q Q^T - G||^2 / ||G||^2 + gamma (||P||^2 / m + ||Q||^2 / n),

the paper's objective with a gamma that does not depend on the gradient's size. With Q held, Y = G Q
and D = Q^T Q, nothing as large as G is needed: with S = P^T Y and C = P^T P,

    ||P S Q^T - G||^2 = tr(C S D S^T) - 2 ||S||^2 + ||G||^2,
    gradient in P     = 2 [(P S D - Y) S^T + Y (C S D - S)^T] at P's positions,

and along a direction E the first is a polynomial of degree four, whose lowest point is known in
closed form. So a round is one product with G for each side and a few steps of conjugate gradients
with an exact line search, and on a fixed G the objective never rises.

A step never waits for the accelerator and reads fixed memory: so the steps of a side are a CUDA
graph, the same one for all matrices of a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ondevice.methods.lsp.projector import Projector
from ondevice.offload.graphs import Graphs, Record


@dataclass(frozen=True)
class Fitted:
    """A pair of projectors, and how far their estimate of the gradient is off.

    Attributes:
        losses: the objective at the start and after every step.
        bias: ||P P^T G Q Q^T - G|| / ||G||.
    """

    left: Projector
    right: Projector
    losses: tuple[float, ...]
    bias: float


def relative_bias(left: Projector, right: Projector, gradient: Tensor) -> float:
    """Compute ||P P^T G Q Q^T - G|| / ||G|| on this gradient [m, n], Theorem 1's alpha; 0 for a
    zero gradient."""
    squared_norm = float(square(gradient))
    if not squared_norm:
        return 0.0
    p = left.dense(torch.float32)
    q = right.dense(torch.float32)
    middle = p.T @ (gradient @ q.to(gradient.dtype)).float()
    difference = ((p.T @ p) @ middle @ (q.T @ q) * middle).sum() - 2 * square(middle)
    value = float(difference) / squared_norm + 1.0
    if value < 0:
        return 0.0
    return value**0.5


def fit(
    left: Projector, right: Projector, gradient: Tensor, rounds: int = 1, steps: int = 12, gamma: float = 1e-3,
    descents: Descents | None = None,
) -> Fitted:  # fmt: skip
    """Find better values for `left` and `right`, at the same positions.

    Args:
        gradient: [m, n], float32 or bfloat16.
        rounds: products with the gradient, for each side.
        steps: of a side in a round.
        gamma: weight of the values' mean squares.
        descents: memory for other matrices of the shape, too.
    """
    squared_norm = square(gradient)
    if (left.exact and right.exact) or not squared_norm:
        return Fitted(left, right, (), relative_bias(left, right, gradient))
    left, right = _scaled(left, right, gradient)
    descents = descents or Descents()
    losses = list[Tensor]()
    for _ in range(rounds):
        for side in (0, 1):
            if side == 0:
                projector = left
                other = right
                rows = gradient
            else:
                projector = right
                other = left
                rows = gradient.T
            moved = _side(projector, other, rows, squared_norm, gamma, steps, losses, descents)
            left, right = (moved, right) if side == 0 else (left, moved)
    reached = torch.cat(losses).tolist()
    return Fitted(left, right, tuple(reached), relative_bias(left, right, gradient))


def _scaled(left: Projector, right: Projector, gradient: Tensor) -> tuple[Projector, Projector]:
    """The same projectors times the one factor that brings their estimate nearest: they begin far
    too large."""
    p = left.dense(torch.float32)
    q = right.dense(torch.float32)
    middle = p.T @ (gradient @ q.to(gradient.dtype)).float()
    estimate = ((p.T @ p) @ middle @ (q.T @ q) * middle).sum()
    sides = [side for side in (left, right) if not side.exact]
    factor = float(square(middle) / estimate) ** (0.5 / len(sides))
    left, right = (
        s if s.values is None else replace(s, values=s.values * factor) for s in (left, right)
    )
    return left, right


def _side(
    side: Projector, fixed: Projector, gradient: Tensor, squared_norm: Tensor, gamma: float, steps: int,
    losses: list[Tensor], descents: Descents,
) -> Projector:  # fmt: skip
    """Some steps of `side`; `gradient` has its rows."""
    if side.positions is None or side.values is None:
        return side
    q = fixed.dense(torch.float32)
    # Y [m, s], D [s, s]
    outer = (gradient @ q.to(gradient.dtype)).float()
    gram = q.T @ q
    other = gamma * (
        torch.ones_like(squared_norm) if fixed.values is None else square(fixed.values) / fixed.rows
    )
    descent = descents.of(side.positions, side.size, fixed.size, steps)
    descent.begin(side.positions, side.values, outer, gram, squared_norm, gamma / side.rows, other)
    descents.run(descent)
    losses.append(descent.reached[1 if losses else 0 :].clone())
    return replace(side, values=descent.values.clone())


class Descent:
    """One side [rows, s] with d values a row, on its way.

    Args:
        width: of the other side's subspace.
        steps: that `run` takes.

    Attributes:
        values: float32 [rows, d], changed by `run`.
        reached: float64 [1 + steps], the objective at the start and after every step.
    """

    def __init__(self, positions: Tensor, size: int, width: int, steps: int) -> None:
        self.positions = torch.empty_like(positions)
        self.size = size
        self.values, self.slope, self.direction = (
            torch.empty_like(positions, dtype=torch.float32) for _ in range(3)
        )
        self.outer = self.values.new_empty(len(positions), width)
        self.gram = self.values.new_empty(width, width)
        self.scales = self.values.new_empty(3, dtype=torch.float64)
        self.reached = self.scales.new_empty(1 + steps)

    def begin(
        self, positions: Tensor, values: Tensor, outer: Tensor, gram: Tensor, squared_norm: Tensor, penalty: float,
        other: Tensor,
    ) -> None:  # fmt: skip
        """Take a side as it is.

        Args:
            outer: Y = G Q, float32 [rows, width].
            gram: D = Q^T Q, float32 [width, width].
            whole: ||G||^2, [].
            penalty: gamma / rows.
            other: what the fixed side adds to the objective, [].
        """
        self.positions.copy_(positions)
        self.values.copy_(values)
        self.outer.copy_(outer)
        self.gram.copy_(gram)
        self.scales.copy_(
            torch.stack((squared_norm, torch.full_like(squared_norm, penalty), other))
        )

    def run(self) -> tuple[Tensor, ...]:
        """Return all steps; on CUDA products have TF32's precision, which learns as well
        (docs/results/lsp.md)."""
        self.slope.zero_()
        self.direction.zero_()
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.values.is_cuda else before)
        try:
            for number in range(1, len(self.reached)):
                self._step(number)
        finally:
            torch.set_float32_matmul_precision(before)
        return ()

    def _step(self, number: int) -> None:
        """Down one direction, to the lowest point along it."""
        squared_norm, penalty, other = self.scales.unbind()
        p = self._dense(self.values)
        outer = self.outer
        s, c = (p.T @ torch.cat((outer, p), 1)).split((outer.shape[1], self.size), 1)
        sd = s @ self.gram
        slopes = torch.cat((p, outer), 1) @ torch.cat((sd @ s.T, (c @ sd - 2 * s).T))
        new = (
            2 * slopes.gather(1, self.positions) / squared_norm.float()
            + 2 * penalty.float() * self.values
        )
        turn = ((new * (new - self.slope)).sum() / square(self.slope).clamp(min=1e-30)).clamp(
            min=0.0
        )
        direction = turn * self.direction - new  # Polak and Ribiere
        direction = torch.where((direction * new).sum() < 0, direction, -new)
        self.slope.copy_(new)
        self.direction.copy_(direction)
        along = (
            torch.stack(_along(p, self._dense(direction), outer, self.gram, s, c, sd)).double()
            / squared_norm
        )
        shrink = torch.stack(
            (square(self.values), 2 * (self.values * direction).sum(), square(direction))
        ).double()
        along[:3] += penalty * shrink
        along[0] += 1.0 + other
        length, reached = lowest(along)
        self.values.add_(length.float() * direction)
        if number == 1:
            self.reached[0].copy_(along[0])
        self.reached[number].copy_(reached)

    def _dense(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(values), self.size).scatter_(1, self.positions, values)


class Descents:
    """A `Descent` for each shape, and its graph. What the largest matrices need is some hundred
    MB."""

    def __init__(self, record: Record | None = None) -> None:
        self.known: dict[tuple[int, ...], Descent] = {}
        self.graphs = Graphs(record)

    def of(self, positions: Tensor, size: int, width: int, steps: int) -> Descent:
        """Return the descent of a side with these positions [rows, d] in `size` columns; for the
        rest see `Descent`."""
        key = (*positions.shape, size, width, steps)
        if key not in self.known:
            self.known[key] = Descent(positions, size, width, steps)
        return self.known[key]

    def run(self, descent: Descent) -> None:
        """Run all steps of a descent."""
        self.graphs.run((id(descent),), (), (), descent.run)


def square(x: Tensor) -> Tensor:
    """Compute ||x||^2 in float32, []."""
    return torch.linalg.vector_norm(x, dtype=torch.float32).square()


def _along(
    p: Tensor, e: Tensor, outer: Tensor, gram: Tensor, s: Tensor, c: Tensor, sd: Tensor
) -> tuple[Tensor, ...]:
    """Five coefficients, from the constant up, of tr(C S D S^T) - 2 ||S||^2 at P + x E: a
    polynomial in x."""
    size = p.shape[1]
    t, mixed, own = (e.T @ torch.cat((outer, p, e), 1)).split((outer.shape[1], size, size), 1)
    mixed = mixed + mixed.T
    ss, st = (sd @ torch.cat((s, t)).T).split(size, 1)
    tt = t @ gram @ t.T
    return (
        (c * ss).sum() - 2 * square(s),
        2 * (c * st).sum() + (mixed * ss).sum() - 4 * (s * t).sum(),
        (c * tt).sum() + 2 * (mixed * st).sum() + (own * ss).sum() - 2 * square(t),
        (mixed * tt).sum() + 2 * (own * st).sum(),
        (own * tt).sum(),
    )


def lowest(poly: Tensor) -> tuple[Tensor, Tensor]:
    """Find the x >= 0 at which a polynomial of degree four is lowest, and its value.

    Coefficients are float64 [5] from the constant up. If no x is lower, or they are not finite, x
    is 0.

    The slope is a cubic: its roots are known in closed form, and two steps of Newton's method make
    them exact."""
    powers = torch.arange(5, dtype=poly.dtype, device=poly.device)
    d, c, b = (poly[1:4] * powers[1:4] / (4 * poly[4])).unbind()  # x^3 + b x^2 + c x + d
    p = c - b * b / 3
    q = (2 * b * b * b - 9 * b * c) / 27 + d
    inside = q * q / 4 + p * p * p / 27
    big = -torch.sign(q + (q == 0)) * (q.abs() / 2 + inside.clamp(min=0).sqrt()) ** (1 / 3)
    root = big - torch.where(big == 0, 0.0, p / (3 * big))
    radius = 2 * (-p / 3).clamp(min=0).sqrt()
    ratio = torch.where(radius == 0, 0.0, 3 * q / (p * radius)).clamp(-1, 1)
    angles = (torch.arccos(ratio) - 2 * math.pi * powers[:3]) / 3
    x = torch.where(inside > 0, root, radius * torch.cos(angles)) - b / 3
    for _ in range(2):
        slope = ((x + b) * x + c) * x + d
        bend = (3 * x + 2 * b) * x + c
        x = x - torch.where(bend == 0, 0.0, slope / bend)
    x = torch.cat((torch.zeros_like(x[:1]), torch.where(x.isfinite() & (x > 0), x, 0.0)))
    values = (poly * x[:, None] ** powers).sum(1)
    values = torch.where(values.isfinite(), values, math.inf)
    at = values.argmin()
    # an index would wait for its value
    length = x.take(at)
    reached = values.take(at)
    return length, torch.where(reached.isfinite(), reached, poly[0])
