"""States of some units on a local disk: AdamW's moments, and of layers the masters, too
(SlideFormer section 3.3).

Two files: states that only an update needs, and weights that the accelerator reads as well. Reads
begin ahead: of a unit's state when its gradients are on their way, of a layer's weights when the
window asks for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.device import buffer
from ondevice.offload.host import FIELD_BYTES, is_split, moments_bytes, moments_in
from ondevice.offload.storage import TierFile
from ondevice.runtime_ops.layer_adam import HostState

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Device, Event, Timeline
    from ondevice.offload.units import Unit
    from ondevice.offload.worker import Watch

STAGED = 3
"""Units whose states are in host memory at once: read ahead, updated, written back; and layers
whose weights are."""
Staged = tuple[tuple[Tensor, ...], tuple[Future[None], ...]]


class DiskStates:
    """The states on disk of each unit that was chosen for it; one thread updates, another one sends
    weights."""

    def __init__(
        self,
        owned: list[Unit],
        config: EngineConfig,
        folder: Path,
        device: Device,
        timeline: Timeline,
        watch: Watch,
    ) -> None:
        self.kind = config.moments
        self.split = is_split(config)
        self.timeline = timeline
        self.watch = watch
        count = max(1, round(config.disk_fraction * len(owned)))
        chosen = [owned[len(owned) * k // count] for k in range(count)]
        self.records = {unit.index: record for record, unit in enumerate(chosen)}
        layers = []
        if config.disk_masters:
            layers = [unit for unit in chosen if unit.kind == "layer"]
        self.weight_records = {unit.index: record for record, unit in enumerate(layers)}
        sizes = [self._state_bytes(unit) for unit in chosen]
        widths = [(2 if self.split else 4) * unit.numel for unit in layers]
        self.file = TierFile(folder, "moments", sizes, timeout_s=config.timeout_s)
        self.files = [self.file]
        pin = device.type != "cpu"
        try:
            if layers:
                self.files.append(TierFile(folder, "weights", widths, timeout_s=config.timeout_s))
            self.free: list[tuple[Tensor, ...]] = [
                (
                    buffer(max(sizes), pin=False),
                    *(buffer(max(widths), pin=False) for _ in layers[:1]),
                )
                for _ in range(min(STAGED, count))
            ]
            self.outgoing = [buffer(max(widths), pin=pin) for _ in range(min(STAGED, len(layers)))]
        except BaseException:
            self.close()
            raise
        self.staging = [*(memory for entry in self.free for memory in entry), *self.outgoing]
        self.staged: dict[int, Staged] = {}
        self.writing: list[Staged] = []
        self.lock = threading.Lock()
        self.idle: list[tuple[Tensor, Event | None]] = [(memory, None) for memory in self.outgoing]
        self.coming: dict[int, tuple[Tensor, Future[None]]] = {}
        self.sending: Tensor | None = None

    def holds(self, unit: Unit) -> bool:
        return unit.index in self.records

    def holds_master(self, unit: Unit) -> bool:
        return unit.index in self.weight_records

    def prefetch(self, unit: Unit) -> None:
        """Begin to read a unit's state for its update, if there is memory for it."""
        if not self.holds(unit):
            return
        with self.lock:
            if unit.index not in self.staged and (memories := self._spare()) is not None:
                self.staged[unit.index] = self._read(unit, memories)

    def load(self, unit: Unit, state: HostState) -> HostState:
        """Return `state` with its parts on the disk read into memory, until `save`.

        Raises:
            StorageError: the disk failed, or the data differs from what was written.
            TrainingError: the disk does not respond.
        """
        if not self.holds(unit):
            return state
        with self.lock:
            entry = self.staged.pop(unit.index, None) or self._read(unit, self._memory())
        memories, futures = entry
        for future in futures:
            self.watch.result(future, f"read of {unit.name}")
        self.loaded = memories
        return self._state(unit, state, memories)

    def save(self, unit: Unit) -> None:
        """Begin to write back the state of the last `load`."""
        if self.holds(unit):
            with self.lock:
                self.writing.append(self._write(unit, self.loaded))

    def put(self, unit: Unit, state: HostState) -> HostState:
        """Write a state that is in memory; return the part that stays there."""
        with self.lock:
            memories = self._memory()
        target = self._state(unit, state, memories)
        for name, tensor in state.moments.tensors().items():
            target.moments.tensors()[name].copy_(tensor)
        if self.holds_master(unit):
            for name in ("master", "high", "low"):
                if (source := getattr(state, name)) is not None:
                    getattr(target, name).copy_(source)
        self.loaded = memories
        self.save(unit)
        moments = type(state.moments).empty(0, self.kind)
        if self.holds_master(unit):
            return HostState(None, None, None, moments, state.seed)
        return replace(state, moments=moments)

    def stored(self, unit: Unit, state: HostState) -> HostState:
        """Return the complete state, with parts on the disk as maps of the files; only without
        writes."""
        self.flush()
        maps = [self.file.payload(self.records[unit.index])]
        if self.holds_master(unit):
            maps.append(self.files[1].payload(self.weight_records[unit.index]))
        return self._state(unit, state, tuple(maps))

    def prefetch_weights(self, unit: Unit) -> None:
        """Begin to read a layer's weights for the accelerator, if memory is free; its update is
        done."""
        if self.holds_master(unit):
            with self.lock:
                at = next(
                    (n for n, (_, sent) in enumerate(self.idle) if sent is None or sent.done()),
                    None,
                )
                if unit.index not in self.coming and at is not None:
                    self.coming[unit.index] = self._read_weights(unit, at)

    def weights(self, unit: Unit) -> Tensor:
        """Return a layer's weights, bfloat16 or float32 [numel], valid until `sent`.

        Raises:
            StorageError: as `load`.
        """
        with self.lock:
            entry = self.coming.pop(unit.index, None)
            if entry is None and not self.idle:  # a read ahead, needed later, gives up its memory
                _, (memory, future) = self.coming.popitem()
                self.watch.result(future, "read of weights")
                self.idle.append((memory, None))
            if entry is None:
                entry = self._read_weights(unit, 0)
        self.sending, future = entry
        self.watch.result(future, f"read of {unit.name}")
        return self._weights(unit, self.sending)

    def sent(self, event: Event) -> None:
        """Note that the copy of the last `weights` ends at `event`."""
        if self.sending is not None:
            with self.lock:
                self.idle.append((self.sending, event))
            self.sending = None

    def flush(self) -> None:
        """Wait for all writes."""
        with self.lock:
            while self.writing:
                self._written(self.writing[0])

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _state_bytes(self, unit: Unit) -> int:
        low = 2 * unit.numel * (self.split and unit.index in self.weight_records)
        return self._low_at(unit) + low

    def _low_at(self, unit: Unit) -> int:
        return -(-moments_bytes(unit.numel, self.kind) // FIELD_BYTES) * FIELD_BYTES

    def _weights(self, unit: Unit, memory: Tensor) -> Tensor:
        item, dtype = (2, torch.bfloat16) if self.split else (4, torch.float32)
        return memory[: item * unit.numel].view(dtype)

    def _state(self, unit: Unit, state: HostState, memories: tuple[Tensor, ...]) -> HostState:
        """`state` with the fields that are in these memories."""
        moments = moments_in(memories[0], unit.numel, self.kind)
        if not self.holds_master(unit):
            return replace(state, moments=moments)
        weights = self._weights(unit, memories[1])
        if not self.split:
            return HostState(weights, None, None, moments, state.seed)
        low = memories[0][self._low_at(unit) :][: 2 * unit.numel].view(torch.uint16)
        return HostState(None, weights, low, moments, state.seed)

    def _read(self, unit: Unit, memories: tuple[Tensor, ...]) -> Staged:
        return memories, self._moved(unit, memories, "read", lambda file: file.read)

    def _write(self, unit: Unit, memories: tuple[Tensor, ...]) -> Staged:
        return memories, self._moved(unit, memories, "write", lambda file: file.write)

    def _moved(
        self,
        unit: Unit,
        memories: tuple[Tensor, ...],
        what: str,
        of: Callable[[TierFile], Callable[..., Future[None]]],
    ) -> tuple[Future[None], ...]:
        name = f"{what} {unit.name}"
        futures = [timed(self.timeline, name, of(self.file)(self.records[unit.index], memories[0]))]
        if self.holds_master(unit):
            futures.append(
                timed(
                    self.timeline,
                    name,
                    of(self.files[1])(self.weight_records[unit.index], memories[1]),
                )
            )
        return tuple(futures)

    def _read_weights(self, unit: Unit, at: int) -> tuple[Tensor, Future[None]]:
        """Read into the idle memory `at`, once its last copy has ended. The lock is held."""
        memory, sent = self.idle.pop(at)
        if sent is not None:
            sent.wait()
        name = f"read {unit.name} weights"
        return memory, timed(
            self.timeline, name, self.files[1].read(self.weight_records[unit.index], memory)
        )

    def _memory(self) -> tuple[Tensor, ...]:
        """Staging memory, once some is free; reads ahead give up theirs last. The lock is held."""
        while (memories := self._spare()) is None:
            if not self.writing:
                _, (memories, futures) = self.staged.popitem()
                for future in futures:
                    self.watch.result(future, "read of a state")
                return memories
            self._written(self.writing[0])
        return memories

    def _spare(self) -> tuple[Tensor, ...] | None:
        """Staging memory that is free now. The lock is held."""
        for entry in [entry for entry in self.writing if all(future.done() for future in entry[1])]:
            self._written(entry)
        if self.free:
            return self.free.pop()
        return None

    def _written(self, entry: Staged) -> None:
        """Wait for a write, and take its memory back."""
        for future in entry[1]:
            self.watch.result(future, "write of a state")
        self.writing = [
            other for other in self.writing if other is not entry
        ]  # tensors have no plain ==
        self.free.append(entry[0])


def timed(timeline: Timeline, name: str, future: Future[None]) -> Future[None]:
    """Put the time of a transfer into the disk's lane."""
    started = time.perf_counter()
    future.add_done_callback(lambda _: timeline.add("disk", name, started, time.perf_counter()))
    return future
