"""Accelerators that behave as badly as their interface allows."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from torch import Tensor

from ondevice.offload.device import Device

LANES = ("h2d", "d2h")


class LateEvent:
    """A point in a lane of copies: reached once somebody cannot do without it."""

    def __init__(self, device: LateDevice, lane: str) -> None:
        self.device, self.lane = device, lane
        self.at = 0.0

    def done(self) -> bool:
        return self.at > 0

    def wait(self) -> None:
        self.device.run_until(self)


class LateDevice(Device):
    """Computes at once, and copies as late as the events allow: what was read or written too early shows in the bits.

    A copy runs when somebody waits for an event behind it, or computation is held by one.
    """

    def __init__(self) -> None:
        self.queues: dict[str, deque[Any]] = {lane: deque() for lane in LANES}
        self.lock = threading.RLock()
        self.late = 0

    def record(self, lane: Any) -> Any:
        if lane == "compute":
            return super().record(lane)
        event = LateEvent(self, lane)
        with self.lock:
            self.queues[lane].append(event)
        return event

    def hold(self, lane: Any, event: Any) -> None:
        if lane == "compute":
            event.wait()
        else:
            with self.lock:
                self.queues[lane].append(event.wait)

    def copy(self, lane: Any, target: Tensor, source: Tensor) -> None:
        if lane == "compute":
            target.copy_(source)
            return
        with self.lock:
            self.queues[lane].append(lambda: target.copy_(source))

    def run_until(self, event: LateEvent) -> None:
        with self.lock:
            while not event.done():
                first = self.queues[event.lane].popleft()
                if isinstance(first, LateEvent):
                    first.at = time.perf_counter()
                else:
                    self.late += 1
                    first()

    def synchronize(self) -> None:
        for lane in LANES:
            self.record(lane).wait()


class LaggingEvent:
    """Reached at a time of `time.perf_counter`."""

    def __init__(self, at: float) -> None:
        self.at = at

    def done(self) -> bool:
        return time.perf_counter() >= self.at

    def wait(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))


class LaggingDevice(Device):
    """Says that a computation is done `lag_s` after it was asked for, as where computing is slower than copies."""

    def __init__(self, lag_s: float) -> None:
        self.lag_s = lag_s

    def record(self, lane: Any) -> Any:
        return (
            LaggingEvent(time.perf_counter() + self.lag_s)
            if lane == "compute"
            else super().record(lane)
        )


class NumberedDevice(Device):
    """Gives every event and every copy out of the accelerator a number, in the order in which they are asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()
        self.held = 0
        self.copies: list[tuple[int, int, int]] = []
        """Out of the accelerator: number of the last computation that d2h waits for, elements, and the target's
        storage."""

    def number(self) -> int:
        with self.lock:
            self.count += 1
            return self.count

    def record(self, lane: Any) -> Any:
        event: Any = super().record(lane)
        event.number = self.number() if lane == "compute" else 0
        return event

    def hold(self, lane: Any, event: Any) -> None:
        if lane == "d2h":
            self.held = max(self.held, event.number)

    def copy(self, lane: Any, target: Tensor, source: Tensor) -> None:
        super().copy(lane, target, source)
        if lane == "d2h":
            self.copies.append((self.held, source.numel(), target.untyped_storage().data_ptr()))
