"""The paper's inverse, an equation in X1, by fixed-point iteration.

Section 3.1 runs one iteration from Y1 and calls the error "below machine epsilon". On pretrained
weights it is some per cent (docs/results/revffn.md), so here the iteration goes on, and says what
it came to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.core.errors import TrainingError

if TYPE_CHECKING:
    from ondevice.methods.revffn.streams import Mix, Streams

SAME_ROOT = 100
"""If attention is strong, Eq. (1) has several solutions, and an iteration can end at another
than the one that went in. So the forward pass keeps the norm of each token's input, and an inverse
must have it to so many tolerances."""


@dataclass(frozen=True)
class Iteration:
    """Result of a fixed-point iteration.

    Attributes:
        iterations: evaluations of the branch.
        movement: how far the last one moved a token's stream, at most, as a part of its norm.
        contraction: geometric mean of the factor by which the movement's norm shrank; None after
            one iteration.
        norm_error: how far a token's norm is from what it was in the forward pass, at most, as a
            part of it.
        converged: `movement` is within the tolerance, and `norm_error` within `SAME_ROOT` times
            that.
    """

    iterations: int
    movement: float
    contraction: float | None
    norm_error: float
    converged: bool


def solve(
    streams: Streams,
    branch: Callable[[Tensor], Tensor],
    w: Tensor,
    v: Tensor,
    norms: Tensor,
    mix: Mix,
    max_iterations: int,
    tolerance: float,
) -> tuple[Tensor, Iteration]:
    """Solve w = step(u, v, branch(u)) for u, starting from w.

    Goes on to the tolerance, and integers on from there until the movement no longer shrinks: the
    last bits of a fixed point still move below any tolerance that a float32 norm can tell.

    Args:
        branch: of (u), with v bound.
        norms: of the tokens of the u that went in, from `token_norms`: they tell one root from
            another.

    Returns:
        u, and how the iteration went; it may not have converged.
    """
    tiny = torch.finfo(torch.float32).tiny
    u = w
    first = 0.0
    count = 0
    reached = 0
    norm = movement = float("inf")
    contraction = None
    while count < max_iterations:
        count += 1
        following = streams.inverse_step(w, v, branch(u), mix, None)
        moved = streams.to_float(following) - streams.to_float(u)
        before = norm
        norm = float(moved.norm())
        movement = float((moved.norm(dim=-1) / norms.clamp(min=tiny)).max())
        u = following
        first = first or norm
        if not reached and count > 1 and first:
            contraction = (max(norm, tiny) / first) ** (1 / (count - 1))
        reached = reached or (count if movement <= tolerance else 0)
        if (
            norm == 0.0
            or movement != movement
            or (reached and (u.is_floating_point() or norm > before / 2))
        ):
            break
    norm_error = float(((token_norms(streams, u) - norms).abs() / norms.clamp(min=tiny)).max())
    converged = movement <= tolerance and norm_error <= SAME_ROOT * tolerance
    return u, Iteration(count, movement, contraction, norm_error, converged)


def token_norms(streams: Streams, stream: Tensor) -> Tensor:
    """Return the norm of each token: float32 [B, T]."""
    return streams.to_float(stream).norm(dim=-1)


def not_inverted(block: int, iteration: Iteration, tolerance: float) -> TrainingError:
    """Return the error of a block whose iteration did not converge."""
    numbers = f"{iteration.movement:.3g} after {iteration.iterations} iterations, "
    numbers += f"norm off by {iteration.norm_error:.3g}"
    if iteration.contraction is not None:
        numbers += f", contraction {iteration.contraction:.3g}"
    return TrainingError(
        f"layer {block} cannot be inverted: the fixed-point iteration of Eq. (1) did not converge",
        expected=f"a movement of at most {tolerance:g} of a token's norm, and that norm to {SAME_ROOT * tolerance:g}",
        received=numbers,
        hint="coupling: exact inverts in closed form; or not_converged: store, or a larger max_iterations",
    )
