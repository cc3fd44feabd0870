"""The device that an engine computes on: lanes, events and pinned memory; and the record of a step.

On the CPU everything runs in order; on an accelerator, in CUDA's streams. Untested beyond NVIDIA: on
AMD, `torch.cuda` is HIP and the same calls exist. A `Timeline` records spans by lane.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ondevice.core.errors import DoesNotFitError

Lane = Literal["compute", "h2d", "d2h", "comm"]
"""`comm`: what several ranks do together."""


class Event:
    """A point in a lane; on the CPU it is reached at once."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Block this thread until it is reached; other threads run on."""


class Device:
    """The device that the engine computes on; here the CPU, on which every call runs in order.

    On others all calls but `Event.wait` return at once."""

    type = "cpu"

    def record(self, lane: Lane) -> Event:
        return Event()

    def hold(self, lane: Lane, event: Event) -> None:
        """Let all work that is put into `lane` from now on start after `event`."""

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Put the work of this thread inside the context into `lane`."""
        return nullcontext()

    def enter(self) -> None:
        """Let the running thread use this device; a new thread begins with the first one."""

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory that copies run through without a stop in between."""
        return torch.zeros(numel, dtype=dtype)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def seconds(self, event: Any) -> float:
        """Return the time at which a reached event was reached, on `time.perf_counter`'s clock."""
        return event.at

    def segments(self) -> int:
        """Return how many segments of the device's memory the allocator holds."""
        return 0

    def peak_bytes(self) -> int:
        return 0

    def synchronize(self) -> None:
        return

    def close(self) -> None:
        return


class _CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, event: _CudaEvent) -> float:
        """Return seconds since `event`, at least the timer's 1 us; both have been reached.

        `Device.seconds` loses digits the longer a run is."""
        return max(1e-6, event.event.elapsed_time(self.event) / 1000)


class CudaDevice(Device):
    """Two copy streams and one for ranks, in addition to the current one."""

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


def open_device(name: str) -> Device:
    """Open `cpu`, or `cuda` with an optional index."""
    device = torch.device(name)
    if device.type == "cpu":
        return Device()
    return CudaDevice(device.index)


BLOCK_BYTES = 4096
"""Direct I/O needs offsets, lengths and addresses at multiples of the drive's block."""


def _cudart() -> Any:
    return torch.cuda.cudart()


class _Pages(mmap.mmap):
    """Anonymous private memory that takes its page lock back before it is unmapped."""

    unlock: Callable[[], object] | None = None
    """Takes CUDA's page lock back; bound when it was taken, as modules are gone when a process
    ends."""

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def buffer(size_bytes: int, pin: bool) -> torch.Tensor:
    """Return a zeroed uint8 CPU tensor [`size_bytes` rounded up to 4096] whose address is a
    multiple of 4096.

    Unlike torch's own pinned memory it is not rounded up to a power of two, and it goes back to the
    system with the last tensor that views it. Finish the copies to and from the GPU before that.

    Args:
        size_bytes: at least 1.
        pin: page-lock it, so that the GPU copies without a staging buffer. Ignored without CUDA.

    Raises:
        DoesNotFitError: the system has not that much memory, or CUDA cannot lock it.
    """
    if size_bytes < 1:
        raise ValueError(f"a buffer needs at least 1 byte, not {size_bytes}")
    size_bytes = round_up(size_bytes)
    try:
        pages = _Pages(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _no_memory(size_bytes, error.strerror or str(error)) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            pass
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if pin and torch.cuda.is_available():
        code = _cudart().cudaHostRegister(tensor.data_ptr(), size_bytes, 0)
        if int(code) != 0:
            raise _no_memory(size_bytes, f"cudaHostRegister: {code}")
        pages.unlock = partial(_cudart().cudaHostUnregister, tensor.data_ptr())
    return tensor


def round_up(size_bytes: int) -> int:
    """Return `size_bytes` up to the next whole block."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _no_memory(size_bytes: int, why: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"no memory for an offload buffer of {size_bytes / 2**20:.0f} MiB",
        received=why,
        hint="close other programs, or move more of the optimizer state to the disk",
    )


Spans = list[tuple[str, str, float, float, int]]
"""Lane, name, start and end in seconds of `time.perf_counter`, bytes."""


@dataclass
class _Span:
    lane: str
    name: str
    start: Any
    end: Any
    size: int = 0


class Timeline:
    """Spans of the running step; those of the accelerator are events until they are asked for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.spans: deque[_Span] = deque()  # its ends are safe between threads

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Add a span of a host thread, seconds of `time.perf_counter`."""
        self.spans.append(_Span(lane, name, start_s, end_s))

    def span(self, lane: str, name: str, start: Event, end: Event, size_bytes: int = 0) -> None:
        """Add a span of the accelerator."""
        self.spans.append(_Span(lane, name, start, end, size_bytes))

    def drain(self) -> Spans:
        """Return every span that has ended: lane, name, start and end in seconds, bytes; the others
        stay."""
        ended: Spans = []
        for _ in range(len(self.spans)):
            span = self.spans.popleft()
            if isinstance(span.start, float):
                ended.append((span.lane, span.name, span.start, span.end, span.size))
            elif span.end.done():
                start, end = (self.device.seconds(event) for event in (span.start, span.end))
                ended.append((span.lane, span.name, start, end, span.size))
            else:
                self.spans.append(span)
        return ended


@contextmanager
def memory_errors(doing: str, hint: str) -> Iterator[None]:
    """Turn an out-of-memory error of the accelerator or the CPU into one that says what to change.

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
