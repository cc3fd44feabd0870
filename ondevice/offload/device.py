"""The one file that knows the accelerator: streams, events, pinned memory; and the same interface in order on a CPU.

Untested beyond NVIDIA: on AMD, `torch.cuda` is HIP and the same calls exist.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from ondevice.core.errors import DoesNotFitError
from ondevice.offload.drive import buffer

Lane = Literal["compute", "h2d", "d2h", "comm"]
"""`comm`: what several ranks do together."""
BUS: tuple[Lane, ...] = ("h2d", "d2h")
SPIN_CYCLES = 50_000_000
MEASURED_BYTES = 64 << 20
SHORTEST_S = 5e-6
"""Less than a spinning kernel's start."""
MEASURED_S = 2e-3
"""A slow copy that takes so long says what the rates are now; in shorter ones the starts count too much."""


class Event(Protocol):
    """A point in a lane."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block this thread until it is reached; other threads run on."""
        ...


class Device(Protocol):
    """The device that the engine computes on. All calls but `Event.wait` return at once."""

    type: str

    def record(self, lane: Lane) -> Event: ...

    def hold(self, lane: Lane, event: Event) -> None:
        """Let all work that is put into `lane` from now on start after `event`."""
        ...

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None: ...

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Put the work of this thread inside the context into `lane`."""
        ...

    def enter(self) -> None:
        """Let the running thread use this device; a new thread begins with the first one."""
        ...

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory that copies run through without a stop in between."""
        ...

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def seconds(self, event: Event) -> float:
        """Return the time at which a reached event was reached, on `time.perf_counter`'s clock."""
        ...

    def segments(self) -> int:
        """Return how many segments of the device's memory the allocator holds."""
        ...

    def peak_bytes(self) -> int: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class _CpuEvent:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class CpuDevice:
    """Every call runs where it is made, in order: the engine's logic and its threads without an accelerator."""

    type = "cpu"

    def record(self, lane: Lane) -> Event:
        return _CpuEvent()

    def hold(self, lane: Lane, event: Event) -> None:
        return

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        return nullcontext()

    def enter(self) -> None:
        return

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def seconds(self, event: Any) -> float:
        return event.at

    def segments(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def synchronize(self) -> None:
        return

    def close(self) -> None:
        return


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, event: _CudaEvent) -> float:
        """Return seconds from `event`, both reached, at least the timer's 1 us; `Device.seconds` has fewer digits the
        longer a run is."""
        return max(1e-6, event.event.elapsed_time(self.event) / 1000)


class CudaDevice:
    """Two copy streams, and one for ranks, beside the current one."""

    type = "cuda"

    def __init__(self, index: int | None = None) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", self.index)
        with torch.cuda.device(self.index):
            self.streams = {
                "compute": torch.cuda.current_stream(),
                "h2d": torch.cuda.Stream(),
                "d2h": torch.cuda.Stream(),
                "comm": torch.cuda.Stream(),
            }
            self.base = _CudaEvent(self.streams["compute"])
            self.base.wait()
        self.base_s = time.perf_counter()

    def record(self, lane: Lane) -> _CudaEvent:
        return _CudaEvent(self.streams[lane])

    def hold(self, lane: Lane, event: Any) -> None:
        self.streams[lane].wait_event(event.event)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.streams[lane]):
            target.copy_(source, non_blocking=True)

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.streams[lane])

    def enter(self) -> None:
        torch.cuda.set_device(self.index)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return locked in place: torch's own pinned allocator rounds up to a power of two.

        Raises:
            DoesNotFitError: the system does not give or lock so much memory.
        """
        return buffer(max(1, numel * dtype.itemsize), pin=True).view(dtype)[:numel]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def seconds(self, event: Any) -> float:
        return self.base_s + self.base.event.elapsed_time(event.event) / 1000

    def segments(self) -> int:
        return torch.cuda.memory_stats(self.index)["segment.all.current"]

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def close(self) -> None:
        """Wait for all lanes; host memory is unlocked with its last user."""
        self.synchronize()


class _SlowBus:
    """`device`, whose copies over the bus take their time; here they block the caller, as all of a CPU's do.

    One copy after the other in each direction, whichever threads they are from.
    """

    def __init__(self, device: Device, gb_per_s: float) -> None:
        self.device, self.bytes_s = device, gb_per_s * 1e9
        self.locks = {lane: threading.Lock() for lane in BUS}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        if lane not in self.locks:
            self.device.copy(lane, target, source)
            return
        with self.locks[lane]:
            self._copy(lane, target, source, source.numel() * source.element_size())

    def _copy(self, lane: Lane, target: Tensor, source: Tensor, size_bytes: int) -> None:
        end_s = time.perf_counter() + size_bytes / self.bytes_s
        self.device.copy(lane, target, source)
        missing_s = end_s - time.perf_counter()
        if missing_s > 0:
            time.sleep(missing_s)


class _SlowCudaBus(_SlowBus):
    """A kernel spins in the lane for the time that is missing; the calling thread goes on.

    Its length is set before the copy runs, by the last copies' rates: under load the clock falls, and host memory is
    shared with the update.
    """

    device: CudaDevice

    def __init__(self, device: CudaDevice, gb_per_s: float) -> None:
        super().__init__(device, gb_per_s)
        rates, cycles_s = _measured(device.index)
        self.rates: dict[Lane, deque[float]] = {lane: deque([rates[lane]], 9) for lane in BUS}
        self.cycles_s: dict[Lane, deque[float]] = {lane: deque([cycles_s], 9) for lane in BUS}
        self.running: dict[Lane, deque[Any]] = {lane: deque() for lane in BUS}
        # The spinning kernel comes before the blocks of a matrix product that wait for a place.
        device.streams |= {lane: torch.cuda.Stream(device.device, priority=-1) for lane in BUS}

    def _copy(self, lane: Lane, target: Tensor, source: Tensor, size_bytes: int) -> None:
        self._update_rates(lane)
        started = self.device.record(lane)
        self.device.copy(lane, target, source)
        copied = self.device.record(lane)
        whole_s, cycles = size_bytes / self.bytes_s, 0
        missing_s = whole_s - size_bytes / statistics.median(self.rates[lane])
        if missing_s > SHORTEST_S:
            cycles = int(missing_s * statistics.median(self.cycles_s[lane]))
            with self.device.on(lane):
                torch.cuda._sleep(cycles)
        if whole_s > MEASURED_S:
            self.running[lane].append(
                (started, copied, self.device.record(lane), size_bytes, cycles)
            )

    def _update_rates(self, lane: Lane) -> None:
        """Rates of the copies and spins that have ended; the median leaves out those that the host put in late."""
        running = self.running[lane]
        while running and running[0][2].done():
            started, copied, ended, size_bytes, cycles = running.popleft()
            self.rates[lane].append(size_bytes / copied.since(started))
            if cycles:
                self.cycles_s[lane].append(cycles / ended.since(copied))


@cache
def _measured(index: int) -> tuple[dict[Lane, float], float]:
    """Bytes a second of the real bus by lane, and cycles a second of a spinning kernel; once a process and GPU."""
    device = CudaDevice(index)
    host, device_buffer = (
        device.pinned(MEASURED_BYTES, torch.uint8),
        device.empty(MEASURED_BYTES, torch.uint8),
    )

    def seconds(lane: Lane, run: Callable[[], None]) -> float:
        run()  # the clock rises, and the bus wakes up
        started = device.record(lane)
        run()
        ended = device.record(lane)
        ended.wait()
        return ended.since(started)

    with device.on("h2d"):
        cycles_s = SPIN_CYCLES / seconds("h2d", lambda: torch.cuda._sleep(SPIN_CYCLES))
    device.synchronize()
    h2d_s = seconds("h2d", lambda: device.copy("h2d", device_buffer, host))
    d2h_s = seconds("d2h", lambda: device.copy("d2h", host, device_buffer))
    return {"h2d": MEASURED_BYTES / h2d_s, "d2h": MEASURED_BYTES / d2h_s}, cycles_s


@contextmanager
def memory_errors(doing: str, hint: str) -> Iterator[None]:
    """Turn the accelerator's running out of memory, or the CPU's, into an error that says what to change.

    Raises:
        DoesNotFitError: instead of torch's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0].split(". GPU")[0]
        raise DoesNotFitError(
            f"{doing} does not fit the accelerator", received=first, hint=hint
        ) from error
    except RuntimeError as error:  # the CPU's allocator has no error of its own
        if "can't allocate memory" not in str(error):
            raise
        first = str(error).splitlines()[0]
        raise DoesNotFitError(
            f"{doing} does not fit the memory", received=first, hint=hint
        ) from error


def open_device(name: str) -> Device:
    """Return `cpu`, or `cuda` with an optional index."""
    device = torch.device(name)
    return CpuDevice() if device.type == "cpu" else CudaDevice(device.index)


def throttled(device: Device, gb_per_s: float | None) -> Device:
    """Return a device just opened, with a simulated bus: a copy in lane "h2d" or "d2h" takes at least bytes / (gb_per_s
    * 1e9) seconds in its lane, each direction by itself. None gives the device itself.

    On CUDA a copy is right within some percent from about 1 MB on; a smaller one may be faster than the limit says.
    """
    if gb_per_s is None:
        return device
    slow = (
        _SlowCudaBus(device, gb_per_s)
        if isinstance(device, CudaDevice)
        else _SlowBus(device, gb_per_s)
    )
    return cast("Device", slow)
