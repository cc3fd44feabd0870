"""The paper's inverse, an equation in X1, by fixed-point iteration; and how well any coupling inverts, measured.

Section 3.1 runs one iteration from Y1 and calls the error "below machine epsilon". On pretrained weights it is some
per cent (docs/methods/revffn.md), so here the iteration goes on, and says what it came to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.errors import TrainingError

if TYPE_CHECKING:
    from ondevice.methods.revffn.streams import Mix, Streams
    from ondevice.methods.revffn.walk import Reversible


_log = logging.getLogger(__name__)
SAME_ROOT = 100
"""Where attention is strong, Eq. (1) has several solutions, and an iteration can end at another than the one that went
in. So the forward pass keeps the norm of each token's input, and an inverse must have it to so many tolerances."""


@dataclass(frozen=True)
class Iteration:
    """How a fixed-point iteration went.

    Attributes:
        iterations: evaluations of the branch.
        movement: how far the last one moved a token's stream, at most, as a part of its norm.
        contraction: geometric mean of the factor by which the movement's norm shrank; None after one iteration.
        norm_error: how far a token's norm is from what it was in the forward pass, at most, as a part of it.
        converged: `movement` is within the tolerance, and `norm_error` within `SAME_ROOT` times that.
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
    """u with w = step(u, v, branch(u)), starting from w; `norms` are those of its tokens, from `token_norms`.

    Goes on to the tolerance, and integers on from there until the movement no longer shrinks.
    """
    tiny = torch.finfo(torch.float32).tiny
    u, first, count, reached = w, 0.0, 0, 0
    norm = movement = float("inf")
    contraction = None
    while count < max_iterations:
        count += 1
        found = streams.unstep(w, v, branch(u), mix, None)
        moved = streams.to_float(found) - streams.to_float(u)
        before, norm = norm, float(moved.norm())
        movement, u = float((moved.norm(dim=-1) / norms.clamp(min=tiny)).max()), found
        first = first or norm
        if not reached and count > 1 and first:
            contraction = (max(norm, tiny) / first) ** (1 / (count - 1))
        reached = reached or (count if movement <= tolerance else 0)
        if norm == 0.0 or movement != movement or (reached and (u.is_floating_point() or norm > before / 2)):
            break
    norm_error = float(((token_norms(streams, u) - norms).abs() / norms.clamp(min=tiny)).max())
    converged = movement <= tolerance and norm_error <= SAME_ROOT * tolerance
    return u, Iteration(count, movement, contraction, norm_error, converged)


def token_norms(streams: Streams, stream: Tensor) -> Tensor:
    """The norm of each token: float32 [B, T]."""
    return streams.to_float(stream).norm(dim=-1)


def refuse(block: int, found: Iteration, tolerance: float) -> TrainingError:
    """The error of a block that was not inverted."""
    numbers = f"{found.movement:.3g} after {found.iterations} iterations, norm off by {found.norm_error:.3g}"
    if found.contraction is not None:
        numbers += f", contraction {found.contraction:.3g}"
    return TrainingError(
        f"layer {block} cannot be inverted: the fixed-point iteration of Eq. (1) did not converge",
        expected=f"a movement of at most {tolerance:g} of a token's norm, and that norm to {SAME_ROOT * tolerance:g}",
        received=numbers,
        hint="coupling: exact inverts in closed form; or not_converged: store, or a larger max_iterations",
    )


@dataclass(frozen=True)
class LayerError:
    """How one step of the network was inverted, against what went in.

    Attributes:
        block: number of the block, and `part` of it.
        error: relative error of u, rebuilt from this step's true outputs; `mismatched` elements differ.
        chained: relative error of u, rebuilt from the network's end through all later steps; `chained_mismatched`.
        iteration: how it went where the inverse is an iteration.
    """

    block: int
    part: str
    error: float
    mismatched: int
    chained: float
    chained_mismatched: int
    iteration: Iteration | None


@torch.no_grad()
def measure(network: Reversible, ids_BT: Tensor) -> list[LayerError]:
    """Invert every step for int64 [B, T] ids, once from its true outputs and once from the network's end.

    Nothing is refused here: a step that does not converge is measured as it is. What `not_converged: store` has stored
    is taken on the way from the end.
    """
    states: list[tuple[Tensor, Tensor]] = []
    ends = network.forward(ids_BT, lambda u, v: states.append((u, v)))
    position = network.position(ids_BT.shape[1])
    v, w = ends.u, ends.v
    true_v, true_w = v, w
    found: list[LayerError] = []
    for number in reversed(range(len(network.steps))):
        step, side = network.steps[number], ends.side.get(number)
        true_u, iteration = states[number][0], None
        once, iteration = network.invert(step, position, true_v, true_w, side)
        kept = ends.stored.get(number)
        v, w = network.invert(step, position, v, w, side)[0] if kept is None else kept, v
        found.append(
            LayerError(
                step.block, step.part, *difference(network.streams, once, true_u),
                *difference(network.streams, v, true_u), iteration,
            )
        )  # fmt: skip
        true_v, true_w = true_u, true_v
    return found[::-1]


def report(network: Reversible, ids_BT: Tensor) -> None:
    """Log how each iterated step inverts on the first row, and warn of those that do not."""
    found = [(layer, layer.iteration) for layer in measure(network, ids_BT[:1]) if layer.iteration is not None]
    for layer, went in found:
        factor = "-" if went.contraction is None else f"{went.contraction:.3g}"
        _log.info(
            "layer %d: contraction factor %s, relative error of the rebuilt input %.2g after %d iterations",
            layer.block, factor, layer.error, went.iterations,
        )  # fmt: skip
    failed = [str(layer.block) for layer, went in found if not went.converged]
    if failed:
        outcome = "their inputs are stored" if network.config.not_converged == "store" else "training will stop there"
        if network.config.recompute == "stored":
            outcome = "recompute: stored does not invert them"
        _log.warning("Eq. (1) was not inverted to the tolerance in layers %s: %s", ", ".join(failed), outcome)


def difference(streams: Streams, found: Tensor, true: Tensor) -> tuple[float, int]:
    """Relative error in norm, and the number of elements that differ."""
    mismatched = int((found != true).sum())
    if not mismatched:
        return 0.0, 0
    exact = streams.to_float(true).double()
    error = (streams.to_float(found).double() - exact).norm() / exact.norm()
    return float(error), mismatched
