"""Simulated buses: copies that take as long as over a slow one."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ondevice.offload.device import CudaDevice, Device, Lane

BUS: tuple[Lane, ...] = ("h2d", "d2h")
SPIN_CYCLES = 50_000_000
MEASURED_BYTES = 64 << 20
SHORTEST_S = 5e-6
"""Less than a spinning kernel's start."""
MEASURED_S = 2e-3
"""A copy this long measures the current rates; in shorter ones the start counts too much."""


class _SlowBus:
    """A `device` with a slow bus: a copy blocks the caller, as all work of a CPU does.

    One copy after the other in each direction, whichever threads they are from.
    """

    def __init__(self, device: Device, gb_per_s: float) -> None:
        self.device = device
        self.bytes_s = gb_per_s * 1e9
        self.locks = {lane: threading.Lock() for lane in BUS}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        if lane not in self.locks:
            self.device.copy(lane, target, source)
            return
        with self.locks[lane]:
            self._copy(lane, target, source, source.nbytes)

    def _copy(self, lane: Lane, target: Tensor, source: Tensor, size_bytes: int) -> None:
        end_s = time.perf_counter() + size_bytes / self.bytes_s
        self.device.copy(lane, target, source)
        missing_s = end_s - time.perf_counter()
        if missing_s > 0:
            time.sleep(missing_s)


class _SlowCudaBus(_SlowBus):
    """A kernel spins in the lane for the time that is missing; the calling thread goes on.

    Its length is set before the copy runs, by the last copies' rates: under load the clock falls,
    and host memory is shared with the update."""

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
        whole_s = size_bytes / self.bytes_s
        cycles = 0
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
        """Rates of the finished copies and spins; the median leaves out those that the host queued
        late."""
        running = self.running[lane]
        while running and running[0][2].done():
            started, copied, ended, size_bytes, cycles = running.popleft()
            self.rates[lane].append(size_bytes / copied.since(started))
            if cycles:
                self.cycles_s[lane].append(cycles / ended.since(copied))


@cache
def _measured(index: int) -> tuple[dict[Lane, float], float]:
    """Bytes a second of the real bus by lane, and cycles a second of a spinning kernel; cached."""
    device = CudaDevice(index)
    host = device.pinned(MEASURED_BYTES, torch.uint8)
    device_buffer = device.empty(MEASURED_BYTES, torch.uint8)

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


def throttled(device: Device, gb_per_s: float) -> Device:
    """Return a device just opened, with a simulated bus.

    A copy in lane "h2d" or "d2h" takes at least bytes / (gb_per_s * 1e9) seconds in its lane.

    On CUDA, copies from about 1 MB on are right within some percent; smaller ones may be faster.
    """
    if isinstance(device, CudaDevice):
        slow = _SlowCudaBus(device, gb_per_s)
    else:
        slow = _SlowBus(device, gb_per_s)
    return cast("Device", slow)
