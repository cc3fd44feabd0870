"""A simulated bus takes its time, in its own lane alone, and changes no bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.methods.slideformer.config import SlideformerConfig  # noqa: E402
from ondevice.offload import bus  # noqa: E402
from ondevice.offload import calibrate as calibrate_module  # noqa: E402
from ondevice.offload.bus import throttled  # noqa: E402
from ondevice.offload.calibrate import calibrate  # noqa: E402
from ondevice.offload.device import CudaDevice, Device, open_device  # noqa: E402
from ondevice.training.progress import describe_overlap  # noqa: E402
from tests.methods.slideformer.reference import batches, differing, outcome, run  # noqa: E402

SIZE = 64_000_000


def two(size: int = 1000) -> tuple[Any, Any]:
    """A target of zeros and a source of ones, uint8 [size]."""
    return torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_a_limited_copy_takes_its_time_and_copies(lane: Any) -> None:
    device, (target, source) = throttled(Device(), 0.02), two(2_000_000)
    started = device.record(lane)
    device.copy(lane, target, source)
    ended = device.record(lane)
    assert torch.equal(target, source)
    assert device.seconds(ended) - device.seconds(started) > 0.0999


def test_a_copy_within_the_limit_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a copy below the limit nor one within the accelerator."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))
    target, source = two()
    throttled(Device(), 1e9).copy("h2d", target, source)
    throttled(Device(), 1e-9).copy("compute", target, source)
    assert torch.equal(target, source)


def test_a_slow_lane_does_not_delay_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one copy takes its time, another of that direction waits; computation and the other direction go on."""
    device, slow, release = throttled(Device(), 1e-6), threading.Event(), threading.Event()
    taken: list[str] = []  # whose copy had the lane, in order
    done: list[str] = []

    def sleep(seconds: float) -> None:
        assert 0 < seconds <= 1.0  # 1000 bytes at 1000 bytes/s
        name = threading.current_thread().name
        if name in ("first", "second"):
            taken.append(name)
            slow.set()
            assert release.wait(120)

    def copy() -> None:
        device.copy("h2d", *two())
        done.append(threading.current_thread().name)

    monkeypatch.setattr(time, "sleep", sleep)
    threads = [threading.Thread(target=copy, name=name) for name in ("first", "second")]
    threads[0].start()
    assert slow.wait(120)
    threads[1].start()
    for lane in ("compute", "d2h"):
        target, source = two()
        device.copy(lane, target, source)
        assert torch.equal(target, source)
    threads[1].join(0.05)  # had it not to wait, it would be in the lane by now
    assert taken == ["first"]
    assert done == []
    release.set()
    for thread in threads:
        thread.join(120)
    assert taken == ["first", "second"]
    assert sorted(done) == ["first", "second"]


@pytest.mark.parametrize(
    "config", [{}, {"micro_batch_size": 2, "disk_fraction": 0.5, "max_grad_norm": 0.1}], ids=str
)
def test_a_slow_bus_changes_no_bits(config: dict[str, Any]) -> None:
    data = batches(3, rows=3)
    losses, masters = outcome(config, "llama", {"layers": 3}, data)
    again = outcome({**config, "bus_limit_gb_per_s": 0.05}, "llama", {"layers": 3}, data)
    assert again[0] == losses
    assert differing(again[1], masters) == []


def test_the_report_says_that_the_bus_is_simulated(engine: Any) -> None:
    limit = 0.05
    by_name = {}
    for limited in (True, False):
        opened = engine({"bus_limit_gb_per_s": limit} if limited else {}, layers=3)
        run(opened, batches(1))
        for step, batch in enumerate(batches(2), 1):
            opened.flush()
            opened.step(*batch, step, 1e-3)
        by_name[limited] = opened.overlap
    slow, fast = by_name[True], by_name[False]
    assert slow.h2d_bytes > 0 < slow.d2h_bytes
    assert slow.h2d_s > 0.99 * slow.h2d_bytes / (limit * 1e9)
    assert slow.d2h_s > 0.99 * slow.d2h_bytes / (limit * 1e9)
    assert (slow.simulated_gb_per_s, fast.simulated_gb_per_s) == (limit, None)
    assert describe_overlap(slow.to_dict()).endswith("; simulated bus of 0.05 GB/s")
    real = fast.to_dict()
    assert "simulated" not in describe_overlap(real)
    del real["simulated_gb_per_s"]  # as in a log of an older version
    assert "simulated" not in describe_overlap(real)


class _Accelerator(Device):
    type = "another"


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [
        (Device, None, None),
        (Device, 3.0, 3e9),
        (_Accelerator, 1e-3, 1e6),
        (_Accelerator, 1e9, "measured"),
    ],
)
def test_predictions_use_the_slower_bus(
    kind: Any, limit: float | None, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_module, "open_device", lambda name: kind())
    monkeypatch.setattr(calibrate_module, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate_module, "UPDATE_NUMEL", 1 << 12)
    monkeypatch.setattr(calibrate_module, "MATRIX", 64)
    rates = calibrate(
        SlideformerConfig(bus_limit_gb_per_s=limit, optimizer="torch", threads=1), "cpu"
    )
    for rate in (rates.h2d_bytes_s, rates.d2h_bytes_s):
        assert 1e6 < rate < 1e18 if expected == "measured" else rate == expected  # type: ignore[operator]


class _Point:
    def __init__(self, at: float) -> None:
        self.at = at

    def done(self) -> bool:
        return True

    def since(self, event: _Point) -> float:
        return self.at - event.at


class _Streams(CudaDevice):
    """CUDA's lanes on a clock of their own: copies at `bytes_s`, spins at `cycles_s`."""

    def __init__(self) -> None:
        self.index, self.device, self.streams = 0, torch.device("cuda", 0), {}
        self.clock, self.lane = {"h2d": 0.0, "d2h": 0.0}, ""
        self.bytes_s, self.cycles_s = 50e9, 2e9

    def record(self, lane: Any) -> Any:
        return _Point(self.clock[lane])

    def copy(self, lane: Any, target: Any, source: Any) -> None:
        self.clock[lane] += source.numel() / self.bytes_s

    @contextmanager
    def on(self, lane: Any) -> Iterator[None]:
        self.lane = lane
        yield

    def spin(self, cycles: int) -> None:
        self.clock[self.lane] += cycles / self.cycles_s


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_simulated_time_follows_the_measured_rates(
    lane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, source = _Streams(), torch.zeros(SIZE, dtype=torch.uint8)
    monkeypatch.setattr(bus, "_measured", lambda index: ({"h2d": 50e9, "d2h": 50e9}, 2e9))
    monkeypatch.setattr(torch.cuda, "_sleep", real.spin)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    device = throttled(real, 10.0)

    def seconds(data: Any = source) -> float:
        before = real.clock[lane]
        device.copy(lane, source, data)
        return real.clock[lane] - before

    assert seconds() == pytest.approx(6.4e-3)
    assert seconds(source[:1_000_000]) == pytest.approx(1e-4)
    real.cycles_s, real.bytes_s = 1.4e9, 35e9
    times = [seconds() for _ in range(12)]
    assert times[0] > 7.5e-3 and times[-1] == pytest.approx(6.4e-3)
    real.bytes_s = 5e9  # slower than the limit: nothing is added
    assert [seconds() for _ in range(12)][-1] == pytest.approx(SIZE / 5e9)
    assert sum(real.clock.values()) == real.clock[lane]


@pytest.mark.gpu
def test_a_slow_bus_on_cuda_takes_its_time_and_lets_the_host_go_on() -> None:
    """64 MB at 10 GB/s are 6.4 ms in each direction, and in both at once."""
    device = throttled(open_device("cuda"), 10.0)
    pairs = {
        "h2d": (device.empty(SIZE, torch.uint8), device.pinned(SIZE, torch.uint8)),
        "d2h": (device.pinned(SIZE, torch.uint8), device.empty(SIZE, torch.uint8)),
    }
    pairs["h2d"][1].fill_(7)
    device.synchronize()

    def put(*lanes: Any) -> list[tuple[Any, Any]]:
        """Begin and end of a copy in each lane, while it runs."""
        points = []
        for lane in lanes:
            started = device.record(lane)
            device.copy(lane, *pairs[lane])
            points.append((started, device.record(lane)))
        return points

    def median(points: list[tuple[Any, Any]]) -> float:
        for _, ended in points:
            ended.wait()
        ordered = sorted(
            device.seconds(ended) - device.seconds(started) for started, ended in points
        )
        return ordered[len(ordered) // 2]

    for lane in pairs:
        points = put(lane)
        assert not points[0][1].done(), "the host waited for the copy"
        assert median(points + put(lane) + put(lane)) == pytest.approx(6.4e-3, rel=0.15)
    both = [put("h2d", "d2h") for _ in range(3)]
    assert not both[-1][1][1].done()
    for number in range(2):
        assert median([pair[number] for pair in both]) == pytest.approx(6.4e-3, rel=0.15)
    (h2d, _), (_, d2h_end) = both[0]
    assert device.seconds(d2h_end) - device.seconds(h2d) < 1.5 * 6.4e-3  # not one after the other
    assert bool((pairs["h2d"][0] == 7).all())
    device.close()
