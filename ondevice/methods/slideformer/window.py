"""The accelerator's units (SlideFormer section 3.2: pre-allocated cache units) and the thread that fills and empties
them.

Layer i lives in unit i modulo the window, in the forward as in the backward pass, so the layers that end the forward
pass are still there when the backward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.transfers import Slot, Transfers, square

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.methods.slideformer.store import TieredStore
    from ondevice.methods.slideformer.updater import Updater
    from ondevice.offload.device import Device, Event
    from ondevice.offload.graphs import Compute
    from ondevice.offload.report import Timeline
    from ondevice.offload.units import Unit, Units
    from ondevice.offload.worker import Task, Worker


def bind(unit: Unit, memory: Tensor, gradient: Tensor | None = None) -> None:
    """Let the model's parameters of `unit` be views of `memory`, and their gradients of `gradient`."""
    for piece in unit.pieces:
        span = slice(piece.offset, piece.offset + piece.numel)
        piece.parameter.grad = None
        piece.parameter.data = memory[span].view(piece.shape)
        piece.parameter.requires_grad_(gradient is not None)
        if gradient is not None:
            piece.parameter.grad = gradient[span].view(piece.shape)


class Window:
    """Cache units for layers, for the head and for the rest, each with its gradients, all made once."""

    def __init__(
        self,
        units: Units,
        store: TieredStore,
        config: SlideformerConfig,
        device: Device,
        timeline: Timeline,
        worker: Worker,
        updater: Updater,
    ) -> None:
        self.units, self.store, self.updater, self.device = units, store, updater, device
        self.worker, self.ranks = worker, store.ranks
        self.dtype = dtype = store.dtype
        self.transfers = Transfers(device, timeline, store.ranks)
        largest = max(unit.numel for unit in units.layers)
        kept = store.resident
        self.kept_layers = sum(unit.kind == "layer" for unit in kept.units)
        slots = min(config.slots, max(1, len(units.layers) - self.kept_layers))
        self.layers = [Slot(device.empty(largest, dtype)) for _ in range(slots)]
        self.gradients = [Slot(device.empty(largest, dtype)) for _ in range(2)]
        self.resident = {unit.index: Slot(kept.memory(unit)) for unit in kept.units}
        self.rest = Slot(device.empty(units.rest.numel, dtype))
        self.rest_gradient = Slot(device.empty(units.rest.numel, dtype))
        vocabulary, self.width = units.head.pieces[0].shape
        self.rows = -(-vocabulary // config.loss_tiles)
        self.tiles = [(low, min(low + self.rows, vocabulary)) for low in range(0, vocabulary, self.rows)]
        count = min(2, len(self.tiles)) if units.head not in kept else 0
        self.head = [Slot(device.empty(self.rows * self.width, dtype)) for _ in range(count)]
        gradients = min(2, len(self.tiles))
        self.head_gradient = [Slot(device.empty(self.rows * self.width, dtype)) for _ in range(gradients)]
        scattered = units.embedding.numel if units.embedding in kept and not units.tied else 0
        self.embedding_gradient = device.empty(scattered, dtype)
        self.loaded: list[int | None] = [None] * len(self.layers)
        self.norms = device.pinned(len(units.all) + len(self.tiles), torch.float32)
        self.clipping = config.max_grad_norm is not None
        self.leaving: Task | None = None
        self.entering: Slot | None = None
        self.rows_in, self.rows_out = (device.pinned(0, dtype) for _ in range(2))

    @property
    def bytes(self) -> int:
        """Host memory for the embedding's rows, in and out."""
        return sum(t.numel() * t.element_size() for t in (self.rows_in, self.rows_out))

    def bind(self, unit: Unit, slot: Slot, gradient: Slot | None = None) -> None:
        """Let the model's parameters of `unit` be what `slot` holds."""
        bind(unit, slot.memory, None if gradient is None else gradient.memory)

    def fetch_layer(self, i: int) -> None:
        """Ask for layer `i`, unless its unit holds it."""
        at = i % len(self.layers)
        if i >= self.kept_layers and self.loaded[at] != i:
            self.loaded[at] = i
            self._fetch(self.units.layers[i], self.layers[at], slice(0, self.units.layers[i].numel))

    def forget_layers(self) -> None:
        """Forget which layers the slots hold: the layers are updated between two steps."""
        self.loaded = [None] * len(self.layers)

    def layer(self, i: int) -> Slot:
        """Return the unit of layer `i`; computations that follow run once it is there."""
        unit = self.units.layers[i]
        return self.resident.get(unit.index) or self.arrive(self.layers[i % len(self.layers)])

    def fetch_rest(self) -> None:
        self._fetch(self.units.rest, self.rest, slice(0, self.units.rest.numel))

    def fetch_head(self, tile: int) -> None:
        """Ask for a tile of the output head."""
        if self.units.head.index in self.resident:
            return
        low, high = self.tiles[tile]
        span = slice(low * self.width, high * self.width)
        self._fetch(self.units.head, self.head[tile % len(self.head)], span)

    def head_tile(self, tile: int) -> tuple[Slot, Tensor]:
        """Return the unit of that tile, and its weight [rows, hidden]."""
        low, high = self.tiles[tile]
        slot = self.resident.get(self.units.head.index) or self.arrive(self.head[tile % len(self.head)])
        return slot, slot.memory[: (high - low) * self.width].view(-1, self.width)

    def head_gradient_tile(self, tile: int) -> tuple[Slot, Tensor]:
        """Return zeroed memory for the gradient of that tile, [rows, hidden]."""
        low, high = self.tiles[tile]
        slot = self.arrive(self.head_gradient[tile % len(self.head_gradient)])
        return slot, slot.memory[: (high - low) * self.width].zero_().view(-1, self.width)

    def run(
        self, kind: str, i: int, leaving: Slot | None, position: tuple[Tensor, ...], inputs: tuple[Tensor, ...],
        compute: Compute,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run `compute(*inputs)` of layer `i`."""
        return compute(*inputs)

    def layer_gradient(self, i: int) -> Slot:
        """Return zeroed memory for a layer's gradients, once the one before it has left."""
        slot = self.arrive(self.gradients[i % 2])
        slot.memory.zero_()
        return slot

    def send_layer(self, i: int, slot: Slot) -> None:
        """Let the gradients of layer `i` leave, then update it; or update it where it is."""
        unit = self.units.layers[i]
        norm = self._norm(unit.index, slot.memory[: unit.numel])
        if unit.index in self.resident:
            self._update_here(unit, slot, norm)
            return
        computed = self.device.record("compute")  # after the norm, which leaves with the gradients

        def run() -> Event:
            if not self.ranks.owns(unit):
                return self.transfers.to_host(unit, None, slot.memory[: unit.numel], computed)
            buffer = self.updater.pool.borrow(f"waiting for host memory for the gradients of {unit.name}")
            event = self.transfers.to_host(unit, buffer[: unit.numel], slot.memory[: unit.numel], computed, norm)
            self.updater.submit(unit, buffer, event, None if norm is None else norm[1], pooled=True)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def _update_here(self, unit: Unit, slot: Slot, norm: tuple[Tensor | None, Tensor] | None) -> None:
        started, scale = self.device.record("compute"), None
        if norm is not None and norm[0] is not None:
            scale = self.updater.clipping.scale(norm[0])
        adam, threads = self.updater.clipping.now.adam, self.updater.threads
        self.store.resident.update(unit, slot.memory[: unit.numel], adam, scale, threads)
        computed = self.device.record("compute")
        self.transfers.timeline.span("backward", f"{unit.name} update", started, computed)
        if norm is None or norm[0] is None:
            return
        square, target = norm[0], norm[1]

        def run() -> Event:
            self.device.hold("d2h", computed)
            self.device.copy("d2h", target, square)
            event = self.device.record("d2h")
            self.updater.submit_norm(unit, event, target)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def send_rest(self) -> None:
        """Send the same for what belongs to no layer."""
        unit, slot = self.units.rest, self.rest_gradient
        norm = self._norm(unit.index, slot.memory)
        computed = self.device.record("compute")

        def run() -> Event:
            if not self.ranks.owns(unit):
                return self.transfers.to_host(unit, None, slot.memory, computed)
            self.updater.wait(unit)
            event = self.transfers.to_host(unit, self.updater.rest, slot.memory, computed, norm)
            self.updater.submit(unit, self.updater.rest, event, None if norm is None else norm[1], pooled=False)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def send_head(self, tile: int, slot: Slot) -> None:
        """Send the same for a tile of the head; the update follows the last one, or for a tied head the embedding."""
        unit = self.units.head
        if unit.index in self.resident:
            if not self.units.tied:  # else once the embedding's rows are in it
                self._update_here(unit, slot, None)
            return
        low, high = (bound * self.width for bound in self.tiles[tile])
        memory = slot.memory[: high - low]
        norm = None if self.units.tied else self._norm(len(self.units.all) + tile, memory)
        computed = self.device.record("compute")

        def run() -> Event:
            if not self.ranks.owns(unit):
                return self.transfers.to_host(unit, None, memory, computed)
            self.updater.wait(unit)
            event = self.transfers.to_host(unit, self.updater.table[low:high], memory, computed, norm)
            if tile == len(self.tiles) - 1 and not self.units.tied:
                total = self.norms[len(self.units.all) :] if self.clipping else None
                self.updater.submit(unit, self.updater.table, event, total, pooled=False)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def send_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Let the embedding's gradient go to its owner: int64 [R], [R, hidden]; or update it where it is."""
        if self.units.embedding.index in self.resident:
            self._update_embedding(rows, gradient)
            return
        host = None
        if self.ranks.owns(self.units.embedding):
            if self.rows_out.numel() < gradient.numel():
                self.rows_out = self.device.pinned(gradient.numel(), self.dtype)
            host = self.rows_out[: gradient.numel()].view(gradient.shape)
        unit, computed = self.units.embedding, self.device.record("compute")

        def run() -> None:
            if host is not None and not self.units.tied:
                self.updater.wait(unit)
            event = self.transfers.to_host(unit, host, gradient, computed)
            if host is not None:
                self.updater.submit_rows(rows, host, event)

        self.leaving = self.worker.submit(unit.name, run)  # keeps the rows until they have left

    def _update_embedding(self, rows: Tensor, gradient: Tensor) -> None:
        unit, at = self.units.embedding, self._upload(rows)
        memory = self.head_gradient[0].memory if self.units.tied else self.embedding_gradient
        table = memory[: unit.numel].view(-1, self.width)
        table.index_copy_(0, at, table[at] + gradient if self.units.tied else gradient)
        self._update_here(unit, Slot(memory), None)
        if not self.units.tied:
            table.index_fill_(0, at, 0.0)

    def _upload(self, rows: Tensor) -> Tensor:
        """int64 [R] to the accelerator without waiting for what it computes."""
        if self.device.type == "cpu":
            return rows
        return rows.pin_memory().to(self.head_gradient[0].memory.device, non_blocking=True)

    def _fetch(self, unit: Unit, slot: Slot, span: slice) -> None:
        used = slot.used
        if self.updater.idle(unit):
            self.store.prefetch(unit)

        def run() -> Event:
            source = None
            if self.ranks.owns(unit):
                self.updater.wait(unit)
                source = self.store.outgoing(unit, span)
            event = self.transfers.to_device(unit, slot.memory[: span.stop - span.start], source, used)
            if source is not None:
                self.store.sent(event)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def fetch_rows(self, rows: Tensor, most: int) -> Slot:
        """Return rows of the embedding for all ranks: int64 [R], at most `most`; its owner reads them once they are
        updated."""
        unit, width = self.units.embedding, self.units.embedding.pieces[0].shape[1]
        if unit.index in self.resident:
            table = self.resident[unit.index].memory[: unit.numel].view(-1, width)
            return Slot(table[self._upload(rows)].view(-1))
        updated, host, size = self.updater.read_rows(rows), None, rows.numel() * width
        if self.ranks.owns(unit):
            if self.rows_in.numel() < size:
                self.rows_in = self.device.pinned(size, self.dtype)
            host = self.rows_in[:size].view(-1, width)
        if self.entering is None or self.entering.memory.numel() < most * width:
            self.entering = Slot(self.device.empty(most * width, self.store.dtype))
        slot, target = self.entering, self.entering.memory[: len(rows) * width].view(-1, width)
        target_free = self.device.record("compute")

        def run() -> Event:
            if updated is not None:
                updated.wait()
            if host is not None:
                self.store.rows(unit, rows, host)
            return self.transfers.to_device(unit, target, host, target_free)

        slot.task = self.worker.submit(unit.name, run)
        return slot

    def all_reduce_total(self, total: Tensor, host: Tensor) -> Callable[[], Event]:
        """Let the loss leave, summed over the ranks; the result gives the event after which it is in `host`."""
        computed = self.device.record("compute")
        return self.worker.submit("the loss", lambda: self.transfers.all_reduce(total, host, computed)).wait

    def arrive(self, slot: Slot) -> Slot:
        """Let computations that follow run once what was asked of `slot` is done."""
        if slot.task is not None:
            self.device.hold("compute", slot.task.wait())
            slot.task = None
        return slot

    def _norm(self, index: int, gradient: Tensor) -> tuple[Tensor | None, Tensor] | None:
        """The squared norm, None while the sum over the ranks is still to come, and where it goes on the host."""
        if not self.clipping:
            return None
        return square(gradient) if self.ranks.single else None, self.norms[index : index + 1]
