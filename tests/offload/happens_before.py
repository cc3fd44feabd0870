"""A checker of order between threads and lanes: whatever touches memory must happen after what conflicts with it.

Every host thread, every lane of the device and every transfer to or from a disk has a vector clock. An event, a task, a
buffer of a pool carry the clock of whoever gave them, and who waits for them takes it over; nothing else orders two
actors, however the schedule of this run came out. So what two threads put into one lane is in order only where one of
the threads knew of the other's. For each byte range the last writer and the readers since are kept:
an access that does not happen after a conflicting one is a race, with the names of both. So a `hold` that is missing
is found on a CPU, where every copy runs at once and in order.

What counts as an access: copies of the device, every PyTorch kernel of the main thread (on the compute lane, or the
thread's own where the memory is the host's), the updates and row operations on the host, reads and writes of a disk
file, and, for several ranks, the communicator itself. Memory that is freed while a copy may still read it counts, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tests.offload.checked_device import CheckedDevice, CheckedRanks, Kernels, leave_out_hold
from tests.offload.checked_host import WRAPPED, watch_threads
from tests.offload.clocks import Checker

__all__ = ["CheckedRanks", "Checker", "checking", "leave_out_hold", "names"]


@contextmanager
def checking(monkeypatch: Any, *modules: Any) -> Iterator[tuple[Checker, CheckedDevice]]:
    """A checker, and the device to open engines on. `modules` are those with threads, updates and disk files of
    engines."""
    checker = Checker()
    watch_threads(checker, monkeypatch, modules)
    for module in modules:
        for name in WRAPPED:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, WRAPPED[name](checker, getattr(module, name)))
    with Kernels(checker, main=True):
        yield checker, CheckedDevice(checker)


def names(checker: Checker, thing: Any, path: str, depth: int = 4) -> None:
    """Give memory the names of the attributes that hold it."""
    if isinstance(thing, Tensor):
        checker.name(thing, path)
    elif depth and isinstance(thing, (list, tuple)):
        for number, one in enumerate(thing):
            names(checker, one, f"{path}[{number}]", depth - 1)
    elif depth and isinstance(thing, dict):
        for key, one in thing.items():
            names(checker, one, f"{path}[{key}]", depth - 1)
    elif depth and type(thing).__module__.startswith("ondevice.") and hasattr(thing, "__dict__"):
        for key, one in vars(thing).items():
            if key not in ("family", "config", "units", "device", "timeline", "watch"):
                names(checker, one, f"{path}.{key}", depth - 1)
