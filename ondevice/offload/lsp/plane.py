"""Dense projectors for a moment: those of a layer's matrices, scattered into one memory that all layers share, so that
tensor cores can multiply by them. What is stored stays d values and positions a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.lsp.descent import Descents

if TYPE_CHECKING:
    from ondevice.offload.graphs import Record
    from ondevice.offload.lsp.matrix import Matrix
    from ondevice.offload.lsp.projector import Projector

Pair = tuple[Tensor | None, Tensor | None]
"""Dense projectors of rows and columns, [rows, s]; None for the identity."""


class Plane:
    """Memory for the dense projectors of one group of matrices at a time, shared by all groups; one for each dtype.
    And `descents`, memory that all learn in.

    Args:
        record: makes graphs of the learning.
    """

    def __init__(self, record: Record | None = None) -> None:
        self.descents = Descents(record)
        self.memory: dict[torch.dtype, Tensor] = {}
        self.shown: dict[torch.dtype, Group] = {}

    def room(self, group: Group, dtype: torch.dtype) -> Tensor:
        """Memory for the group's dense projectors."""
        memory = self.memory.get(dtype)
        if memory is None or memory.numel() < group.numel or memory.device != group.device:
            memory = self.memory[dtype] = torch.empty(group.numel, dtype=dtype, device=group.device)
        return memory

    def show(self, group: Group, dtype: torch.dtype) -> Tensor:
        """The group's dense projectors, flat, in `dtype`; made anew only if another group's were there."""
        if self.shown.get(dtype) is not group or dtype not in self.memory:
            self.fill(group, dtype)
        return self.memory[dtype]

    def fill(self, group: Group, dtype: torch.dtype) -> None:
        """Make them."""
        self.room(group, dtype)[: group.numel].zero_().scatter_(0, *group.flat(dtype))
        self.shown[dtype] = group


class Group:
    """Matrices whose projectors are made dense together: those of a layer, for one kernel instead of many."""

    def __init__(self, plane: Plane, device: torch.device | str) -> None:
        self.plane, self.device = plane, torch.empty(0, device=device).device  # with its index, as tensors have
        self.members: list[Matrix] = []
        self.known: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self.views: dict[torch.dtype, tuple[Tensor, list[Pair]]] = {}
        self.numel = 0

    def add(self, matrix: Matrix) -> tuple[int, int]:
        """Where the matrix's dense projectors begin."""
        self.members.append(matrix)
        start, middle = self.numel, self.numel + matrix.left.rows * matrix.left.size * (not matrix.left.exact)
        self.numel = middle + matrix.right.rows * matrix.right.size * (not matrix.right.exact)
        return start, middle

    def pairs(self, dtype: torch.dtype) -> list[Pair]:
        """The members' dense projectors, [rows, s], in memory that is shared; None for the identity."""
        if not self.numel:
            return [(None, None)] * len(self.members)
        memory = self.plane.show(self, dtype)
        if dtype not in self.views or self.views[dtype][0] is not memory:
            found: list[Pair] = []
            for matrix in self.members:
                sides = zip(matrix.starts, (matrix.left, matrix.right), strict=True)
                pair = [None if p.exact else memory[at : at + p.rows * p.size].view(p.rows, p.size) for at, p in sides]
                found.append((pair[0], pair[1]))
            self.views[dtype] = memory, found
        return self.views[dtype][1]

    def changed(self, matrix: Matrix) -> None:
        """A member has other projectors of the same shape."""
        low = 0
        for member in self.members:
            for start, side in zip(member.starts, (member.left, member.right), strict=True):
                if side.positions is None or side.values is None:
                    continue
                span = slice(low, low := low + side.positions.numel())
                for dtype, (positions, values) in self.known.items() if member is matrix else ():
                    positions[span].copy_(self._places(start, side, side.positions))
                    values[span].copy_(side.values.view(-1))
                    if self.plane.shown.get(dtype) is self:
                        own = self.plane.memory[dtype][start : start + side.rows * side.size]
                        own.zero_().scatter_(0, positions[span] - start, values[span])

    def flat(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions, int64, and values of all members in the plane."""
        if dtype not in self.known:
            positions, values = [], []
            for matrix in self.members:
                for start, side in zip(matrix.starts, (matrix.left, matrix.right), strict=True):
                    if side.positions is not None and side.values is not None:
                        positions.append(self._places(start, side, side.positions))
                        values.append(side.values.to(dtype).view(-1))
            self.known[dtype] = torch.cat(positions), torch.cat(values)
        return self.known[dtype]

    def _places(self, start: int, side: Projector, positions: Tensor) -> Tensor:
        return (
            torch.arange(start, start + side.rows * side.size, side.size, device=self.device)[:, None] + positions
        ).view(-1)
