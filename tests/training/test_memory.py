"""The peak sees memory that is gone again, and forgets what was before it."""

from __future__ import annotations

import mmap
import time

import numpy as np

from ondevice.training import metrics as memory

SIZE = 96 << 20


def ones() -> np.ndarray:
    """New pages of the system, that go back to it: an allocator may give pages that other tests have touched."""
    block = np.frombuffer(
        mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    block[:] = 1
    return block


def test_the_peak_counts_what_was_freed_and_not_what_was_before() -> None:
    early = ones()
    del early
    before = memory.resident_bytes()
    peak = memory.PeakMemory()
    start = peak.resident_bytes()
    if memory.reset_peak():
        assert start < before + SIZE // 2
    block = ones()
    held = memory.resident_bytes()
    del block
    assert held - before > SIZE * 0.9
    assert peak.resident_bytes() >= held - (8 << 20)
    assert peak.device_bytes() is None or peak.device_bytes() >= 0


def test_without_a_mark_that_can_be_reset_the_peak_is_what_was_seen(monkeypatch) -> None:
    mark = memory._high_water_bytes()
    monkeypatch.setattr(memory, "reset_peak", lambda: False)
    monkeypatch.setattr(memory, "_high_water_bytes", lambda: mark)
    peak = memory.PeakMemory()
    assert 0 < peak.resident_bytes() <= mark + (8 << 20)
    monkeypatch.setattr(memory, "_high_water_bytes", lambda: mark + 5)
    assert peak.resident_bytes() == mark + 5


def test_anonymous_memory_is_sampled() -> None:
    with memory.AnonymousPeak(0.001) as peak:
        block, until = ones(), time.monotonic() + 120
        while peak.peak_bytes - peak.start_bytes <= SIZE * 0.9 and time.monotonic() < until:
            time.sleep(0.005)  # until its thread has had a turn
        del block
    assert peak.peak_bytes - peak.start_bytes > SIZE * 0.9
