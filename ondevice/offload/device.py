"""The device that an engine computes on: lanes, events and pinned memory; and the record of a step.

The interface, and the CPU, on which everything runs in order; `cuda` has the accelerator. A
`Timeline` records spans by lane, `overlap` sums them up, and `chrome_trace` writes them.
"""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ondevice.offload.device import Device, Event

Lane = Literal["compute", "h2d", "d2h", "comm"]
"""`comm`: what several ranks do together."""


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
    """Every call runs at once, in order: the engine's logic and threads without an accelerator."""

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


Spans = list[tuple[str, str, float, float, int]]
"""Lane, name, start and end in seconds of `time.perf_counter`, bytes."""
LANES = ("forward", "backward", "h2d", "d2h", "comm", "update", "disk")


@dataclass(frozen=True)
class Overlap:
    """One step, seconds and bytes. Sums are over what a lane was busy, not over wall time.

    Attributes:
        forward_s, backward_s: of the accelerator's computation; recomputation counts as backward.
        h2d_s, d2h_s: of copies; update_s: of AdamW on the host; disk_s: wall time with
            transfers to or from the disk under way.
        wall_s: from the step's begin to the next one's.
        idle_s: wall time in which the accelerator computed nothing.
        hiding_factor: backward_s / (d2h_s + max(update_s, disk_s)) (SlideFormer section 3.1); from
            1 on the update is hidden.
        bound: the lane that was busy longest.
        comm_s: of gathers and sums over ranks, including waits for other ranks; 0 in one process.
        simulated_gb_per_s: GB/s of a simulated bus (`bus_limit_gb_per_s`); None is the real one.
    """

    forward_s: float
    backward_s: float
    h2d_s: float
    d2h_s: float
    update_s: float
    disk_s: float
    wall_s: float
    idle_s: float
    hiding_factor: float
    h2d_bytes: int
    d2h_bytes: int
    bound: str
    comm_s: float = 0.0
    simulated_gb_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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


def overlap(spans: Spans, wall_s: float, simulated_gb_per_s: float | None = None) -> Overlap:
    """Sum up the spans of one step."""
    busy: dict[str, float] = dict.fromkeys(LANES, 0.0)
    sizes = {"h2d": 0, "d2h": 0}
    for lane, _, start, end, size in spans:
        busy[lane] += (end - start) * (lane != "disk")
        if lane in sizes:
            sizes[lane] += size
    busy["disk"] = _covered([(start, end) for lane, _, start, end, _ in spans if lane == "disk"])
    computed = busy["forward"] + busy["backward"]
    groups = {
        "compute": computed,
        **{lane: busy[lane] for lane in ("h2d", "d2h", "comm", "update", "disk")},
    }
    leaving = busy["d2h"] + max(busy["update"], busy["disk"])
    return Overlap(
        forward_s=busy["forward"],
        backward_s=busy["backward"],
        h2d_s=busy["h2d"],
        d2h_s=busy["d2h"],
        update_s=busy["update"],
        disk_s=busy["disk"],
        wall_s=wall_s,
        idle_s=max(0.0, wall_s - computed),
        hiding_factor=busy["backward"] / leaving if leaving else float("inf"),
        h2d_bytes=sizes["h2d"],
        d2h_bytes=sizes["d2h"],
        bound=max(groups, key=lambda lane: groups[lane]),
        comm_s=busy["comm"],
        simulated_gb_per_s=simulated_gb_per_s,
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one span runs: the disk works at several transfers at once."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def chrome_trace(spans: Spans, path: Path) -> None:
    """Write spans for chrome://tracing or Perfetto, microseconds from the first."""
    first = min((span[2] for span in spans), default=0.0)
    events = [
        {
            "name": name, "cat": lane, "ph": "X", "pid": 0, "tid": LANES.index(lane),
            "ts": round((start - first) * 1e6, 1), "dur": round((end - start) * 1e6, 1), "args": {"bytes": size},
        }
        for lane, name, start, end, size in spans
    ]  # fmt: skip
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(LANES)
    ]
    Path(path).write_text(json.dumps({"traceEvents": [*names, *events]}) + "\n", encoding="utf-8")
