"""The weight cache of projected layers: see `offload.window.Window`.

Of a layer the wire slides: what the host keeps of it, the changes of its matrices and its other
parameters. Its weights, base plus changes, are made in one of a few slots when the layer is
computed. Its gradient in the subspace is collected during the layer's backward pass, and leaves
together with the gradients of its norms and biases. A layer without projections is used in place.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.offload.transfers import Slot
from ondevice.offload.window import Window

if TYPE_CHECKING:
    from ondevice.methods.lsp.bases import Base
    from ondevice.methods.lsp.projected import ProjectedUnit
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.graphs import Compute, Graphs
    from ondevice.offload.units import Piece, Unit, Units


class ProjectedWindow(Window):
    """`Window` over wires, each in memory of its own, and slots for the weights made of them.

    Args:
        model: the units of the model, and `parts` what crosses the bus of each, by index.
        base: of the layers' weights; None if nothing is projected.
        tables: the weights of projected tables, by index of the unit.
        shared: as for `Window`.
    """

    def __init__(
        self, model: Units, parts: list[ProjectedUnit], base: Base | None,
        tables: dict[int, Tensor], graphs: Graphs, *shared: Any,
    ) -> None:  # fmt: skip
        self.model = model
        self.parts = parts
        self.base = base
        self.tables = tables
        self.graphs = graphs
        super().__init__(*shared)
        self.wires = self.layers
        config: EngineConfig = shared[2]
        if base is not None:
            largest = max(unit.numel for unit in model.layers)
            count = min(config.slots, len(model.layers))
            self.layers = [Slot(self.device.empty(largest, self.dtype)) for _ in range(count)]
        self.made: list[int | None] = [None] * len(self.layers)
        self.fresh: set[int] = set()
        """Wires whose memory has, or is about to have, the host's state."""
        self.lock = threading.Lock()
        self.table_gradients = {
            part.wire.index: Slot(self.device.empty(self.ranks.padded(part.wire), self.dtype))
            for part in parts
            if part.matrices and part.unit.kind != "layer"
        }
        self.views: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}
        self.gathered: Tensor | None = None
        """The gradient of the head's tiles so far, if a check of the bias needs it whole."""

    def _layers(self, config: EngineConfig) -> list[Slot]:
        return [
            Slot(self.device.empty(self.ranks.padded(wire), self.dtype))
            for wire in self.units.layers
        ]

    def _head_unit(self) -> Unit:
        return self.model.head

    def forget_layers(self, tokens: int) -> None:
        self.made = [None] * len(self.layers)

    def fetch_rest(self) -> None:
        """Ask for what belongs to no layer, and for all wires that are not there yet."""
        super().fetch_rest()
        for i in range(len(self.wires)):
            self._fetch_wire(i)

    def fetch_wires(self) -> None:
        """Let all wires be on the accelerator; computations that follow see them."""
        for part in self.parts:
            if part.wire.kind == "layer":
                self._fetch_wire(part.wire.index)
                self.wire(part)

    def fetch_layer(self, i: int) -> None:
        """Ask for the base of layer `i`, if it is on the host."""
        at = i % len(self.layers)
        if self.base is not None and self.made[at] != i:
            self.base.fetch(self.model.layers[i], self.layers[at])

    def _fetch_wire(self, i: int) -> None:
        with self.lock:
            if i in self.fresh:
                return
            self.fresh.add(i)
            self._fetch(self.units.layers[i], self.wires[i])

    def updated(self, i: int) -> None:
        """Send a wire back as soon as it is updated, while layers below are still computed.

        Ranks gather their shards in the order of the passes, and wait for it."""
        if self.ranks.single:
            self._fetch_wire(i)

    def forget_wires(self) -> None:
        """Forget the wires that are there: the host's state is another."""
        self.fresh.clear()

    def wire(self, part: ProjectedUnit) -> Slot:
        """Return the memory of a layer's or projected table's wire; computations that follow run
        once it is there."""
        return self.arrive(self.wires[part.wire.index])

    def layer(self, i: int) -> Slot:
        """Return layer `i` as it is computed with."""
        unit = self.model.layers[i]
        part = self.parts[unit.index]
        at = i % len(self.layers)
        slot = self.layers[at]
        wire = self.wire(part)
        base = self.base
        if base is None or not part.matrices:
            return slot
        group = part.matrices[0][1].group
        if self.made[at] == i:
            group.plane.show(group, self.dtype)
            return slot
        self.made[at] = i

        def make() -> tuple[Tensor, ...]:
            group.plane.fill(group, self.dtype)
            source = base.source(unit, slot)
            for piece, matrix, own in part.matrices:
                out = self._view(slot.memory, piece)
                part.effective(matrix, self._view(wire.memory, own), self._view(source, piece), out)
            return ()

        state = None
        if base.stays and not part.older:
            factors = (matrix.gain for _, matrix, _ in part.matrices)
            flat = (x.data_ptr() for x in group.flat(self.dtype))
            state = (*self._places(i, None), *factors, *flat)
        self.graphs.run(("make", i), state, (), make)
        group.plane.shown[self.dtype] = group
        return slot

    def run(
        self, kind: str, i: int, leaving: Slot | None, position: tuple[Tensor, ...], inputs: tuple[Tensor, ...],
        compute: Compute,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run `compute(*inputs)` of layer `i`, which is bound, as a graph if it has one."""
        state = (*self._places(i, leaving), *(x.data_ptr() for x in position))
        return self.graphs.run((kind, i), state, inputs, compute)

    def _places(self, i: int, leaving: Slot | None) -> tuple[int, ...]:
        """Return the addresses of memory that layer `i` uses; `leaving` is for its gradient."""
        part = self.parts[self.model.layers[i].index]
        memory = [self.layers[i % len(self.layers)].memory, self.wires[i].memory]
        if leaving is not None:
            memory.append(leaving.memory)
        if part.matrices:
            group = part.matrices[0][1].group
            memory.append(group.plane.room(group, self.dtype))
        return tuple(x.data_ptr() for x in memory)

    def bind(self, unit: Unit, slot: Slot, gradient: Slot | None = None) -> None:
        """Let the model's parameters of `unit` be what `slot` holds; exact ones are in the wire,
        and have their gradients in `gradient`."""
        part = self.parts[unit.index]
        if part.wire.kind != "layer":
            super().bind(unit, slot, gradient)
            return
        for piece in part.held:
            piece.parameter.grad = None
            piece.parameter.data = self._view(slot.memory, piece)
            piece.parameter.requires_grad_(gradient is not None and piece.stacked)
        memory = self.wires[part.wire.index].memory
        for piece in part.exact:
            piece.parameter.grad = None
            piece.parameter.data = self._view(memory, piece)
            piece.parameter.requires_grad_(gradient is not None)
            if gradient is not None:
                piece.parameter.grad = self._view(gradient.memory, piece)

    def layer_gradient(self, i: int) -> Slot:
        """Return zeroed memory for what layer `i` sends."""
        slot = super().layer_gradient(i)
        self._collect_in(self.parts[self.model.layers[i].index], slot)
        return slot

    def send_layer(self, i: int, slot: Slot) -> None:
        """Send the gradients of a wire. Once it is updated, its memory is free: its gradients were
        computed before they left."""
        self.fresh.discard(i)
        super().send_layer(i, slot)

    def fetch_head(self, tile: int) -> None:
        if not self._projects(self.model.head):
            super().fetch_head(tile)

    def head_tile(self, tile: int) -> tuple[Slot, Tensor]:
        """Return a tile of the head as it is computed with: [rows, hidden]."""
        if not self._projects(self.model.head):
            return super().head_tile(tile)
        part = self.parts[self.model.head.index]
        wire = self.wire(part)
        slot = self.head[tile % len(self.head)]
        _, matrix, own = part.matrices[0]
        change = self._view(wire.memory, own)
        out = self._tile(slot, tile).view(-1, self.width)
        table = self._table(part)
        if len(self.tiles) == 1:
            return slot, part.effective(matrix, change, table, out)
        rows = self._rows_of(tile)
        base = table[slice(*self.tiles[tile])]
        return slot, out.copy_(matrix.effective_rows(base, rows, change, part.decay))

    def send_head(self, tile: int, slot: Slot) -> None:
        """Send the head's gradient after its last tile; a tied one waits for the embedding's."""
        if not self._projects(self.model.head):
            super().send_head(tile, slot)
            return
        part = self.parts[self.model.head.index]
        matrix = part.matrices[0][1]
        own = self._tile(slot, tile).view(-1, self.width)
        if tile == 0:
            self._begin_table(part)
            if len(self.tiles) == 1:
                self.gathered = own
            elif matrix.watch is not None:
                self.gathered = torch.empty_like(self._table(part))
        if self.gathered is None:
            matrix.collect_rows(self._rows_of(tile), own)
        elif len(self.tiles) > 1:
            self.gathered[slice(*self.tiles[tile])] = own
        if tile == len(self.tiles) - 1 and not self.model.tied:
            self._send_table(part)

    def fetch_rows(self, rows: Tensor, most: int) -> Slot:
        """Return rows of the embedding, int64 [R], at most `most`: [R, hidden]."""
        if not self._projects(self.model.embedding):
            return super().fetch_rows(rows, most)
        part = self.parts[self.model.embedding.index]
        self._fetch_wire(part.wire.index)
        wire = self.wire(part)
        if self.entering is None or self.entering.memory.numel() < most * self.width:
            self.entering = Slot(self.device.empty(most * self.width, self.dtype))
        at = self._upload(rows)
        out = self.entering.memory[: rows.numel() * self.width].view(-1, self.width)
        _, matrix, own = part.matrices[0]
        change = self._view(wire.memory, own)
        out.copy_(matrix.effective_rows(self._table(part)[at], at, change, part.decay))
        return self.entering

    def send_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Send the embedding's gradient: int64 [R], [R, hidden]."""
        if not self._projects(self.model.embedding):
            super().send_rows(rows, gradient)
            return
        part = self.parts[self.model.embedding.index]
        at = self._upload(rows)
        if not self.model.tied:
            self._begin_table(part)
        if self.gathered is None:
            part.matrices[0][1].collect_rows(at, gradient)
        else:
            self.gathered.index_add_(0, at, gradient)
        self._send_table(part)

    def _projects(self, unit: Unit) -> bool:
        return bool(self.parts[unit.index].matrices)

    def _table(self, part: ProjectedUnit) -> Tensor:
        """The base of a projected table: [vocabulary, hidden]."""
        return self.tables[part.unit.index].view(-1, self.width)

    def _rows_of(self, tile: int) -> Tensor:
        """Return the numbers of a tile's rows, int64, on the accelerator."""
        return torch.arange(*self.tiles[tile], device=self.head[0].memory.device)

    def _send_table(self, part: ProjectedUnit) -> None:
        """Send the gradient of a table; project it first if it was gathered."""
        if self.gathered is not None:
            part.matrices[0][1].collect_whole(self.gathered)
            self.gathered = None
        self.send_layer(part.wire.index, self.table_gradients[part.wire.index])

    def _begin_table(self, part: ProjectedUnit) -> None:
        leaving = self.arrive(self.table_gradients[part.wire.index])
        leaving.memory.zero_()
        self._collect_in(part, leaving)

    def _collect_in(self, part: ProjectedUnit, slot: Slot) -> None:
        for _, matrix, own in part.matrices:
            matrix.gradient = slot.memory[own.offset : own.offset + own.numel].view(own.shape)

    def _view(self, memory: Tensor, piece: Piece) -> Tensor:
        """`view`, of memory that stays: made once."""
        key = memory.data_ptr(), piece.offset, piece.shape
        if key not in self.views:
            self.views[key] = view(memory, piece)
        return self.views[key]


def view(memory: Tensor, piece: Piece) -> Tensor:
    """Return a parameter in the flat memory of its unit."""
    return memory[piece.offset : piece.offset + piece.numel].view(piece.shape)
