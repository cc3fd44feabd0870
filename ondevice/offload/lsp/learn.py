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

import torch
from torch import Tensor

from ondevice.offload.lsp.descent import Descents, square
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
    whole = float(square(gradient))
    if not whole:
        return 0.0
    p, q = left.dense(torch.float32), right.dense(torch.float32)
    middle = p.T @ (gradient @ q.to(gradient.dtype)).float()
    found = ((p.T @ p) @ middle @ (q.T @ q) * middle).sum() - 2 * square(middle)
    value = float(found) / whole + 1.0
    return 0.0 if value < 0 else value**0.5


def learn(
    left: Projector, right: Projector, gradient: Tensor, rounds: int = 1, steps: int = 12, gamma: float = 1e-3,
    descents: Descents | None = None,
) -> Learned:  # fmt: skip
    """Better values for `left` and `right`, at the same positions.

    Args:
        gradient: [m, n], float32 or bfloat16.
        rounds: products with the gradient, for each side.
        steps: of a side in a round.
        gamma: weight of the values' mean squares.
        descents: memory for other matrices of the shape, too.
    """
    whole = square(gradient)
    if (left.exact and right.exact) or not whole:
        return Learned(left, right, (), relative_bias(left, right, gradient))
    left, right = _scaled(left, right, gradient)
    descents, losses = descents or Descents(), list[Tensor]()
    for _ in range(rounds):
        for side in (0, 1):
            one, other, rows = (left, right, gradient) if side == 0 else (right, left, gradient.T)
            moved = _side(one, other, rows, whole, gamma, steps, losses, descents)
            left, right = (moved, right) if side == 0 else (left, moved)
    reached = torch.cat(losses).tolist()
    return Learned(left, right, tuple(reached), relative_bias(left, right, gradient))


def _scaled(left: Projector, right: Projector, gradient: Tensor) -> tuple[Projector, Projector]:
    """The same projectors times the one factor that brings their estimate nearest: they begin far too large."""
    p, q = left.dense(torch.float32), right.dense(torch.float32)
    middle = p.T @ (gradient @ q.to(gradient.dtype)).float()
    estimate = ((p.T @ p) @ middle @ (q.T @ q) * middle).sum()
    sides = [side for side in (left, right) if not side.exact]
    factor = float(square(middle) / estimate) ** (0.5 / len(sides))
    left, right = (s if s.values is None else replace(s, values=s.values * factor) for s in (left, right))
    return left, right


def _side(
    side: Projector, held: Projector, gradient: Tensor, whole: Tensor, gamma: float, steps: int, losses: list[Tensor],
    descents: Descents,
) -> Projector:  # fmt: skip
    """Some steps of `side`; `gradient` has its rows."""
    if side.positions is None or side.values is None:
        return side
    q = held.dense(torch.float32)
    outer, gram = (gradient @ q.to(gradient.dtype)).float(), q.T @ q  # Y [m, s], D [s, s]
    other = gamma * (torch.ones_like(whole) if held.values is None else square(held.values) / held.rows)
    one = descents.of(side.positions, side.size, held.size, steps)
    one.begin(side.positions, side.values, outer, gram, whole, gamma / side.rows, other)
    descents.run(one)
    losses.append(one.reached[1 if losses else 0 :].clone())
    return replace(side, values=one.values.clone())
