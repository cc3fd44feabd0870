"""The tier on a local disk: moments of some units, and layers' inputs (SlideFormer sections 3.3 and 4.4)."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ondevice.offload.drive import buffer
from ondevice.offload.host import moments_bytes, moments_in
from ondevice.offload.ranks import SINGLE, Ranks
from ondevice.offload.storage import TierFile
from ondevice.runtime_ops.layer_adam import HostState, Moments

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.offload.report import Timeline
    from ondevice.offload.units import Unit, Units

STAGED = 3
"""Units whose moments are in host memory at once: read ahead, updated, written back."""


class DiskMoments:
    """Moments of a share of the units in one file; read ahead when a unit's gradients are on their way."""

    def __init__(self, owned: list[Unit], config: SlideformerConfig, folder: Path, timeline: Timeline) -> None:
        self.kind, self.timeline = config.moments, timeline
        count = max(1, round(config.disk_fraction * len(owned)))
        chosen = [owned[len(owned) * k // count] for k in range(count)]
        self.records = {unit.index: record for record, unit in enumerate(chosen)}
        sizes = [moments_bytes(unit.numel, self.kind) for unit in chosen]
        self.staging = [buffer(max(sizes), pin=False) for _ in range(min(STAGED, count))]
        self.free = list(self.staging)
        self.file = TierFile(folder, "moments", sizes, timeout_s=config.timeout_s)
        self.staged: dict[int, tuple[Tensor, Future[None]]] = {}
        self.writing: list[tuple[Tensor, Future[None]]] = []
        self.lock = threading.Lock()

    def holds(self, unit: Unit) -> bool:
        return unit.index in self.records

    def prefetch(self, unit: Unit) -> None:
        """Begin to read a unit's moments, if there is memory for them."""
        if not self.holds(unit):
            return
        with self.lock:
            if unit.index not in self.staged and (memory := self._spare()) is not None:
                self.staged[unit.index] = (memory, self.file.read(self.records[unit.index], memory))

    def load(self, unit: Unit, state: HostState) -> HostState:
        """Return `state` with the unit's moments, in memory until `save`.

        Raises:
            StorageError: the disk failed, or what was read is not what was written.
        """
        if not self.holds(unit):
            return state
        started = time.perf_counter()
        with self.lock:
            entry = self.staged.pop(unit.index, None)
            if entry is None:
                memory = self._memory()
                entry = (memory, self.file.read(self.records[unit.index], memory))
        memory, future = entry
        future.result()
        self.timeline.add("disk", f"read {unit.name}", started, time.perf_counter())
        self.loaded = memory
        return replace(state, moments=moments_in(memory, unit.numel, self.kind))

    def save(self, unit: Unit) -> None:
        """Begin to write back what `load` gave last."""
        if self.holds(unit):
            with self.lock:
                self.writing.append((self.loaded, self.file.write(self.records[unit.index], self.loaded)))

    def put(self, unit: Unit, moments: Moments) -> None:
        """Write moments that are in memory."""
        with self.lock:
            memory = self._memory()
        target = moments_in(memory, unit.numel, self.kind)
        for name, tensor in moments.tensors().items():
            target.tensors()[name].copy_(tensor)
        self.loaded = memory
        self.save(unit)

    def stored(self, unit: Unit) -> Moments:
        """Return the moments as a map of the file, read when they are looked at; only while nothing is being
        written."""
        self.flush()
        memory = self.file.payload(self.records[unit.index])
        return moments_in(memory, unit.numel, self.kind)

    def flush(self) -> None:
        """Wait for all writes."""
        with self.lock:
            while self.writing:
                self._written(self.writing[0])

    def _memory(self) -> Tensor:
        """Staging memory, once some is free; what is read ahead gives its own last. The lock is held."""
        while (memory := self._spare()) is None:
            if not self.writing:
                _, (memory, future) = self.staged.popitem()
                future.result()
                return memory
            self._written(self.writing[0])
        return memory

    def _spare(self) -> Tensor | None:
        """Staging memory that is free now. The lock is held."""
        for entry in [entry for entry in self.writing if entry[1].done()]:
            self._written(entry)
        return self.free.pop() if self.free else None

    def _written(self, entry: tuple[Tensor, Future[None]]) -> None:
        """Wait for a write, and take its memory back."""
        entry[1].result()
        self.writing = [other for other in self.writing if other is not entry]  # tensors have no plain ==
        self.free.append(entry[0])


class DiskActivations:
    """Layers' inputs in a file: a ring of host buffers between the accelerator and the disk."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        self.file: TierFile | None = None

    def begin(self, count: int, size_bytes: int, buffers: int, pin: bool) -> list[Tensor]:
        """Make room for `count` inputs; gives the host buffers, uint8: input `at` uses number `at` modulo their
        count."""
        if self.file is not None:
            self.file.close()
        self.file = TierFile(self.folder, "activations", [size_bytes] * count, timeout_s=self.timeout_s)
        self.ring = [buffer(size_bytes, pin=pin) for _ in range(buffers)]
        self.futures: list[Future[None] | None] = [None] * buffers
        self.holds: list[int | None] = [None] * buffers
        return self.ring

    def place(self, at: int) -> None:
        """Let input `at` have its buffer, once what that held before is on the disk."""
        self._wait(at % len(self.ring))
        self.holds[at % len(self.ring)] = at

    def write(self, at: int) -> None:
        """Write an input that is in its buffer."""
        if self.file is not None:
            self.futures[at % len(self.ring)] = self.file.write(at, self.ring[at % len(self.ring)])

    def read(self, at: int) -> None:
        """Begin to bring an input back, unless its buffer still has it; the buffer must be free."""
        turn = at % len(self.ring)
        if self.file is not None and self.holds[turn] != at:
            self._wait(turn)
            self.holds[turn] = at
            self.futures[turn] = self.file.read(at, self.ring[turn])

    def wait(self, at: int) -> None:
        """Wait until the input is in its buffer."""
        self._wait(at % len(self.ring))

    def _wait(self, turn: int) -> None:
        future, self.futures[turn] = self.futures[turn], None
        if future is not None:
            future.result()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


@dataclass
class Disk:
    """The disk tier of an engine; both parts are None where nothing goes to disk."""

    moments: DiskMoments | None
    activations: DiskActivations | None
    temporary: Path | None

    def close(self) -> None:
        """Remove the files; whether the last writes succeeded matters no more."""
        with ExitStack() as closing:
            if self.temporary is not None:
                closing.callback(shutil.rmtree, self.temporary, ignore_errors=True)
            if self.activations is not None:
                closing.callback(self.activations.close)
            if self.moments is not None:
                closing.callback(self.moments.file.close)


def open_disk(units: Units, config: SlideformerConfig, timeline: Timeline, ranks: Ranks = SINGLE) -> Disk:
    """Return the files that `config` asks for.

    Raises:
        StorageError: there is no room for them.
    """
    owned = [ranks.share(unit) for unit in units.all if unit.kind != "rest"]
    moments, activations = config.disk_fraction > 0, config.activations == "disk"
    if not moments and not activations:
        return Disk(None, None, None)
    temporary = Path(tempfile.mkdtemp(prefix="ondevice-offload-")) if config.disk_folder is None else None
    folder = temporary or Path(str(config.disk_folder))
    if not ranks.single:
        folder = folder / f"rank-{ranks.rank}"
    disk = Disk(None, DiskActivations(folder, config.timeout_s) if activations else None, temporary)
    try:
        disk.moments = DiskMoments(owned, config, folder, timeline) if moments else None
    except BaseException:
        disk.close()
        raise
    return disk
