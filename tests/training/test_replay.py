"""A run again from its scalars."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ondevice.core.errors import CheckpointError, ConfigError
from ondevice.core.session import StepResult
from ondevice.training import events
from ondevice.training.replay import read_run, replay
from tests.training.bigram import BigramSession, train


def no_warning(message: str) -> None:
    pytest.fail(message)


@pytest.fixture
def run(tmp_path) -> tuple[Path, BigramSession]:
    session = BigramSession()
    train(tmp_path, 12, session, checkpoint_every=5)
    train(tmp_path, 20, session := BigramSession(), resume=True)
    return tmp_path, session


def edit(out: Path, change) -> None:
    path = out / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))


def test_it_gives_the_bits_of_the_run_without_a_forward_pass(run, monkeypatch) -> None:
    out, session = run
    log = read_run(out)
    assert log.header.seed == 7 and log.header.model_source == "bigram" and not log.unfinished
    assert [step.step for step in log.steps] == list(range(20))
    monkeypatch.setattr(BigramSession, "_nll", lambda *_: pytest.fail("a forward pass"))
    applied: list[int] = []
    adapter = replay(log, BigramSession(), warn=no_warning, on_step=applied.append)
    assert adapter is not None and applied == list(range(20))
    assert adapter.tensors["table.lora_B.weight"].tobytes() == session.logits.tobytes()


def test_the_first_steps_only(run, tmp_path_factory) -> None:
    part = BigramSession()
    train(tmp_path_factory.mktemp("part"), 9, part)
    session = BigramSession()
    replay(read_run(run[0] / "events.jsonl"), session, steps=9)
    assert session.logits.tobytes() == part.logits.tobytes()
    with pytest.raises(ConfigError) as error:
        replay(read_run(run[0]), session, steps=21)
    assert (error.value.expected, error.value.received) == ("0 to 20", 21)


def test_another_backend_is_a_warning(run) -> None:
    session = BigramSession()
    session.backend = "executorch"
    warnings: list[str] = []
    replay(read_run(run[0]), session, warn=warnings.append)
    assert len(warnings) == 1 and "numpy" in warnings[0] and "executorch" in warnings[0]


def test_an_unfinished_last_line_is_a_warning(run) -> None:
    last_step = [
        line
        for line in (run[0] / "events.jsonl").read_bytes().splitlines(True)
        if b'"step":19' in line
    ]
    edit(run[0], lambda lines: [*lines[: lines.index(last_step[0])], last_step[0][:50]])
    warnings: list[str] = []
    log = read_run(run[0])
    assert len(log.steps) == 19 and log.unfinished
    replay(log, BigramSession(), warn=warnings.append)
    assert "ends after step 18" in warnings[0]


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (
            lambda lines: [*lines[:4], lines[4][:60] + b"\n", *lines[5:]],
            "received",
            "1 unreadable lines among readable ones",
        ),
        (lambda lines: [*lines[:4], *lines[5:]], "received", "step 4"),
        (lambda lines: lines[1:], "expected", "a `start` event in line 1"),
        (
            lambda lines: [lines[0].replace(b'"schema":1', b'"schema":2'), *lines[1:]],
            "received",
            "schema 2",
        ),
        (lambda lines: [], "expected", "a run's folder or its events.jsonl"),
    ],
)
def test_a_damaged_log_is_refused(run, change, field, value) -> None:
    edit(run[0], change)
    with pytest.raises(CheckpointError) as caught:
        read_run(run[0])
    assert getattr(caught.value, field) == value


class FirstOrder(BigramSession):
    """Tells no projected gradients."""

    def step(self, *arguments) -> StepResult:
        return replace(super().step(*arguments), projected_gradients=())


def test_the_log_of_a_first_order_run_is_refused(tmp_path) -> None:
    train(tmp_path, 3, FirstOrder())
    with pytest.raises(ConfigError):
        read_run(tmp_path)


def test_a_run_that_changed_its_backend_says_so(tmp_path) -> None:
    train(tmp_path, 3)
    other = BigramSession()
    other.backend = "executorch"
    seen: list[events.Event] = []
    train(tmp_path, 6, other, resume=True, sinks=[seen.append])
    assert any(isinstance(event, events.Warning) and "same bits" in event.message for event in seen)
    assert read_run(tmp_path).backends == ("numpy", "executorch")
