"""Muon for the matrices of layers (Jordan et al. 2024): the momentum slides with its layer, and the
accelerator makes the update orthogonal while the layer is there.

Of a matrix of m x n with gradient g, in float32 but for Newton and Schulz' products in bfloat16:

    momentum = 0.95 momentum + 0.05 g        direction = 0.05 g + 0.95 momentum  (Nesterov)
    update   = five steps of Newton and Schulz' iteration from direction / ||direction||
    weight   = (1 - rate * decay) weight - rate * factor * update

This is `torch.optim.Muon`, whose `adjust_lr_fn` is `factor`. What leaves for the host is the update
in place of the gradient, and the momentum; the host keeps 6 or 8 bytes a parameter, master and
momentum. Everything else is AdamW's.

Of several ranks each keeps its shard of momenta and masters, which are updated by element. The
directions of all shards are gathered in between, and a rank makes those matrices orthogonal of
which it has a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.runtime_ops.layer_muon import layer_muon

if TYPE_CHECKING:
    from ondevice.offload.units import Piece, Unit
    from ondevice.runtime_ops.layer_adam import AdamStep, HostState

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: each step pushes every singular value towards 1."""
ITERATIONS = 5
TINY = 1e-7
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Of the momentum, by `EngineConfig.moments`."""


def suits(shape: tuple[int, ...]) -> bool:
    """Return True for a matrix, or a stack of matrices (experts). Filters of a convolution over
    single channels are vectors."""
    return len(shape) == 2 or (len(shape) == 3 and min(shape[1:]) > 1)


def orthogonal(x: Tensor) -> Tensor:
    """Return the matrix nearest to a semi-orthogonal one in five steps: bfloat16 [..., m, n]."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.bfloat16()
    if tall:
        y = y.mT
    if y.ndim == 2:
        y = y / y.norm().clamp(min=TINY)
    else:
        y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=TINY)
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = _add(y, _add(gram, gram, gram, b, c), y, a, 1.0)
    return y.mT if tall else y


def _add(x: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute beta x + alpha left @ right."""
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    return add(x, left, right, beta=beta, alpha=alpha)


def direct(gradient: Tensor, momentum: Tensor) -> Tensor:
    """Take a gradient into the momentum, float32 both, and return the direction."""
    momentum.lerp_(gradient, 1 - MOMENTUM)
    return gradient.lerp(momentum, MOMENTUM)


def factor(shape: tuple[int, ...], rule: str) -> float:
    """Return what multiplies the learning rate: `adamw` makes a step as long as AdamW's."""
    rows, columns = shape[-2:]
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def step(
    unit: Unit, update: Tensor, state: HostState, adam: AdamStep, rule: str, threads: int | None
) -> None:
    """Apply the updates of a unit's matrices to their masters on the host; flat, one after the
    other."""
    for span, decay, rate in _runs(unit, adam, rule):
        layer_muon(update, state, span, decay, rate, threads)


def _runs(unit: Unit, adam: AdamStep, rule: str) -> list[tuple[slice, float, float]]:
    """Return elements with what their masters and their updates are multiplied by; neighbours that
    are treated alike are one run."""
    runs: list[tuple[slice, float, float]] = []
    for piece in matrices(unit):
        if not piece.trained:
            continue
        decay = 1 - adam.learning_rate * adam.weight_decay * piece.decays
        rate = adam.learning_rate * factor(piece.whole or piece.shape, rule)
        low = piece.offset
        if runs and (runs[-1][0].stop, *runs[-1][1:]) == (low, decay, rate):
            low = runs.pop()[0].start
        runs.append((slice(low, piece.offset + piece.numel), decay, rate))
    return runs


def matrices(unit: Unit) -> Iterator[Piece]:
    """Yield the pieces that Muon updates, which come first in their unit."""
    return (piece for piece in unit.pieces if piece.muon)
