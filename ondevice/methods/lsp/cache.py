"""The weight cache of the passes for frozen weights with changes: see `offload.passes.WeightCache`.

A layer's weights, base plus changes, are made in one of a few slots when the layer is computed. Its
gradient in the subspace is collected during the layer's backward pass, and leaves together with the
gradients of its norms and biases. A layer without projections is used in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.gradients import square
from ondevice.offload.transfers import Slot

if TYPE_CHECKING:
    from ondevice.methods.lsp.bases import Base
    from ondevice.methods.lsp.config import LspConfig
    from ondevice.methods.lsp.projected import ProjectedUnit
    from ondevice.methods.lsp.updates import Updates
    from ondevice.offload.device import Device, Event
    from ondevice.offload.graphs import Compute, Graphs
    from ondevice.offload.units import Piece, Unit, Units


class ProjectedWeightCache:
    """Slots for layers and for the head's weights, and gradients; see `WeightCache` for what
    `Passes` asks of it."""

    def __init__(
        self, units: Units, parts: list[ProjectedUnit], base: Base | None, tables: dict[int, Tensor],
        exact: dict[int, Tensor], config: LspConfig, device: Device, dtype: torch.dtype, updates: Updates,
        graphs: Graphs,
    ) -> None:  # fmt: skip
        self.units = units
        self.parts = parts
        self.base = base
        self.tables = tables
        self.device = device
        self.dtype = dtype
        self.updates = updates
        self.config = config
        self.exact = exact
        self.graphs = graphs
        layers = [parts[unit.index] for unit in units.layers]
        if base is None:
            self.layers = [Slot(self.exact[part.unit.index]) for part in layers]
        else:
            largest = max(part.unit.numel for part in layers)
            count = min(config.window, len(layers))
            self.layers = [Slot(device.empty(largest, dtype)) for _ in range(count)]
        self.loaded: list[int | None] = [None] * len(self.layers)
        self.gradients = [
            self._slot(layers) for _ in range(min(config.gradient_buffers, len(layers)))
        ]
        self.rest = Slot(self.exact[units.rest.index])
        self.rest_gradient = self._slot([parts[units.rest.index]])
        vocabulary, self.width = units.head.pieces[0].shape
        self.tiles = [(0, vocabulary)]
        numel = vocabulary * self.width
        self.table = {
            index: self._slot([parts[index]]) for index in {units.embedding.index, units.head.index}
        }
        self.head = Slot(device.empty(numel if base is not None else 0, dtype))
        self.head_gradient = Slot(device.empty(max(numel, parts[units.head.index].numel), dtype))
        self.head_table = self.head_gradient.memory[:numel].view(-1, self.width)
        self.entering: Slot | None = None
        self.views: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}

    def _slot(self, parts: list[ProjectedUnit]) -> Slot:
        return Slot(self.device.empty(max(part.numel for part in parts), self.dtype))

    def resolve(self, part: ProjectedUnit) -> None:
        """Apply the update of the part's last gradient, if any; the computations that follow see
        it."""
        now = self.updates.wait(part, self.exact[part.unit.index])
        if now is None:
            return
        rate = now.adam.learning_rate
        decay = 1 - rate * now.adam.weight_decay
        part.decay_by(decay)
        if part.narrow:
            part.change.mul_(decay).add_(
                self.updates.arrivals[part.unit.index][: part.narrow], alpha=rate
            )
            for older in part.older.values():
                for old in older:
                    old.change.mul_(decay)

    def forget_layers(self) -> None:
        self.loaded = [None] * len(self.layers)

    def fetch_layer(self, i: int) -> None:
        """Ask for the base of layer `i`, if it is on the host."""
        at = i % len(self.layers)
        if self.base is not None and self.loaded[at] != i:
            self.base.fetch(self.units.layers[i], self.layers[at])

    def layer(self, i: int) -> Slot:
        """Return layer `i` as it is computed with."""
        at = i % len(self.layers)
        unit = self.units.layers[i]
        slot = self.layers[at]
        part = self.parts[unit.index]
        base = self.base
        self.resolve(part)
        if base is None or not part.matrices:
            return slot
        group = part.matrices[0][1].group
        if self.loaded[at] == i:
            group.plane.show(group, self.dtype)
            return slot
        self.loaded[at] = i

        def make() -> tuple[Tensor, ...]:
            group.plane.fill(group, self.dtype)
            source = base.source(unit, slot)
            change = part.change.to(self.dtype)
            for piece, matrix, offset in part.matrices:
                own = part.changes(matrix, offset, change)
                part.effective(
                    matrix, own, self._view(source, piece), self._view(slot.memory, piece)
                )
            return ()

        state = None
        if base.stays and not part.older:
            factors = (matrix.gain for _, matrix, _ in part.matrices)
            flat = (x.data_ptr() for x in group.flat(self.dtype))
            state = (*self.places(i, None), *factors, *flat)
        self.graphs.run(("make", i), state, (), make)
        group.plane.shown[self.dtype] = group
        return slot

    def run(
        self, kind: str, i: int, leaving: Slot | None, position: tuple[Tensor, ...], inputs: tuple[Tensor, ...],
        compute: Compute,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run `compute(*inputs)` of layer `i`, which is bound, as a graph if it has one."""
        state = (*self.places(i, leaving), *(x.data_ptr() for x in position))
        return self.graphs.run((kind, i), state, inputs, compute)

    def places(self, i: int, leaving: Slot | None) -> tuple[int, ...]:
        """Return the addresses of memory that layer `i` uses; `leaving` is for its gradient."""
        part = self.parts[self.units.layers[i].index]
        memory = [self.layers[i % len(self.layers)].memory, self.exact[part.unit.index]]
        if leaving is not None:
            memory.append(leaving.memory)
        if part.matrices:
            group = part.matrices[0][1].group
            memory.append(group.plane.room(group, self.dtype))
        return tuple(x.data_ptr() for x in memory)

    def bind(self, unit: Unit, slot: Slot, gradient: Slot | None = None) -> None:
        """Let the model's parameters of `unit` be what `slot` holds; exact ones have their
        gradients in `gradient`."""
        part = self.parts[unit.index]
        for piece, _, _ in part.matrices:
            piece.parameter.data = self._view(slot.memory, piece)
            piece.parameter.requires_grad_(False)
        for piece in part.exact.pieces:
            piece.parameter.grad = None
            piece.parameter.data = self._view(self.exact[unit.index], piece)
            piece.parameter.requires_grad_(gradient is not None)
            if gradient is not None:
                piece.parameter.grad = self._view(gradient.memory, piece, part.start)

    def fetch_rest(self) -> None:
        return

    def fetch_head(self, tile: int) -> None:
        return

    def arrive(self, slot: Slot) -> Slot:
        """Wait until the gradients in `slot` have left and, for the rest, its update is there."""
        if slot is self.rest:
            self.resolve(self.parts[self.units.rest.index])
        if slot.task is not None:
            slot.task.wait()  # its thread has waited for the copy, so nothing has to on the accelerator
            slot.task = None
        return slot

    def head_tile(self, tile: int) -> tuple[Slot, Tensor]:
        """Return the whole head: [vocabulary, hidden]."""
        table = self.parts[self.units.head.index]
        self.resolve(table)
        if self.base is None or not table.matrices:
            return self.head, self._exact_table(table)
        out = self.head.memory.view(-1, self.width)
        (_, matrix, offset) = table.matrices[0]
        change = table.changes(matrix, offset).to(self.dtype)
        return self.head, table.effective(matrix, change, self._table(table), out)

    def head_gradient_tile(self, tile: int) -> tuple[Slot, Tensor]:
        """Return zeroed memory for the head's gradient."""
        slot = self.arrive(self.head_gradient)
        slot.memory.zero_()
        return slot, self.head_table

    def layer_gradient(self, i: int) -> Slot:
        """Return zeroed memory for what layer `i` sends."""
        slot = self.gradients[i % len(self.gradients)]
        self._begin(self.parts[self.units.layers[i].index], slot)
        return slot

    def send_layer(self, i: int, slot: Slot) -> None:
        self._send(self.parts[self.units.layers[i].index], slot)

    def send_rest(self) -> None:
        self._send(self.parts[self.units.rest.index], self.rest_gradient)

    def send_head(self, tile: int, slot: Slot) -> None:
        """Send the head's gradient; a tied one waits for the embedding's."""
        if not self.units.tied:
            self._send_table(self.parts[self.units.head.index], slot)

    def fetch_rows(self, rows: Tensor, most: int) -> Slot:
        """Return rows of the embedding, int64 [R], at most `most`: [R, hidden]."""
        part = self.parts[self.units.embedding.index]
        width = self.width
        self.resolve(part)
        if self.entering is None or self.entering.memory.numel() < most * width:
            self.entering = Slot(self.device.empty(most * width, self.dtype))
        at = self._rows(rows)
        out = self.entering.memory[: rows.numel() * width].view(-1, width)
        if part.matrices:
            _, matrix, offset = part.matrices[0]
            change = part.changes(matrix, offset).to(self.dtype)
            table = self._table(part)
            out.copy_(matrix.effective_rows(table[at], at, change, part.decay))
        else:
            out.copy_(self._exact_table(part)[at])
        return self.entering

    def send_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Send the embedding's gradient: int64 [R], [R, hidden]."""
        part = self.parts[self.units.embedding.index]
        at = self._rows(rows)
        if self.units.tied:
            self.head_table.index_add_(0, at, gradient)
            self._send_table(part, self.head_gradient)
            return
        leaving = self.table[part.unit.index]
        self._begin(part, leaving)
        if part.matrices:
            part.matrices[0][1].collect_rows(at, gradient)
        else:
            leaving.memory.view(-1, self.width).index_add_(0, at, gradient)
        self._send(part, leaving)

    def all_reduce_total(self, total: Tensor, host: Tensor) -> Callable[[], Event]:
        """Let the loss leave."""
        event = self.updates.transfers.all_reduce(total, host, self.device.record("compute"))
        return lambda: event

    def _exact_table(self, part: ProjectedUnit) -> Tensor:
        """A table that is trained as it is: [vocabulary, hidden]."""
        return self.exact[part.unit.index][: part.unit.numel].view(-1, self.width)

    def _table(self, part: ProjectedUnit) -> Tensor:
        """The base of a projected table: [vocabulary, hidden]."""
        return self.tables[part.unit.index].view(-1, self.width)

    def _send_table(self, part: ProjectedUnit, gradient: Slot) -> None:
        """Send the gradient of a table, projected if its matrix is."""
        leaving = self.table[part.unit.index]
        if part.matrices:
            self._begin(part, leaving)
            part.matrices[0][1].collect_whole(self.head_table)
        self._send(part, leaving if part.matrices else gradient)

    def _begin(self, part: ProjectedUnit, slot: Slot) -> None:
        self.arrive(slot).memory.zero_()
        for _, matrix, offset in part.matrices:
            matrix.gradient = slot.memory[offset : offset + matrix.numel].view(matrix.sizes)

    def _send(self, part: ProjectedUnit, slot: Slot) -> None:
        clipped = self.config.max_grad_norm is not None and self.updates.ranks.single
        norm = None
        if clipped:
            norm = square(slot.memory[: part.numel])
        self.updates.send(part, slot, self.exact[part.unit.index], norm)

    def _view(self, memory: Tensor, piece: Piece, start: int = 0) -> Tensor:
        """`view`, of memory that stays: made once."""
        key = memory.data_ptr(), start + piece.offset, piece.shape
        if key not in self.views:
            self.views[key] = view(memory[start:], piece)
        return self.views[key]

    def _rows(self, rows: Tensor) -> Tensor:
        return rows.to(self.head_gradient.memory.device, non_blocking=True)


def view(memory: Tensor, piece: Piece) -> Tensor:
    """Return a parameter in the flat memory of its unit."""
    return memory[piece.offset : piece.offset + piece.numel].view(piece.shape)
