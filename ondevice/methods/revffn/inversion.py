"""Errors of inverting a network, measured step by step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ondevice.methods.revffn.fixed_point import Iteration
    from ondevice.methods.revffn.reversible import Reversible
    from ondevice.methods.revffn.streams import Streams

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerError:
    """Error of inverting one step of the network, against what went in.

    Attributes:
        block: number of the block, and `part` of it.
        error: relative error of u, rebuilt from this step's true outputs; `mismatched` elements
            differ.
        chained: relative error of u, rebuilt from the network's end through all later steps;
            `chained_mismatched`.
        iteration: how the iteration went, if the inverse is one.
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
    """Invert every step for int64 [B, T] ids, once from its true outputs and once from the
    network's end.

    Nothing is refused here: a step that does not converge is measured as it is. What
    `not_converged: store` has stored is taken on the way from the end.
    """
    states: list[tuple[Tensor, Tensor]] = []
    saved = network.forward(ids_BT, lambda u, v: states.append((u, v)))
    place = network.place(ids_BT.shape[1])
    v = saved.u
    w = saved.v
    true_v = v
    true_w = w
    errors: list[LayerError] = []
    for number in reversed(range(len(network.steps))):
        step = network.steps[number]
        side = saved.side.get(number)
        true_u = states[number][0]
        once, iteration = network.invert(step, place, true_v, true_w, side)
        kept = saved.stored.get(number)
        v, w = network.invert(step, place, v, w, side)[0] if kept is None else kept, v
        errors.append(
            LayerError(
                step.block, step.part, *difference(network.streams, once, true_u),
                *difference(network.streams, v, true_u), iteration,
            )
        )  # fmt: skip
        true_v, true_w = true_u, true_v
    return errors[::-1]


def report(network: Reversible, ids_BT: Tensor) -> None:
    """Log how each iterated step inverts on the first row, and warn of those that do not."""
    iterated = [
        (layer, layer.iteration)
        for layer in measure(network, ids_BT[:1])
        if layer.iteration is not None
    ]
    for layer, iteration in iterated:
        factor = "-"
        if iteration.contraction is not None:
            factor = f"{iteration.contraction:.3g}"
        _log.info(
            "layer %d: contraction factor %s, relative error of the rebuilt input %.2g after %d iterations",
            layer.block, factor, layer.error, iteration.iterations,
        )  # fmt: skip
    failed = [str(layer.block) for layer, iteration in iterated if not iteration.converged]
    if failed:
        outcome = "training will stop there"
        if network.config.not_converged == "store":
            outcome = "their inputs are stored"
        if network.config.recompute == "stored":
            outcome = "recompute: stored does not invert them"
        _log.warning(
            "Eq. (1) was not inverted to the tolerance in layers %s: %s", ", ".join(failed), outcome
        )


def difference(streams: Streams, rebuilt: Tensor, true: Tensor) -> tuple[float, int]:
    """Return relative error in norm, and the number of elements that differ."""
    mismatched = int((rebuilt != true).sum())
    if not mismatched:
        return 0.0, 0
    exact = streams.to_float(true).double()
    error = (streams.to_float(rebuilt).double() - exact).norm() / exact.norm()
    return float(error), mismatched
