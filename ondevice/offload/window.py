"""The accelerator's cache units (SlideFormer section 3.2), and the thread that fills and empties
them.

Layer i lives in unit i modulo the window, in the forward as in the backward pass, so the layers
that end the forward pass are still there when the backward pass begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.gradients import square
from ondevice.offload.transfers import Slot, Transfers

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Device, Event, Timeline
    from ondevice.offload.graphs import Compute
    from ondevice.offload.store import TieredStore
    from ondevice.offload.units import Bounds, Unit, Units
    from ondevice.offload.updater import Updater
    from ondevice.offload.worker import Task, Worker


def bind(unit: Unit, memory: Tensor, gradient: Tensor | None = None) -> None:
    """Let the model's parameters of `unit` be views of `memory`, and their gradients of
    `gradient`."""
    for piece in unit.pieces:
        span = slice(piece.offset, piece.offset + piece.numel)
        piece.parameter.grad = None
        piece.parameter.data = memory[span].view(piece.shape)
        learns = gradient is not None and piece.trained
        piece.parameter.requires_grad_(learns)
        if gradient is not None and learns:
            piece.parameter.grad = gradient[span].view(piece.shape)


def _host(norm: tuple[Tensor | None, Tensor] | None) -> Tensor | None:
    if norm is None:
        return None
    return norm[1]


class Window:
    """Cache units for layers, for the head and for the rest, each with its gradients, all made
    once.

    Nothing that the passes call here waits for the accelerator: results are ready for the
    computations that follow, and a unit's gradient leaves after the computations before.
    """

    def __init__(
        self,
        units: Units,
        store: TieredStore,
        config: EngineConfig,
        device: Device,
        timeline: Timeline,
        worker: Worker,
        updater: Updater,
    ) -> None:
        self.units = units
        self.store = store
        self.updater = updater
        self.device = device
        self.worker = worker
        self.ranks = store.ranks
        self.dtype = dtype = store.dtype
        self.transfers = Transfers(device, timeline, store.ranks)
        ranks = self.ranks
        kept = store.resident
        largest = max(ranks.padded(unit) for unit in units.layers)
        self.kept_layers = sum(unit.kind == "layer" for unit in kept.units)
        self.layers = self._layers(config)
        self.gradients = [Slot(device.empty(largest, dtype)) for _ in range(2)]
        self.resident = {unit.index: Slot(kept.memory(unit)) for unit in kept.units}
        self.rest = Slot(device.empty(ranks.padded(units.rest), dtype))
        self.rest_gradient = Slot(device.empty(ranks.padded(units.rest), dtype))
        head = self._head_unit()
        vocabulary, self.width = head.pieces[0].shape
        self.rows = -(-vocabulary // config.loss_tiles)
        self.tiles = [
            (low, min(low + self.rows, vocabulary)) for low in range(0, vocabulary, self.rows)
        ]
        stays = (
            units.head in kept
        )  # its tiles are parts of one table, and so are those of its gradient
        count = 1 if stays else min(2, len(self.tiles))
        if count == 1:
            size = ranks.padded(head)
        else:
            size = self.rows * self.width
        self.head = [Slot(device.empty(size, dtype)) for _ in range(0 if stays else count)]
        self.head_gradient = [Slot(device.empty(size, dtype)) for _ in range(count)]
        if units.embedding in kept and not units.tied:
            scattered = ranks.shard(units.embedding).numel
        else:
            scattered = 0
        self.embedding_gradient = device.empty(scattered, dtype)
        self.loaded: list[int | None] = [None] * len(self.layers)
        self.norms = device.pinned(len(units.all) + len(self.tiles), torch.float32)
        self.clipping = config.max_grad_norm is not None
        self.head_squares = list[Tensor]()
        self.leaving: Task | None = None
        self.entering: Slot | None = None
        self.rows_in, self.rows_out = (device.pinned(0, dtype) for _ in range(2))
        self.most = 0

    def _layers(self, config: EngineConfig) -> list[Slot]:
        """Get memory for layers."""
        largest = max(self.ranks.padded(unit) for unit in self.units.layers)
        slots = min(config.slots, max(1, len(self.units.layers) - self.kept_layers))
        return [Slot(self.device.empty(largest, self.dtype)) for _ in range(slots)]

    def _head_unit(self) -> Unit:
        """Return the unit that has the head's shape."""
        return self.units.head

    def updated(self, i: int) -> None:
        """Take note that layer `i` has been updated on the host; on the update thread."""

    @property
    def bytes(self) -> int:
        """Host memory for the embedding's rows, in and out."""
        return sum(t.nbytes for t in (self.rows_in, self.rows_out))

    def bind(self, unit: Unit, slot: Slot, gradient: Slot | None = None) -> None:
        """Let the model's parameters of `unit` be what `slot` holds."""
        bind(unit, slot.memory, None if gradient is None else gradient.memory)

    def fetch_layer(self, i: int) -> None:
        """Ask for layer `i`, unless its unit holds it."""
        at = i % len(self.layers)
        if i >= self.kept_layers and self.loaded[at] != i:
            self.loaded[at] = i
            self._fetch(self.units.layers[i], self.layers[at])

    def forget_layers(self, tokens: int) -> None:
        """Begin a pass of so many tokens: the slots hold no layer, as layers are updated between two
        steps."""
        self.loaded = [None] * len(self.layers)

    def layer(self, i: int) -> Slot:
        """Return the unit of layer `i`; computations that follow run once it is there."""
        unit = self.units.layers[i]
        return self.arrive(self.resident.get(unit.index) or self.layers[i % len(self.layers)])

    def fetch_rest(self) -> None:
        self._fetch(self.units.rest, self.rest)

    def fetch_head(self, tile: int) -> None:
        """Ask for a tile of the output head."""
        if self.units.head.index not in self.resident:
            self._fetch(self.units.head, self.head[tile % len(self.head)], self._tile_span(tile))

    def head_tile(self, tile: int) -> tuple[Slot, Tensor]:
        """Return the unit of that tile, and its weight [rows, hidden]."""
        slot = self.arrive(
            self.resident.get(self.units.head.index) or self.head[tile % len(self.head)]
        )
        return slot, self._tile(slot, tile).view(-1, self.width)

    def head_gradient_tile(self, tile: int) -> tuple[Slot, Tensor]:
        """Return zeroed memory for the gradient of that tile, [rows, hidden]."""
        slot = self.arrive(self.head_gradient[tile % len(self.head_gradient)])
        whole = len(self.tiles) == 1 or (tile == 0 and self.units.head.index in self.resident)
        (
            slot.memory if whole else self._tile(slot, tile)
        ).zero_()  # whole with what fills up the last shard
        return slot, self._tile(slot, tile).view(-1, self.width)

    def _tile(self, slot: Slot, tile: int) -> Tensor:
        """Return the tile's part of `slot`, which has only that tile or, for a resident head, the
        table."""
        low, high = self.tiles[tile]
        first = low * (self.units.head.index in self.resident)
        return slot.memory[first * self.width : (first + high - low) * self.width]

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
        """Send the gradients of layer `i`, then update it; or update it on the accelerator."""
        unit = self.units.layers[i]
        if unit.index in self.resident:
            self._update_resident(unit, slot)
            return
        norm = self._norm(unit.index, slot.memory[: unit.numel])
        computed = self.device.record("compute")  # after the norm, which leaves with the gradients
        moved, absent = self._leaving(i)
        shard = self.ranks.shard(unit)
        bounds = self.ranks.bounds(unit)

        def run() -> Event:
            summed, ready = self._summed(i, slot.memory[: bounds[-1]], bounds, computed, norm)
            buffer = self.updater.pool.borrow(
                f"waiting for host memory for the gradients of {unit.name}"
            )
            event = ready
            for span in moved:
                event = self.transfers.to_host(
                    unit, buffer[span], summed[span], ready, norm, self.updater.config.coded
                )
            then = partial(self.updated, i)
            self.updater.submit(shard, buffer, event, _host(norm), True, then, absent)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def _summed(
        self,
        i: int,
        memory: Tensor,
        bounds: Bounds,
        computed: Event,
        norm: tuple[Tensor | None, Tensor] | None,
    ) -> tuple[Tensor, Event]:
        """Return this rank's part of the gradients of layer `i`, summed over the ranks, and when it
        is there; on the transfer thread."""
        unit = self.units.layers[i]
        return self.transfers.reduce(unit, memory, bounds, computed, _host(norm))

    def _leaving(self, i: int) -> tuple[list[slice], list[slice]]:
        """Return the elements of a layer's gradient that leave, and those that are zero; of a
        shard."""
        return [slice(0, self.ranks.shard(self.units.layers[i]).numel)], []

    def _update_head(self, unit: Unit, slot: Slot, tile: int) -> None:
        """Update the head after its last tile; norms are summed as of a head that leaves tile by
        tile."""
        if not self.ranks.single:
            if tile == len(self.tiles) - 1:
                self._update_together(unit, slot)
            return
        if self.clipping:
            self.head_squares.append(square(self._tile(slot, tile)))
        if tile == len(self.tiles) - 1:
            total = None
            if self.clipping:
                total = torch.cat(self.head_squares).sum().reshape(1)
            self.head_squares.clear()
            self._update_here(unit, slot, total)

    def _update_resident(self, unit: Unit, slot: Slot) -> None:
        if self.ranks.single:
            self._update_here(unit, slot)
        else:
            self._update_together(unit, slot)

    def _update_here(self, unit: Unit, slot: Slot, total: Tensor | None = None) -> None:
        """Run AdamW on the accelerator; `total` is the gradient's squared norm, if known."""
        norm = self._norm(unit.index, slot.memory[: unit.numel], total)
        started = self.device.record("compute")
        scale = None
        if norm is not None and norm[0] is not None:
            scale = self.updater.clipping.scale(norm[0])
        adam = self.updater.clipping.now.adam
        threads = self.updater.threads
        self.store.resident.update(unit, slot.memory[: unit.numel], adam, scale, threads)
        computed = self.device.record("compute")
        self.transfers.timeline.span("backward", f"{unit.name} update", started, computed)
        if norm is None or norm[0] is None:
            return
        square = norm[0]
        target = norm[1]

        def run() -> Event:
            self.device.hold("d2h", computed)
            self.device.copy("d2h", target, square)
            event = self.device.record("d2h")
            self.updater.submit_norm(unit, event, target)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def _update_together(self, unit: Unit, slot: Slot) -> None:
        """Sum the gradients, and update this rank's shard of a resident unit."""
        bounds = self.ranks.bounds(unit)
        gradient = slot.memory[: bounds[-1]]

        def summed() -> tuple[Tensor, Tensor]:
            self.ranks.reduce(gradient, bounds)
            own = gradient[self.ranks.own(bounds)]
            return own, own

        slot.task = self._update_shard(unit, summed)

    def _update_shard(self, unit: Unit, summed: Callable[[], tuple[Tensor, Tensor]]) -> Task:
        """Update this rank's shard on the accelerator, and gather all shards.

        Args:
            summed: gives the shard's gradient, summed over the ranks, and what of it the norm is
                taken of; called on the transfer thread, in the lane of what the ranks do together.
        """
        computed = self.device.record("compute")
        resident = self.resident[unit.index]
        bounds = self.ranks.bounds(unit)
        clipping = self.updater.clipping
        now = self.updater.clipping.now
        host = _host(self._norm(unit.index, resident.memory))
        threads = self.updater.threads

        def update() -> None:
            gradient, part = summed()
            total = self.transfers.norm(part, host)
            scale = None
            if total is not None:
                scale = clipping.scale(total)
            self.store.resident.update(unit, gradient, now.adam, scale, threads)
            self.ranks.gather(resident.memory, bounds)

        def run() -> Event:
            event = self.transfers.together(unit, computed, update)
            if host is not None:
                self.updater.submit_norm(unit, event, host)
            return event

        resident.task = self.worker.submit(unit.name, run)
        return resident.task

    def gather_resident(self) -> None:
        """Gather the resident layers after each rank has loaded its shard."""
        loaded = self.device.record("compute")
        for unit in self.store.resident.units:
            slot = self.resident[unit.index]
            run = partial(self.transfers.gather, unit, slot.memory, self.ranks.bounds(unit), loaded)
            slot.task = self.worker.submit(unit.name, run)

    def send_rest(self) -> None:
        """Send the same for what belongs to no layer."""
        unit = self.units.rest
        slot = self.rest_gradient
        norm = self._norm(unit.index, slot.memory)
        computed = self.device.record("compute")
        shard = self.ranks.shard(unit)
        bounds = self.ranks.bounds(unit)

        def run() -> Event:
            summed, ready = self.transfers.reduce(unit, slot.memory, bounds, computed, _host(norm))
            self.updater.wait(unit)
            event = self.transfers.to_host(unit, self.updater.rest, summed, ready, norm)
            self.updater.submit(shard, self.updater.rest, event, _host(norm), pooled=False)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def send_head(self, tile: int, slot: Slot) -> None:
        """Send the same for a tile of the head; the update follows the last one, or for a tied head
        the embedding."""
        unit = self.units.head
        span = self._tile_span(tile)
        if unit.index in self.resident:
            if not self.units.tied:  # else once the embedding's rows are in it
                self._update_head(unit, slot, tile)
            return
        shard = self.ranks.shard(unit)
        bounds = self.ranks.bounds(unit, span)
        memory = slot.memory[: bounds[-1]]
        norm = None
        if not self.units.tied:
            norm = self._norm(len(self.units.all) + tile, memory)
        computed = self.device.record("compute")

        def run() -> Event:
            summed, ready = self.transfers.reduce(unit, memory, bounds, computed, _host(norm))
            self.updater.wait(unit)
            target = self.updater.table[self._of_shard(shard, bounds, span)]
            event = self.transfers.to_host(unit, target, summed, ready, norm)
            if tile == len(self.tiles) - 1 and not self.units.tied:
                total = None
                if self.clipping:
                    total = self.norms[len(self.units.all) :]
                self.updater.submit(shard, self.updater.table, event, total, pooled=False)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def send_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Send the embedding's gradient, int64 [R] and [R, hidden], each rank's rows to it; or
        update it here."""
        if self.units.embedding.index in self.resident:
            self._update_embedding(rows, gradient)
            return
        unit = self.units.embedding
        computed = self.device.record("compute")
        bounds = self.ranks.row_bounds(unit, rows)
        shard = self.ranks.shard(unit)
        own = self.ranks.own(bounds)
        width = gradient.shape[1]
        self.rows_out = self._rows_on_host(self.rows_out, shard)
        here = rows[own] - shard.low // width
        host = self.rows_out[: len(here) * width].view(-1, width)

        def run() -> None:
            summed, ready = self.transfers.reduce(unit, gradient, bounds, computed)
            if not self.units.tied:
                self.updater.wait(unit)
            event = self.transfers.to_host(unit, host, summed, ready)
            self.updater.submit_rows(here, host, event)

        self.leaving = self.worker.submit(unit.name, run)  # keeps the rows until they have left

    def _update_embedding(self, rows: Tensor, gradient: Tensor) -> None:
        unit = self.units.embedding
        if self.units.tied:
            slot = self.head_gradient[0]
            at = self._upload(rows)
            table = slot.memory[: unit.numel].view(-1, self.width)
            table.index_copy_(0, at, table[at] + gradient)
            self._update_resident(unit, slot)
        elif self.ranks.single:
            at = self._upload(rows)
            table = self.embedding_gradient[: unit.numel].view(-1, self.width)
            table.index_copy_(0, at, gradient)
            slot = Slot(self.embedding_gradient)
            self._update_here(unit, slot, square(gradient) if self.clipping else None)
            self.leaving = slot.task  # keeps the norm until it has left
            table.index_fill_(0, at, 0.0)
        else:
            bounds = self.ranks.row_bounds(unit, rows)
            shard = self.ranks.shard(unit)
            own = self.ranks.own(bounds)
            at = self._upload(rows[own] - shard.low // self.width)

            def summed() -> tuple[Tensor, Tensor]:
                self.ranks.reduce(gradient, bounds)
                self.embedding_gradient.zero_().view(-1, self.width).index_copy_(
                    0, at, gradient[own]
                )
                return self.embedding_gradient, gradient[own]

            self.leaving = self._update_shard(unit, summed)  # keeps the rows until they have left

    def _upload(self, rows: Tensor) -> Tensor:
        """Copy int64 [R] to the accelerator without waiting for its work."""
        if self.device.type == "cpu":
            return rows
        if not len(rows):  # of a rank none of whose rows were read
            return rows.to(self.head_gradient[0].memory.device)
        return rows.pin_memory().to(self.head_gradient[0].memory.device, non_blocking=True)

    def _fetch(self, unit: Unit, slot: Slot, span: slice | None = None) -> None:
        used = slot.used
        shard = self.ranks.shard(unit)
        bounds = self.ranks.bounds(unit, span)
        memory = slot.memory[: bounds[-1]]
        here = self._of_shard(shard, bounds, span)
        own = memory[self.ranks.own(bounds)]
        if self.updater.idle(unit):
            self.store.prefetch(shard)

        def run() -> Event:
            self.updater.wait(unit)
            source = self.store.outgoing(shard, here)
            event = self.transfers.to_device(unit, own, source, used)
            self.store.sent(event)
            return self.transfers.gather(unit, memory, bounds, event)

        slot.task = self.worker.submit(unit.name, run)

    def _tile_span(self, tile: int) -> slice | None:
        """Elements of the head; None is all of it."""
        low, high = self.tiles[tile]
        if len(self.tiles) == 1:
            return None
        return slice(low * self.width, high * self.width)

    def _of_shard(self, shard: Unit, bounds: Bounds, span: slice | None) -> slice:
        """Elements of this rank's shard that are in `span` of the unit, whose parts begin at
        `bounds`."""
        own = self.ranks.own(bounds)
        first = (0 if span is None else span.start) - shard.low
        if own.stop > own.start:
            return slice(own.start + first, own.stop + first)
        return slice(0, 0)

    def fetch_rows(self, rows: Tensor, most: int) -> Slot:
        """Return rows of the embedding for all ranks: int64 [R], at most `most`; each rank reads
        its own."""
        unit = self.units.embedding
        width = self.units.embedding.pieces[0].shape[1]
        if unit.index in self.resident:
            table = self.arrive(self.resident[unit.index]).memory[: unit.numel].view(-1, width)
            return Slot(table[self._upload(rows)].view(-1))
        bounds = self.ranks.row_bounds(unit, rows)
        shard = self.ranks.shard(unit)
        own = self.ranks.own(bounds)
        here = rows[own] - shard.low // width
        self.most = most
        updated = self.updater.read_rows(here)
        self.rows_in = self._rows_on_host(self.rows_in, shard)
        host = self.rows_in[: len(here) * width].view(-1, width)
        if self.entering is None or self.entering.memory.numel() < most * width:
            self.entering = Slot(self.device.empty(most * width, self.store.dtype))
        slot = self.entering
        target = self.entering.memory[: len(rows) * width].view(-1, width)
        target_free = self.device.record("compute")

        def run() -> Event:
            if updated is not None:
                updated.wait()
            self.store.rows(shard, here, host)
            event = self.transfers.to_device(unit, target[own], host, target_free)
            return self.transfers.gather(unit, target, bounds, event)

        slot.task = self.worker.submit(unit.name, run)
        return slot

    def _rows_on_host(self, memory: Tensor, shard: Unit) -> Tensor:
        """Return memory for this rank's part of any rows that a batch of this size may have.

        Only a larger batch replaces it: CUDA unlocks memory once the accelerator is idle, and
        blocks all other threads until then; with a lost rank, for ever."""
        size = min(self.most, shard.numel // self.width) * self.width
        if memory.numel() >= size:
            return memory
        return self.device.pinned(size, self.dtype)

    def all_reduce_total(self, total: Tensor, host: Tensor) -> Callable[[], Event]:
        """Send the loss, summed over the ranks; the result returns the event after which it is in
        `host`."""
        computed = self.device.record("compute")
        return self.worker.submit(
            "the loss", lambda: self.transfers.all_reduce(total, host, computed)
        ).wait

    def arrive(self, slot: Slot) -> Slot:
        """Let the computations that follow wait for the last task of `slot`."""
        if slot.task is not None:
            self.device.hold("compute", slot.task.wait())
            slot.task = None
        return slot

    def _norm(
        self, index: int, gradient: Tensor, total: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor] | None:
        """The squared norm, None before the sum over the ranks, and its target on the host."""
        if not self.clipping:
            return None
        if total is None and self.ranks.single:
            total = square(gradient)
        return total, self.norms[index : index + 1]
