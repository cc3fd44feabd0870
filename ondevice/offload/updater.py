"""The update thread: gradients that arrived in host memory become AdamW steps, the layers needed
first before others.

Order: the next forward pass begins with the embedding and layer 0, whose gradients arrive last. So
the thread takes the lowest layer among those that have arrived, and the layer needed last waits
longest in host memory. Of an embedding the rows that the next batch reads come first, all others
when there is time. Rows of an untied one that no batch has read so far have no moments, so without
weight decay they are left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.core.errors import TrainingError
from ondevice.offload import muon
from ondevice.offload.gradients import Clipping, Step, square
from ondevice.offload.groups import updates
from ondevice.offload.presumed import Arrival, Presumed
from ondevice.offload.worker import Pool
from ondevice.runtime_ops import rows as row_ops
from ondevice.runtime_ops.gradient_codes import coded_bytes, decode
from ondevice.runtime_ops.layer_adam import TILE, AdamStep, HostState, layer_adam, torch_adam

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Device, Event, Timeline
    from ondevice.offload.disk_states import DiskStates
    from ondevice.offload.store import TieredStore
    from ondevice.offload.units import Unit, Units
    from ondevice.offload.worker import Task, Watch, Worker

FIRST = -3
"""Priority of the rows that the next batch reads."""
LOOKED = 4096
"""Rows whose moments are looked at together."""


class Updater:
    """Host gradient buffers, their updates, and clipping."""

    def __init__(
        self,
        units: Units,
        store: TieredStore,
        config: EngineConfig,
        device: Device,
        timeline: Timeline,
        worker: Worker,
        watch: Watch,
        threads: int,
        disk: DiskStates | None,
    ) -> None:
        self.units = units
        self.store = store
        self.config = config
        self.device = device
        self.worker = worker
        self.watch = watch
        self.timeline = timeline
        self.threads = threads
        self.disk = disk
        self.clipping = Clipping(config, units, store.ranks)
        self.last = config.updates_last
        self.embedded = store.ranks.shard(units.embedding)
        largest = max(store.ranks.shard(unit).numel for unit in units.layers)
        layers = sum(unit.kind == "layer" for unit in store.owned)
        count = layers
        if not self.last:
            count = min(config.buffers, layers)
        self.buffers = [device.pinned(largest, store.dtype) for _ in range(count)]
        self.pool = Pool(list(self.buffers), watch)
        size = {unit.kind: unit.numel for unit in store.owned}
        self.rest = device.pinned(size.get("rest", 0), store.dtype)
        self.table = device.pinned(size.get(units.head.kind, 0), store.dtype)
        if units.tied:
            self.embedding = self.table
        else:
            self.embedding = torch.zeros(size.get("embedding", 0), dtype=store.dtype)
        if store.native:
            self.scratch = None
        else:
            self.scratch = torch.empty(max((unit.numel for unit in store.owned), default=0))
        self.pending: dict[int, Task] = {}
        self.sums: dict[int, Tensor] = {}
        """Of the gradients that were only added, float32, by unit."""
        self.whole = False
        """True if the embedding's gradient has other rows than those of the last batch."""
        self.kept: dict[str, threading.Event] = {}
        self.presumed = Presumed(store, config, disk, self.clipping, threads)
        self.waiting: list[tuple[Event, Arrival, Callable[[], None]]] = []
        self.rows: tuple[Tensor, Tensor, Event, Step] | None = None
        self.width = self.embedded.pieces[0].shape[1]
        # Int8 moments share a scale in tiles that may cross rows, and a file is read entirely: all
        # rows then.
        tiled = config.moments == "int8" and self.width % TILE != 0
        self.by_rows = store.native and not tiled and not (disk and disk.holds(self.embedded))
        self.read = torch.ones(self.embedded.pieces[0].shape[0], dtype=torch.bool)
        self.loaded()
        self.bytes = sum(t.nbytes for t in (*self.buffers, self.rest, self.table))
        self.bytes += 0 if self.scratch is None else self.scratch.nbytes
        self.bytes += 0 if units.tied else self.embedding.nbytes
        self.bytes += self.presumed.bytes

    def loaded(self) -> None:
        """Determine which rows of the embedding have moments in the current states."""
        lazy = self.by_rows and not self.units.tied and self.config.weight_decay == 0
        if not lazy or self.embedded.index not in self.store.states or not len(self.read):
            return
        moments = self.store.moments(self.embedded)
        count = self.embedded.pieces[0].numel
        self.read.zero_()
        for moment in (moments.m, moments.v):
            table = moment[:count].view(-1, self.width)
            for low in range(0, len(table), LOOKED):
                self.read[low : low + LOOKED] |= (table[low : low + LOOKED] != 0).any(1)

    def wait(self, unit: Unit) -> None:
        """Wait until the unit's last submitted update is done."""
        task = self.pending.get(unit.index)
        if task is not None:
            task.wait()

    def idle(self, unit: Unit) -> bool:
        """Return True if the unit's last submitted update is done."""
        task = self.pending.get(unit.index)
        return task is None or task.finished.is_set()

    def submit(
        self,
        unit: Unit,
        gradient: Tensor,
        event: Event,
        total: Tensor | None,
        pooled: bool,
        then: Callable[[], None] | None = None,
        absent: Sequence[slice] = (),
    ) -> None:
        """Update `unit`, this rank's shard, once its gradient is here at `event`, and call `then`;
        `total` is the squared norm of the whole unit's, on the host by then. What is `absent` did
        not come, and is zero. A layer's gradient is in the memory of the pool, maybe coded."""
        now = self.clipping.now
        if self.disk is not None:
            self.disk.prefetch(unit)

        if now.adding:
            self._submit_sum(unit, gradient, event, pooled, absent)
            return

        def arrived() -> None:
            self._receive(unit, gradient, pooled, absent)
            if self._add_sum(unit, gradient[: unit.numel]) and total is not None:
                now.squares[unit.index] = float(square(gradient[: unit.numel]))
            elif total is not None:
                now.squares[unit.index] = float(total.sum())

        def run() -> None:
            if not self.last:  # else `end_backward` did it
                arrived()
            self._finish(unit, gradient[: unit.numel], self.clipping.apply(now, unit), now)
            if pooled:
                self.pool.give(gradient)
            if then is not None:
                then()

        def send() -> None:
            self.pending[unit.index] = self.worker.submit(
                unit.name, run, unit.order, event.done, event.wait
            )

        if not self.last:
            send()
            return
        arrival = Arrival(arrived)
        self.waiting.append((event, arrival, send))
        if self.presumed.holds(unit):
            presume = partial(self._presume, unit, gradient[: unit.numel], arrival, now)
            self.worker.submit(unit.name, presume, unit.order, event.done, event.wait)

    def _presume(self, unit: Unit, gradient: Tensor, arrival: Arrival, now: Step) -> None:
        """Update a layer as if the step were not clipped, unless a checkpoint still reads it."""
        if not self.is_written(unit):
            self.presumed.arrive(arrival)
            return
        records = self.presumed.begin(unit, arrival)
        if records is None:
            return
        started = time.perf_counter()
        state = self.store.states[unit.index]
        self.presumed.update(unit, gradient, state, now.adam, records)
        self.timeline.add("update", unit.name, started, time.perf_counter())

    def _finish(self, unit: Unit, gradient: Tensor, adam: AdamStep, now: Step) -> None:
        """Let a presumed update stand if the step is not clipped; else take it back, and update."""
        records = self.presumed.take(unit)
        if records is None:
            self._update(unit, gradient, adam)
            return
        state = self.store.states[unit.index]
        if adam == now.adam:
            self.presumed.finish(unit, gradient, state, now.adam, records)
            return
        started = time.perf_counter()
        self.presumed.undo(unit, gradient, state, now.adam, records)
        self.timeline.add("update", unit.name, started, time.perf_counter())
        self._update(unit, gradient, adam)

    def _submit_sum(
        self, unit: Unit, gradient: Tensor, event: Event, pooled: bool, absent: Sequence[slice]
    ) -> None:
        """Add a gradient to those that the next step brings."""

        def run() -> None:
            self._receive(unit, gradient, pooled, absent)
            self._sum(unit).add_(gradient[: unit.numel])
            if pooled:
                self.pool.give(gradient)

        self.pending[unit.index] = self.worker.submit(
            unit.name, run, unit.order, event.done, event.wait
        )

    def _receive(self, unit: Unit, gradient: Tensor, pooled: bool, absent: Sequence[slice]) -> None:
        """Make a gradient that has come complete: decode it, and clear what stayed."""
        if pooled and self.config.coded:
            codes = gradient.view(torch.uint8)[: coded_bytes(unit.numel)].clone()
            decode(codes, gradient[: unit.numel], self.threads)
        _clear(gradient, absent)

    def _sum(self, unit: Unit) -> Tensor:
        if unit.index not in self.sums:
            self.sums[unit.index] = torch.zeros(unit.numel)
        return self.sums[unit.index]

    def _add_sum(self, unit: Unit, gradient: Tensor) -> bool:
        """Add what was summed to the last gradient, rounded once; False if there is nothing."""
        summed = self.sums.pop(unit.index, None)
        if summed is None:
            return False
        gradient.copy_(summed.add_(gradient))
        return True

    def submit_norm(self, unit: Unit, event: Event, total: Tensor) -> None:
        """Note the squared norm of a unit that the accelerator updates, once it is here at
        `event`."""
        now = self.clipping.now

        def run() -> None:
            now.squares[unit.index] = float(total)

        self.pending[unit.index] = self.worker.submit(
            unit.name, run, unit.order, event.done, event.wait
        )

    def submit_rows(self, rows: Tensor, gradient: Tensor, event: Event) -> None:
        """Send the embedding's gradient: int64 [R] of this rank's rows and [R, hidden]; stored
        until the next batch names its rows."""
        if not self.clipping.now.adding:
            self.rows = (rows, gradient, event, self.clipping.now)
            return
        now = self.clipping.now
        unit = self.embedded
        self.read[rows] = True

        def run() -> None:
            self._merge(rows, gradient, event, now)
            self._sum(unit).add_(self.embedding[: unit.numel])
            self._cleared(rows, self.width)

        self.pending[unit.index] = self.worker.submit(
            unit.name, run, unit.order, event.done, event.wait
        )

    def end_backward(self) -> None:
        """End the backward pass: every gradient of the step is on its way; updates that wait for
        that begin here."""
        if not self.last or self.clipping.now.adding:
            return
        waiting = self.waiting
        self.waiting = []
        if self.rows is not None:
            self._merge(*self.rows)
        for event, arrival, _ in waiting:
            event.wait()
            self.presumed.arrive(arrival)
        for _, _, send in waiting:
            send()

    def read_rows(self, needed: Tensor | None) -> Task | None:
        """Update the embedding: the rows `needed` of this rank's (sorted) at once, the others
        later; None: all at once.

        Returns:
            The task after which those rows may be read.
        """
        if self.rows is None:
            return self.pending.get(self.units.embedding.index)
        waiting = self.rows
        unit = self.embedded
        rows = waiting[0]
        now = waiting[3]
        merged = self.last
        width = self.width
        self.read[rows] = True
        at_once = None
        others = None
        if self.by_rows and needed is not None:
            first_ones = torch.zeros_like(self.read)
            first_ones[needed] = True
            at_once = (self.read & first_ones).nonzero()[:, 0]
            others = (self.read & ~first_ones).nonzero()[:, 0]
        elif self.by_rows and not bool(self.read.all()):
            at_once = self.read.nonzero()[:, 0]

        def first() -> None:
            if not merged:
                self._merge(*waiting)
            self._update(unit, self.embedding, self.clipping.apply(now, unit), at_once, width)
            if others is None:
                self._cleared(rows, width)

        # The next step begins with these rows, so they come before all layers, and the other rows
        # after them.
        task = self.worker.submit(unit.name, first, FIRST)
        self.pending[unit.index] = task
        if others is not None:
            later = others

            def second() -> None:
                self._update(unit, self.embedding, self.clipping.apply(now, unit), later, width)
                self._cleared(rows, width)

            self.pending[unit.index] = self.worker.submit(
                unit.name,
                second,
                len(self.units.layers) + 1,
                task.finished.is_set,
                lambda: task.wait(),
            )
        self.rows = None
        return task

    def edit(self, unit: Unit, change: Callable[[HostState], None]) -> None:
        """Let `change` read or write the state of a shard on the update thread; waits for it."""

        def run() -> None:
            state = self.store.states[unit.index]
            if self.disk is not None:
                state = self.disk.load(unit, state)
            change(state)
            if self.disk is not None:
                self.disk.save(unit)

        self.worker.submit(unit.name, run, FIRST).wait()

    def keep(self, keys: set[str]) -> None:
        """Do not update these units (`Unit.key`) until `release` names them."""
        self.kept = {key: threading.Event() for key in keys}

    def release(self, key: str | None) -> None:
        """Let a unit be updated again; None: all of them."""
        for name, event in self.kept.items():
            if key is None or name == key:
                event.set()
        self.watch.progress()

    def is_written(self, unit: Unit) -> bool:
        """Return False while a checkpoint that is being written lacks the unit's state."""
        kept = self.kept.get(unit.key)
        return kept is None or kept.is_set()

    def wait_written(self, unit: Unit) -> None:
        """Wait until a checkpoint that is being written has the unit's state."""
        kept = self.kept.get(unit.key)
        if kept is not None:
            self.watch.until(kept.wait, f"waiting for the checkpoint of {unit.name}")

    def check_ended(self) -> None:
        """Check that the last backward pass has ended: until then presumed updates are of no step.

        Raises:
            TrainingError: it was interrupted; or what a thread died of.
        """
        self.watch.check()
        if self.waiting:
            raise TrainingError(
                "the last backward pass was interrupted",
                hint="the last checkpoint is intact; resume from it",
            )

    def flush(self) -> None:
        """Wait until every gradient that was sent is applied.

        Raises:
            TrainingError: as `check_ended`.
        """
        self.check_ended()
        self.read_rows(None)
        for task in list(self.pending.values()):
            task.wait()

    def _merge(self, rows: Tensor, gradient: Tensor, event: Event, now: Step) -> None:
        """Put the rows' gradient into the embedding's: added to the head's if they are tied."""
        event.wait()
        started = time.perf_counter()
        unit = self.embedded
        table = self.embedding[: unit.pieces[0].numel].view(unit.pieces[0].shape)
        (row_ops.add if self.units.tied else row_ops.scatter)(table, rows, gradient, self.threads)
        if not now.adding:
            self.whole = self._add_sum(unit, self.embedding[: unit.numel])
        if self.config.max_grad_norm is not None:
            embedding_gradient = gradient
            if self.units.tied or self.whole:
                embedding_gradient = table
            now.squares[unit.index] = self.clipping.ranks.sum(float(square(embedding_gradient)))
        self.timeline.add("update", f"{unit.name} rows", started, time.perf_counter())

    def _cleared(self, rows: Tensor, width: int) -> None:
        if not self.units.tied and self.whole:
            self.embedding.zero_()
        elif not self.units.tied:
            row_ops.clear(self.embedding.view(-1, width), rows, self.threads)

    def _update(
        self,
        unit: Unit,
        gradient: Tensor,
        adam: AdamStep,
        rows: Tensor | None = None,
        width: int = 0,
    ) -> None:
        self.wait_written(unit)
        state = self.store.states[unit.index]
        if self.disk is not None:
            state = self.disk.load(unit, state)
        started = time.perf_counter()
        if unit.matrices:
            muon.step(unit, gradient, state, adam, self.config.muon_rate, self.threads)
        for part, own, settings in updates(unit, gradient, state, adam):
            if self.scratch is not None:
                torch_adam(part, own, settings, self.scratch[: len(part)])
            else:
                layer_adam(part, own, settings, rows=rows, width=width, threads=self.threads)
        self.timeline.add("update", unit.name, started, time.perf_counter())
        if self.disk is not None:
            self.disk.save(unit)


def _clear(gradient: Tensor, absent: Sequence[slice]) -> None:
    """Let parts of a gradient that stayed on the accelerator be the zeros that they are there."""
    for span in absent:
        gradient[span].zero_()
