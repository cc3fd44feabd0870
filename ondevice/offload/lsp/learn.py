"""Learning a pair of projectors from a gradient (LSP-Offload, Algorithm 2, UpdateSubspace).

Minimised over the values, positions fixed, is

    ||P P^T G Q Q^T - G||^2 / ||G||^2 + gamma (||P||^2 / m + ||Q||^2 / n),

the paper's objective with a gamma that does not depend on the gradient's size. With Q held, Y = G Q and D = Q^T Q,
nothing as large as G is needed: with S = P^T Y and C = P^T P,

    ||P S Q^T - G||^2 = tr(C S D S^T) - 2 ||S||^2 + ||G||^2,
    gradient in P     = 2 [(P S D - Y) S^T + Y (C S D - S)^T] at P's positions,

and along a direction E the first is a polynomial of degree four, whose lowest point is known in closed form. So a round
is one product with G for each side and a few steps of conjugate gradients with an exact line search, and on a fixed G
the objective never rises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ondevice.offload.lsp.projector import Projector


@dataclass(frozen=True)
class Learned:
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
    """||P P^T G Q Q^T - G|| / ||G|| on this gradient [m, n], Theorem 1's alpha; 0 where the gradient is."""
    whole = float(_square(gradient))
    if not whole:
        return 0.0
    p, q = left.dense(torch.float32), right.dense(torch.float32)
    middle = p.T @ (gradient @ q.to(gradient.dtype)).float()
    found = ((p.T @ p) @ middle @ (q.T @ q) * middle).sum() - 2 * _square(middle)
    value = float(found) / whole + 1.0
    return 0.0 if value < 0 else value**0.5


def learn(
    left: Projector, right: Projector, gradient: Tensor, rounds: int = 2, steps: int = 6, gamma: float = 1e-3
) -> Learned:
    """Better values for `left` and `right`, at the same positions.

    Args:
        gradient: [m, n], float32 or bfloat16.
        rounds: products with the gradient, for each side.
        steps: of a side in a round.
        gamma: weight of the values' mean squares.
    """
    whole = float(_square(gradient))
    if not whole or (left.exact and right.exact):
        return Learned(left, right, (), relative_bias(left, right, gradient))
    left, right = _scaled(left, right, gradient)
    losses: list[float] = []
    for _ in range(rounds):
        other = gamma * _mean_square(right)
        left = _side(left, right, gradient, whole, gamma, other, steps, losses)
        other = gamma * _mean_square(left)
        right = _side(right, left, gradient.T, whole, gamma, other, steps, losses)
    return Learned(left, right, tuple(losses), relative_bias(left, right, gradient))


def _scaled(left: Projector, right: Projector, gradient: Tensor) -> tuple[Projector, Projector]:
    """The same projectors times the one factor that brings their estimate nearest: they begin far too large."""
    p, q = left.dense(torch.float32), right.dense(torch.float32)
    middle = p.T @ (gradient @ q.to(gradient.dtype)).float()
    estimate = ((p.T @ p) @ middle @ (q.T @ q) * middle).sum()
    sides = [side for side in (left, right) if not side.exact]
    factor = float(_square(middle) / estimate) ** (0.5 / len(sides))
    left, right = (s if s.values is None else replace(s, values=s.values * factor) for s in (left, right))
    return left, right


def _side(
    side: Projector, held: Projector, gradient: Tensor, whole: float, gamma: float, other: float, steps: int,
    losses: list[float],
) -> Projector:  # fmt: skip
    """Some steps of `side`; `gradient` has its rows."""
    if side.values is None or side.positions is None:
        return side
    q = held.dense(torch.float32)
    outer, gram = (gradient @ q.to(gradient.dtype)).float(), q.T @ q  # Y [m, s], D [s, s]
    values, penalty = side.values, gamma / side.rows
    slope, direction = torch.zeros_like(values), torch.zeros_like(values)
    for _ in range(steps):
        p = replace(side, values=values).dense(torch.float32)
        s, c = p.T @ outer, p.T @ p
        sd = s @ gram
        full = 2 * ((p @ sd - outer) @ s.T + outer @ (c @ sd - s).T)
        new = full.gather(1, side.positions) / whole + 2 * penalty * values
        turn = ((new * (new - slope)).sum() / _square(slope).clamp(min=1e-30)).clamp(min=0.0)  # Polak and Ribiere
        direction = turn * direction - new
        slope, direction = new, torch.where((direction * new).sum() < 0, direction, -new)
        along = _along(p, replace(side, values=direction).dense(torch.float32), outer, gram, s, c)
        shrink = (_square(values), 2 * (values * direction).sum(), _square(direction))
        known = np.array(torch.stack((*along, *shrink)).tolist())  # the one wait for the accelerator
        poly = known[:5] / whole
        poly[:3] += penalty * known[5:]
        poly[0] += 1.0 + other
        if not losses:
            losses.append(float(poly[0]))
        length, reached = _lowest(poly)
        if not length:
            break
        values = values + length * direction
        losses.append(reached)
    return replace(side, values=values)


def _along(p: Tensor, e: Tensor, outer: Tensor, gram: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Five coefficients, from the constant up, of tr(C S D S^T) - 2 ||S||^2 at P + x E: a polynomial in x."""
    t, mixed, square = e.T @ outer, p.T @ e, e.T @ e
    mixed = mixed + mixed.T
    ss, st, tt = s @ gram @ s.T, s @ gram @ t.T, t @ gram @ t.T
    return (
        (c * ss).sum() - 2 * _square(s),
        2 * (c * st).sum() + (mixed * ss).sum() - 4 * (s * t).sum(),
        (c * tt).sum() + 2 * (mixed * st).sum() + (square * ss).sum() - 2 * _square(t),
        (mixed * tt).sum() + 2 * (square * st).sum(),
        (square * tt).sum(),
    )


def _lowest(poly: np.ndarray) -> tuple[float, float]:
    """Where x >= 0 makes a polynomial of degree four lowest, and how low; coefficients from the constant up."""
    if not np.isfinite(poly).all():
        return 0.0, float(poly[0])
    roots = np.roots((poly[1:] * [1, 2, 3, 4])[::-1])
    real = roots.real[abs(roots.imag) < 1e-6 * (1 + abs(roots.real))]
    lengths = np.concatenate([[0.0], real[real > 0]])
    reached = np.polyval(poly[::-1], lengths)
    best = int(reached.argmin())
    return float(lengths[best]), float(reached[best])


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float32).square()


def _mean_square(side: Projector) -> float:
    return 1.0 if side.values is None else float(_square(side.values)) / side.rows
