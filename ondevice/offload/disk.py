"""The tier on a local disk: inputs of layers, and states of units (`disk_states`); SlideFormer
sections 3.3 and 4.4."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ondevice.offload.device import buffer
from ondevice.offload.disk_states import DiskStates, timed
from ondevice.offload.storage import TierFile
from ondevice.offload.store import resident_units
from ondevice.offload.units import SINGLE, Ranks

if TYPE_CHECKING:
    from ondevice.offload.device import Device, Timeline
    from ondevice.offload.units import Units
    from ondevice.offload.worker import Watch


class DiskActivations:
    """Layers' inputs in a file: a ring of host buffers between the accelerator and the disk."""

    def __init__(self, folder: Path, timeline: Timeline, watch: Watch) -> None:
        self.folder = folder
        self.timeline = timeline
        self.watch = watch
        self.file: TierFile | None = None

    def begin(self, count: int, size_bytes: int, buffers: int, pin: bool) -> list[Tensor]:
        """Make room for `count` inputs; gives the host buffers, uint8: input `at` uses number `at`
        modulo their count."""
        if self.file is not None:
            self.file.close()
        self.file = TierFile(
            self.folder, "activations", [size_bytes] * count, timeout_s=self.watch.timeout_s
        )
        self.ring = [buffer(size_bytes, pin=pin) for _ in range(buffers)]
        self.futures: list[Future[None] | None] = [None] * buffers
        self.holds: list[int | None] = [None] * buffers
        return self.ring

    def place(self, at: int) -> None:
        """Give input `at` its buffer, once the buffer's previous input is on the disk."""
        self._wait(at % len(self.ring))
        self.holds[at % len(self.ring)] = at

    def write(self, at: int) -> None:
        """Write an input that is in its buffer."""
        if self.file is not None:
            turn = at % len(self.ring)
            self.futures[turn] = timed(
                self.timeline, "activations", self.file.write(at, self.ring[turn])
            )

    def read(self, at: int) -> None:
        """Begin to bring an input back, unless its buffer still has it; the buffer must be free."""
        turn = at % len(self.ring)
        if self.file is not None and self.holds[turn] != at:
            self._wait(turn)
            self.holds[turn] = at
            self.futures[turn] = timed(
                self.timeline, "activations", self.file.read(at, self.ring[turn])
            )

    def wait(self, at: int) -> None:
        """Wait until the input is in its buffer."""
        self._wait(at % len(self.ring))

    def _wait(self, turn: int) -> None:
        future = self.futures[turn]
        self.futures[turn] = None
        if future is not None:
            self.watch.result(future, "transfer of a layer's input to or from the disk")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


@dataclass
class Disk:
    """The disk tier of an engine: states of units, inputs of layers, or both."""

    states: DiskStates | None
    activations: DiskActivations | None
    temporary: Path | None

    def close(self) -> None:
        """Remove the files; the last writes need not succeed."""
        with ExitStack() as closing:
            if self.temporary is not None:
                closing.callback(shutil.rmtree, self.temporary, ignore_errors=True)
            if self.activations is not None:
                closing.callback(self.activations.close)
            if self.states is not None:
                closing.callback(self.states.close)


def open_disk(
    units: Units,
    config: Any,
    device: Device,
    timeline: Timeline,
    watch: Watch,
    ranks: Ranks = SINGLE,
) -> Disk:
    """Return the files that `config` asks for; see `EngineConfig.uses_disk`.

    Raises:
        StorageError: the disk has not enough room for them.
    """
    kept = resident_units(units, config)
    owned = [ranks.shard(unit) for unit in units.all if unit.kind != "rest" and unit not in kept]
    states = config.disk_fraction > 0 and bool(owned)
    activations = config.activations == "disk"
    if config.disk_folder is None:
        temporary = Path(tempfile.mkdtemp(prefix="ondevice-offload-"))
    else:
        temporary = None
    folder = temporary or Path(str(config.disk_folder))
    if not ranks.single:
        folder = folder / f"rank-{ranks.rank}"
    disk = Disk(None, DiskActivations(folder, timeline, watch) if activations else None, temporary)
    try:
        if states:
            disk.states = DiskStates(owned, config, folder, device, timeline, watch)
    except BaseException:
        disk.close()
        raise
    return disk
