"""The one file that knows the accelerator: streams, events, pinned memory; and the same interface in order on a CPU.

Untested beyond NVIDIA: on AMD, `torch.cuda` is HIP and the same calls exist.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ondevice.errors import DoesNotFitError
from ondevice.offload.storage import buffer

Lane = Literal["compute", "h2d", "d2h"]


class Event(Protocol):
    """A point in a lane."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block this thread until it is reached; other threads run on."""
        ...


class Device(Protocol):
    """Where the engine computes. All calls but `Event.wait` return at once."""

    type: str

    def record(self, lane: Lane) -> Event: ...

    def hold(self, lane: Lane, event: Event) -> None:
        """What is put into `lane` from now on starts after `event`."""
        ...

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None: ...

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """What this thread computes inside goes into `lane`."""
        ...

    def enter(self) -> None:
        """Let the running thread use this device; a new thread begins with the first one."""
        ...

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory that copies run through without a stop in between."""
        ...

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def seconds(self, event: Event) -> float:
        """When a reached event was reached, on `time.perf_counter`'s clock."""
        ...

    def segments(self) -> int:
        """How often the allocator has taken memory from the device and still holds it."""
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


class CudaDevice:
    """Two copy streams beside the current one."""

    type = "cuda"

    def __init__(self, index: int | None = None) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", self.index)
        with torch.cuda.device(self.index):
            self.streams = {
                "compute": torch.cuda.current_stream(),
                "h2d": torch.cuda.Stream(),
                "d2h": torch.cuda.Stream(),
            }
            self.base = _CudaEvent(self.streams["compute"])
            self.base.wait()
        self.base_s = time.perf_counter()

    def record(self, lane: Lane) -> Event:
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
        """Locked in place: torch's own pinned allocator rounds up to a power of two.

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


@contextmanager
def memory_errors(doing: str, hint: str) -> Iterator[None]:
    """Turn the accelerator's running out of memory into an error that says what to change.

    Raises:
        DoesNotFitError: instead of torch's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0].split(". GPU")[0]
        raise DoesNotFitError(f"{doing} does not fit the accelerator", received=first, hint=hint) from error


def open_device(name: str) -> Device:
    """`cpu`, or `cuda` with an optional index."""
    device = torch.device(name)
    return CpuDevice() if device.type == "cpu" else CudaDevice(device.index)
