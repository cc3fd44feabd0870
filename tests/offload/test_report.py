"""The overlap report adds up what the lanes did, and the trace shows it."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.offload import drive  # noqa: E402
from ondevice.offload.device import Device, Spans, Timeline  # noqa: E402
from ondevice.offload.engine import LANES, chrome_trace, overlap  # noqa: E402
from tests.methods.slideformer.reference import batches, run  # noqa: E402
from tests.offload.faults import LateDevice  # noqa: E402

BY_HAND: Spans = [
    ("forward", "layer 0", 10.0, 11.0, 0),
    ("forward", "layer 1", 11.0, 12.5, 0),
    ("backward", "layer 1", 13.0, 16.0, 0),
    ("h2d", "layer 0", 9.0, 9.5, 100),
    ("h2d", "layer 1", 9.5, 10.25, 20),
    ("d2h", "layer 1", 16.0, 16.5, 7),
    ("update", "layer 1", 16.5, 18.0, 0),
    ("disk", "read layer 1", 16.5, 17.0, 0),
]


def test_the_report_sums_the_spans() -> None:
    actual = overlap(BY_HAND, 10.0)
    assert (actual.forward_s, actual.backward_s, actual.h2d_s, actual.d2h_s) == (
        2.5,
        3.0,
        1.25,
        0.5,
    )
    assert (actual.update_s, actual.disk_s, actual.wall_s) == (1.5, 0.5, 10.0)
    assert actual.idle_s == 10.0 - 2.5 - 3.0
    assert (actual.h2d_bytes, actual.d2h_bytes) == (120, 7)
    assert actual.hiding_factor == 3.0 / (0.5 + 1.5)
    assert actual.bound == "compute"
    assert json.loads(json.dumps(actual.to_dict()))["hiding_factor"] == 1.5


@pytest.mark.parametrize("lane", ["h2d", "d2h", "comm", "update", "disk"])
def test_the_bound_is_the_longest_lane(lane: str) -> None:
    spans = [*BY_HAND, (lane, "layer 0", 0.0, 50.0, 0)]
    assert overlap(spans, 60.0).bound == lane


def test_a_disk_with_several_transfers_is_busy_once() -> None:
    spans = [
        ("disk", "a", 0.0, 4.0, 0),
        ("disk", "b", 1.0, 3.0, 0),
        ("disk", "c", 3.5, 6.0, 0),
        ("disk", "d", 8, 9, 0),
    ]
    assert overlap([*BY_HAND[:-1], *spans], 10.0).disk_s == 7.0


def test_a_step_without_updates_hides_them() -> None:
    assert overlap([span for span in BY_HAND if span[0] == "forward"], 2.0).hiding_factor == float(
        "inf"
    )
    assert overlap(BY_HAND, 3.0).idle_s == 0  # spans of two steps in the wall time of one
    assert overlap([], 1.0).idle_s == 1.0


ALONE = [lane for lane in LANES if lane != "comm"]
"""Lanes of one process."""


def traced(engine: Any, config: dict[str, Any], **sizes: Any) -> Any:
    """An engine whose `overlap` and `spans` are those of one whole step, and the step's batch."""
    opened, (first, second, third) = engine(config, **sizes), batches(3)
    run(opened, [first])
    opened.timeline.drain()
    opened.began = None
    opened.step(*second, 1, 1e-3)
    opened.flush()
    if (
        opened.disk is not None and opened.disk.states is not None
    ):  # writes go on after the updates are done
        opened.disk.states.flush()
        for file in (
            opened.disk.states.files
        ):  # a transfer's span is added behind its end, in the thread that did it
            together = threading.Barrier(len(file._threads) + 1)
            for _ in file._threads:
                file._tasks.put(together.wait)
            together.wait(120)
    opened.step(*third, 2, 1e-3)
    return opened, second


@pytest.mark.parametrize("config", [{}, {"micro_batch_size": 2, "disk_fraction": 1.0}], ids=str)
def test_a_step_moves_each_byte_that_it_must(config: dict[str, Any], engine: Any) -> None:
    """Every layer comes twice, but for the window at the turn; gradients and inputs go once, inputs come once.
    Of the embedding the rows that occur come, and their gradients go; a tied head's go as the head's."""
    opened, (ids, _) = traced(engine, config, layers=5)
    units, item, actual = opened.units, 2, opened.overlap
    layers, width = [unit.numel for unit in units.layers], 64
    inputs, rows, once = (
        5 * ids.size * width,
        len(np.unique(ids)) * width,
        units.rest.numel + 260 * width,
    )
    assert actual.h2d_bytes == item * (sum(layers) + sum(layers[:2]) + once + rows + inputs)
    assert actual.d2h_bytes == item * (sum(layers) + once + rows + inputs)


@pytest.mark.parametrize("config", [{}, {"disk_fraction": 1.0}, {"optimizer": "torch"}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_the_report_of_a_step_adds_up(config: dict[str, Any], tied: bool, engine: Any) -> None:
    opened, _ = traced(engine, config, layers=5, tied=tied)
    spans, actual = opened.spans, opened.overlap
    busy = {
        lane: sum(end - start for at, _, start, end, _ in spans if at == lane) for lane in LANES
    }
    assert actual.disk_s <= busy["disk"] and (actual.disk_s > 0) == ("disk_fraction" in config)
    busy["disk"] = actual.disk_s
    assert {lane: actual.to_dict()[f"{lane}_s"] for lane in LANES} == pytest.approx(busy)
    leaving = busy["d2h"] + max(busy["update"], busy["disk"])
    assert actual.hiding_factor == pytest.approx(busy["backward"] / leaving)
    assert actual.forward_s + actual.backward_s + actual.idle_s == pytest.approx(actual.wall_s)
    assert 0 < actual.update_s < actual.wall_s
    names = {lane: sorted(name for at, name, *_ in spans if at == lane) for lane in LANES}
    layers = [f"layer {i}" for i in range(5)]
    assert names["forward"] == layers
    assert names["backward"] == ["head", *layers]
    tables = ["embedding"] if tied else ["embedding", "head"]
    assert names["update"] == sorted([*tables, "embedding rows", *layers, "rest"])
    on_disk = {f"{what} {name}" for name in [*tables, *layers] for what in ("read", "write")}
    assert set(names["disk"]) == (on_disk if "disk_fraction" in config else set())


def test_a_lane_does_one_thing_after_the_other(engine: Any) -> None:
    """On the CPU each lane is one thread here, with no inputs to move; the disk works at several transfers."""
    opened, _ = traced(engine, {"activations": "device", "disk_fraction": 0.5}, layers=5)
    for lane in (name for name in ALONE if name != "disk"):
        times = sorted((start, end) for at, _, start, end, _ in opened.spans if at == lane)
        assert times
        assert all(start <= end for start, end in times)
        assert all(one[1] <= other[0] for one, other in pairwise(times)), lane


@pytest.mark.parametrize(
    "config", [{"disk_fraction": 1.0}, {"disk_fraction": 0.5, "activations": "disk"}], ids=str
)
def test_a_slow_disk_bounds_the_step(
    config: dict[str, Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the disk is not computing: neither the head's span nor a layer's."""
    move = drive.Drive.move

    def slow(self: Any, chunk: Any, offset: int, *, write: bool) -> int:
        time.sleep(0.1 if len(chunk) > drive.BLOCK_BYTES else 0.0)
        return move(self, chunk, offset, write=write)

    monkeypatch.setattr(drive.Drive, "move", slow)
    opened, _ = traced(engine, config, layers=4, tied=False, intermediate=256)
    assert opened.overlap.bound == "disk"
    assert opened.overlap.forward_s + opened.overlap.backward_s < 0.5 * opened.overlap.wall_s


def test_the_trace_is_json_with_every_lane(engine: Any, tmp_path: Path) -> None:
    opened, _ = traced(engine, {"disk_fraction": 1.0}, layers=3)
    chrome_trace(opened.spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(lanes.values()) == list(LANES)
    shown = [event for event in events if event["ph"] == "X"]
    assert len(shown) == len(opened.spans) == len(events) - len(LANES)
    assert (
        {lanes[event["tid"]] for event in shown} == set(ALONE) == {event["cat"] for event in shown}
    )
    assert min(event["ts"] for event in shown) == 0
    first = min(start for _, _, start, _, _ in opened.spans)
    for event, (lane, name, start, end, size) in zip(shown, opened.spans, strict=True):
        assert (lanes[event["tid"]], event["name"], event["args"]["bytes"]) == (lane, name, size)
        assert event["ts"] == pytest.approx((start - first) * 1e6, abs=0.1)
        assert event["dur"] == pytest.approx((end - start) * 1e6, abs=0.1)


def test_an_empty_trace_is_valid(tmp_path: Path) -> None:
    chrome_trace([], tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == len(LANES)


def test_unfinished_spans_wait_for_the_next_report() -> None:
    device = LateDevice()
    timeline = Timeline(device)
    begun = device.record("h2d")
    timeline.span("h2d", "layer 0", begun, end := device.record("h2d"), 5)
    timeline.add("update", "layer 1", 1.0, 2.0)
    assert [span[1] for span in timeline.drain()] == ["layer 1"]
    end.wait()
    assert [(name, size) for _, name, _, _, size in timeline.drain()] == [("layer 0", 5)]
    assert timeline.drain() == []


def test_threads_lose_no_span() -> None:
    timeline, collected = Timeline(Device()), []

    def add() -> None:
        for number in range(5000):
            timeline.add("update", str(number), 0.0, 1.0)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        collected += timeline.drain()
    collected += timeline.drain()
    assert len(collected) == 3 * 5000


def test_an_evaluation_does_not_hide_the_step_before_it(engine: Any) -> None:
    opened, _ = traced(engine, {}, layers=2)
    ids, labels = batches(1, rows=3)[0]
    opened.evaluate(ids, labels)
    step = opened.overlap
    opened.step(ids, labels, 3, 1e-3)
    assert opened.overlap is step and step.backward_s > 0
    opened.flush()
    opened.step(ids, labels, 4, 1e-3)
    assert opened.overlap is not step and opened.overlap.backward_s > 0
