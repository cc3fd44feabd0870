"""ZeRO's partition (Rajbhandari et al. 2020, section 5): each rank's contiguous share of every unit.

All shares of a unit are equally long, so that one all-gather or reduce-scatter moves them; the last ones reach beyond
its end where it does not divide, and hold zeros there. A share begins at a multiple of 128 elements, so that moments in
8 bits have the same scales whatever the number of ranks, and a table's at a row.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import CheckpointError
from ondevice.offload.units import ALIGN, Unit
from ondevice.runtime_ops.layer_adam import TILE

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
        pieces.append(
            replace(piece, shape=shape, offset=offset, numel=count, start=first - piece.offset)
        )
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


def extent(part: str, unit: Unit) -> tuple[int, int, int]:
    """Return of an array of a unit's state the first element that a share has, how many it has, and how many there
    are; scales of moments are one for 128 elements."""
    each = TILE if part.endswith("_scale") else 1
    return -(-unit.low // each), -(-unit.here // each), -(-unit.total // each)


def array_name(part: str, unit: Unit) -> str:
    """Return the name of an array in a checkpoint: `high/layer.3`, and of a share `high/layer.3@first:last:all`."""
    if not unit.of:
        return f"{part}/{unit.key}"
    first, count, size = extent(part, unit)
    return f"{part}/{unit.key}@{first}:{first + count}:{size}"


def unit_key(name: str) -> str:
    """Return `Unit.key` of an array's name."""
    return name.partition("/")[2].partition("@")[0]


class Joined:
    """Arrays by name out of those of a checkpoint, which may be in shares of any number of ranks."""

    def __init__(self, arrays: Any) -> None:
        self.whole: dict[str, Any] = {}
        for name, value in arrays.items():
            base, _, span = name.partition("@")
            if span:
                first, last, size = (int(word) for word in span.split(":"))
                self.whole.setdefault(base, Pieces(base, size)).add(first, last, value)
            else:
                self.whole[name] = value

    def get(self, name: str, /) -> Any:
        """Return an array, or what is sliced like one; None where there is none."""
        return self.whole.get(name)


class Pieces:
    """One array in pieces; only what is asked for is put together."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.shape, self.pieces = name, (size,), dict[int, tuple[int, np.ndarray]]()

    @property
    def dtype(self) -> Any:
        return next(iter(self.pieces.values()))[1].dtype

    def add(self, first: int, last: int, value: np.ndarray) -> None:
        """Add elements `first` to `last`, exclusive."""
        self.pieces[first] = last, value

    def __getitem__(self, span: slice) -> np.ndarray:
        found, at = [], span.start
        for first, (last, value) in sorted(self.pieces.items()):
            if first <= at < min(last, span.stop):
                found.append(value[at - first : span.stop - first])
                at = min(last, span.stop)
        if at < span.stop:
            raise CheckpointError(
                f"the checkpoint lacks a part of {self.name}",
                expected=f"element {at}",
                hint="take an older checkpoint",
            )
        return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, self.dtype), *found])
