"""Parameter groups of a unit: elements that decay, that are trained, and that Muon updates.

A unit is one run of memory, and a step updates runs of neighbours that are treated alike. Bits of
float32 moments do not depend on how a unit is cut into runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from ondevice.runtime_ops.layer_adam import TILE, AdamStep, HostState, Moments

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.offload.units import Piece, Unit

SEEDS = 1 << 20
"""Between the seeds of two runs of a unit; units have smaller ones."""


@dataclass(frozen=True)
class Run:
    """Elements of a unit that are treated alike."""

    span: slice
    decays: bool
    trained: bool
    muon: bool = False


def runs(unit: Unit) -> list[Run]:
    """Return the runs of a unit, or of a shard; what fills it up belongs to the last."""

    def kind(piece: Piece) -> tuple[bool, bool, bool]:
        return piece.decays, piece.trained, piece.muon

    present = [piece for piece in unit.pieces if piece.numel]
    kinds = [(key, min(p.offset for p in pieces)) for key, pieces in groupby(present, kind)]
    if not kinds:
        return [Run(slice(0, unit.numel), True, True)]
    starts = [0, *(low for _, low in kinds[1:]), unit.numel]
    return [
        Run(slice(low, high), *key)
        for (key, _), low, high in zip(kinds, starts[:-1], starts[1:], strict=True)
    ]


def updates(
    unit: Unit, gradient: Tensor, state: HostState, adam: AdamStep
) -> Iterator[tuple[Tensor, HostState, AdamStep]]:
    """Yield AdamW's updates of a unit's runs: gradient, state, and settings."""
    found = runs(unit)
    for number, run in enumerate(found):
        own = adam if run.decays else replace(adam, weight_decay=0.0)
        if not run.trained or run.muon:
            continue
        if len(found) == 1:
            yield gradient, state, own
        else:
            yield gradient[run.span], _part(state, run.span, number, unit.matrices), own


def run_sizes(unit: Unit) -> tuple[int, ...]:
    """Return the elements of each of the runs that `updates` yields."""
    spans = [run.span for run in runs(unit) if run.trained and not run.muon]
    return tuple(span.stop - span.start for span in spans)


def _part(state: HostState, span: slice, number: int, matrices: int) -> HostState:
    """A run's part of a state, whose moments begin after the unit's `matrices`."""
    of_moments = slice(span.start - matrices, span.stop - matrices)
    tiles = slice(of_moments.start // TILE, -(-of_moments.stop // TILE))

    def cut(tensor: Tensor | None, at: slice = span) -> Tensor | None:
        return None if tensor is None else tensor[at]

    moments = state.moments
    m = moments.m[of_moments]
    v = moments.v[of_moments]
    scales = (cut(moments.m_scale, tiles), cut(moments.v_scale, tiles))
    part = Moments(moments.kind, m, v, *scales)
    seed = state.seed + number * SEEDS
    return HostState(cut(state.master), cut(state.high), cut(state.low), part, seed)
