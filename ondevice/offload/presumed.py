"""Updates that presume a step is not clipped, for `clip: global` (SuperOffload's speculation and
rollback, Lian et al. 2025, section 4.4).

The norm of all gradients is known only after the backward pass. Until then the update thread
updates layers without a scale, and keeps a record of each. If the norm stays within the limit, the
updates stand; else they are taken back by the record, to the bit, and made with the scale. So the
bits are those of a step that waits. Squares only add up: once those that have come exceed the limit,
the other layers wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ondevice.offload.device import buffer
from ondevice.offload.groups import run_sizes, updates
from ondevice.runtime_ops.layer_adam import (
    UndoRecord,
    finish_adam,
    layer_adam,
    record_bytes,
    undo_adam,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.offload.config import EngineConfig
    from ondevice.offload.disk_states import DiskStates
    from ondevice.offload.gradients import Clipping
    from ondevice.offload.store import TieredStore
    from ondevice.offload.units import Unit
    from ondevice.runtime_ops.layer_adam import AdamStep, HostState

Records = list[UndoRecord]
"""Of a unit: one for each run that AdamW updates."""


class Arrival:
    """What is noted once of a gradient that has come, by whichever thread looks first."""

    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note
        self.noted = False


class Presumed:
    """Records of layers that are updated before the norm is known: memory for `config.presumed`.

    Layers whose states are on a disk or partly frozen wait for the norm, and all do if the update is
    torch's, which keeps no record.
    """

    def __init__(
        self,
        store: TieredStore,
        config: EngineConfig,
        disk: DiskStates | None,
        clipping: Clipping,
        threads: int,
    ) -> None:
        self.clipping = clipping
        self.threads = threads
        self.lock = threading.Lock()
        self.free: dict[tuple[int, ...], list[Records]] = {}
        """By the sizes of a unit's runs."""
        self.written: dict[int, Records] = {}
        self.units: set[int] = set()
        self.bytes = 0
        if not store.native:
            return
        layers = [unit for unit in store.owned if unit.kind == "layer"]
        for unit in reversed(layers):  # as their gradients come
            on_disk = disk is not None and disk.holds(unit)
            if on_disk or not all(piece.trained for piece in unit.pieces):
                continue
            self.units.add(unit.index)
            if sum(map(len, self.free.values())) < config.presumed:
                records = [_record(size, config.moments) for size in run_sizes(unit)]
                self.free.setdefault(run_sizes(unit), []).append(records)
                self.bytes += sum(record.nbytes for record in records)

    def holds(self, unit: Unit) -> bool:
        """Return True if there may be memory for a record of the unit's update."""
        return unit.index in self.units and run_sizes(unit) in self.free

    def arrive(self, arrival: Arrival) -> None:
        """Take note of a gradient, unless it is noted."""
        with self.lock:
            self._note(arrival)

    def begin(self, unit: Unit, arrival: Arrival) -> Records | None:
        """Take note of a gradient, and return memory for the record of the unit's update; None if
        it has to wait."""
        with self.lock:
            if arrival.noted:  # the backward pass has ended
                return None
            self._note(arrival)
            free = self.free[run_sizes(unit)]
            if self.clipping.exceeded or not free:
                return None
            return free.pop()

    def update(
        self, unit: Unit, gradient: Tensor, state: HostState, adam: AdamStep, records: Records
    ) -> None:
        """Update a unit as if the step were not clipped."""
        for (part, own, settings), record in self._parts(unit, gradient, state, adam, records):
            layer_adam(part, own, settings, threads=self.threads, undo=record)
        self.written[unit.index] = records

    def take(self, unit: Unit) -> Records | None:
        """Return the record of a unit's update, if it has one, and forget it."""
        return self.written.pop(unit.index, None)

    def finish(
        self, unit: Unit, gradient: Tensor, state: HostState, adam: AdamStep, records: Records
    ) -> None:
        """Let a unit's update stand: the step is not clipped."""
        for (part, own, settings), record in self._parts(unit, gradient, state, adam, records):
            finish_adam(part, own, settings, record, threads=self.threads)
        self._give(unit, records)

    def undo(
        self, unit: Unit, gradient: Tensor, state: HostState, adam: AdamStep, records: Records
    ) -> None:
        """Take a unit's update back: the step is clipped."""
        for (part, own, settings), record in self._parts(unit, gradient, state, adam, records):
            undo_adam(part, own, settings, record, threads=self.threads)
        self._give(unit, records)

    def _parts(
        self, unit: Unit, gradient: Tensor, state: HostState, adam: AdamStep, records: Records
    ) -> Iterator[tuple[tuple[Tensor, HostState, AdamStep], UndoRecord]]:
        return zip(updates(unit, gradient, state, adam), records, strict=True)

    def _give(self, unit: Unit, records: Records) -> None:
        """Let another unit write to records that nobody reads."""
        with self.lock:
            self.free[run_sizes(unit)].append(records)

    def _note(self, arrival: Arrival) -> None:
        if not arrival.noted:
            arrival.noted = True
            arrival.note()


def _record(numel: int, moments: str) -> UndoRecord:
    memory = buffer(record_bytes(numel, moments), pin=False)
    return UndoRecord.empty(numel, moments, memory)
