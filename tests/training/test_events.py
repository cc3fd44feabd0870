"""Events as lines: exact floats, tolerant reading, a log that survives a power cut."""

from __future__ import annotations

import json
import os
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.core.errors import StorageError
from ondevice.training import events
from ondevice.training.events import EventLog, cut_log, read_log


def step(number: int, gradients: tuple[float, ...] = (0.5,), loss: float = 1.0) -> events.Step:
    return events.Step(
        step=number,
        loss=loss,
        losses=(loss, loss),
        projected_gradients=gradients,
        learning_rate=1e-3,
        tokens=64,
        step_time_s=0.1,
        tokens_per_s=640.0,
        peak_memory_bytes=1 << 20,
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=4))
def test_projected_gradients_come_back_with_the_same_float32_bits(values: list[float]) -> None:
    line = step(3, tuple(values)).to_line()
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    back = events.parse(line)
    assert isinstance(back, events.Step)
    got, want = np.array(back.projected_gradients, np.float32), np.array(values, np.float32)
    assert np.array_equal(got, want, equal_nan=True)
    finite = np.isfinite(want)
    assert got[finite].tobytes() == want[finite].tobytes()


def test_every_kind_comes_back_equal() -> None:
    samples = [
        events.Start(
            config={"a": [1, None]},
            identity={"m": {"q": 4}},
            seed=2**63 - 1,
            backend="torch-cpu",
            steps=3,
        ),
        events.Resume(step=2, steps=3, backend="executorch", checkpoint="checkpoint-00000002"),
        step(2, loss=float("inf")),
        events.Prepare(step=3, path="subspace-00000003.safetensors", sha256="0" * 64),
        events.Evaluate(step=3, loss=0.25, accuracy=0.5, rows=10, best=True),
        events.Checkpoint(step=3, path="checkpoint-00000003", size_bytes=7, seconds_s=0.1),
        events.Warning(message="line\nbreak\u2028and more"),
        events.Interrupt(step=3, signal="SIGINT"),
        events.Error(step=3, error={"error": "TrainingError", "try": None}),
        events.Finish(
            steps=3,
            first_loss=2.0,
            final_loss=1.0,
            step_time_s=0.1,
            tokens_per_s=9.0,
            peak_memory_bytes=1,
        ),
    ]
    assert {type(sample) for sample in samples} == set(events.KINDS.values())
    assert [events.parse(sample.to_line()) for sample in samples] == samples


def test_newer_keys_and_events_are_passed_over_and_lacking_fields_are_errors() -> None:
    values = step(1).to_dict()
    assert events.parse(json.dumps({**values, "new_in_2": 5})) == events.parse(json.dumps(values))
    assert events.parse('{"event": "new_in_2"}') is None
    for line in (
        "",
        "[]",
        "{}",
        '{"event": "step", "step": 1}',
        json.dumps({**values, "step": "1"}),
        "\x00" * 8,
    ):
        with pytest.raises(ValueError):
            events.parse(line)


def test_an_unfinished_last_line_is_cut_and_steps_after_the_checkpoint_are_dropped(
    tmp_path,
) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for number in range(5):
            log.write(step(number))
            if number == 2:
                log.write(events.Checkpoint(step=3, path="c", size_bytes=1, seconds_s=0.0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert read_log(path).unfinished
    assert [event.step for event in cut_log(path, 9).steps()] == [0, 1, 2, 3, 4]
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"\x00" * 4096)  # what some file systems leave after a power cut
    content = cut_log(path, 3)
    assert [event.step for event in content.steps()] == [0, 1, 2]
    assert isinstance(content.entries[-1].event, events.Checkpoint)
    assert read_log(path) == content


def test_damage_among_readable_lines_is_named_and_left_in_place(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [step(number).to_line() for number in range(4)]
    lines[1] = lines[1][:30] + b"\n"
    path.write_bytes(b"".join(lines))
    content = cut_log(path, 3)
    assert content.damaged == (2,) and not content.unfinished
    assert path.read_bytes() == b"".join(lines[:3])


def test_a_full_disk_leaves_whole_lines_and_the_log_goes_on(tmp_path) -> None:
    seen: list[events.Event] = []
    path = tmp_path / "events.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(path, [seen.append]) as log:
        log.write(step(0))
        size = os.path.getsize(path)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (size + 50, before[1])
        )  # the kernel then takes half a line
        try:
            with pytest.raises(StorageError):
                log.write(step(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert os.path.getsize(path) == size
        log.write(step(1))
        log.sync()
    assert [event.step for event in read_log(path).steps()] == [0, 1]
    assert [event.step for event in seen if isinstance(event, events.Step)] == [0, 1]
