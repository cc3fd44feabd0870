"""ZeRO's partition (Rajbhandari et al. 2020, section 5): each rank's contiguous share of every unit.

All shares of a unit are equally long, so that one all-gather or reduce-scatter moves them; the last ones reach beyond
its end where it does not divide, and hold zeros there. A share begins at a multiple of 128 elements, so that moments in
8 bits have the same scales whatever the number of ranks, and a table's at a row.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from ondevice.offload.units import ALIGN, Unit

TABLES = ("embedding", "head")


def length(unit: Unit, world: int) -> int:
    """Return the elements of each rank's share."""
    if world == 1:
        return unit.numel
    step = ALIGN
    if unit.kind in TABLES:
        width = unit.pieces[0].shape[1]
        step = ALIGN * width // gcd(ALIGN, width)
    return -(-unit.numel // (world * step)) * step


def share(unit: Unit, rank: int, world: int) -> Unit:
    """Return the share of one rank as a unit of its own; of a table, a table of fewer rows, which may be none."""
    if world == 1:
        return unit
    size = length(unit, world)
    low, pieces = rank * size, []
    for piece in unit.pieces:
        first = min(max(piece.offset, low), piece.offset + piece.numel)
        count = max(0, min(piece.offset + piece.numel, low + size) - first)
        if unit.kind in TABLES:
            width = piece.shape[1]
            shape: tuple[int, ...] = (count // width, width)
        elif count:
            shape = (count,)
        else:
            continue
        offset = first - low if count else 0
        pieces.append(replace(piece, shape=shape, offset=offset, numel=count, start=first - piece.offset))
    return replace(unit, pieces=tuple(pieces), numel=size, low=low, of=unit.numel)


def bounds(unit: Unit, world: int, span: slice | None = None) -> tuple[int, ...]:
    """Return where the ranks' shares begin, and where the last one ends: `world + 1` elements.

    Args:
        span: only these elements of the unit are meant, and counted from the first of them; None: all, and what fills
            up the last shares.
    """
    size = length(unit, world)
    if span is None:
        return tuple(rank * size for rank in range(world + 1))
    inside = (min(max(rank * size, span.start), span.stop) - span.start for rank in range(world))
    return (*inside, span.stop - span.start)


def row_bounds(unit: Unit, world: int, rows: Tensor) -> tuple[int, ...]:
    """Return the same for rows of a table, int64 [R] ascending: where in `rows` the ranks' own begin."""
    if world == 1:
        return (0, len(rows))
    firsts = torch.arange(world) * (length(unit, world) // unit.pieces[0].shape[1])
    return (*torch.searchsorted(rows, firsts).tolist(), len(rows))
