"""Training on a score: zeroth-order methods learn from it, a user's program is run, and what cannot be is refused."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ondevice.api.runfile import RunConfig  # noqa: E402
from ondevice.api.train import train  # noqa: E402
from ondevice.core.errors import ConfigError, Need, TrainingError  # noqa: E402
from ondevice.training.events import read_log  # noqa: E402
from ondevice.training.replay import read_run, replay  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = (
    f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'examples' / 'score_answers.py'))}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = {0: "dull", 1: "fine"}
    rows = [{"sentence": f"{words[i % 2]} film {i}", "label": i % 2} for i in range(16)]
    (folder / "sst2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"say {i} ", "completion": "yes" if i % 2 else "no"} for i in range(6)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    questions = [
        {"title": "t", "context": "It was blue.", "question": f"Colour {i}?", "answers": ["blue"]}
        for i in range(4)
    ]
    (folder / "squad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return folder


def run(
    path: Path, out: Path, method: dict[str, Any], train_: dict[str, Any], task: str | None = None
) -> Any:
    values = {
        "model": {"source": "tiny:llama"},
        "data": {"path": str(path), "task": task},
        "method": method,
        "train": {"steps": 2, "batch_size": 4, "out": str(out)} | train_,
    }
    return train(RunConfig.parse(values), force=True)


PRGE = {"name": "prge", "queries": 4, "rank": 4, "subspace": "random", "perturbation_scale": 0.1}


def test_it_learns_from_accuracy_alone(data: Path, tmp_path: Path) -> None:
    """The losses are shares of wrong rows, they fall, and the run replays to the same bits."""
    settings = {"objective": "accuracy", "steps": 16, "batch_size": 16}
    done = run(
        data / "sst2.jsonl", tmp_path / "run", PRGE | {"learning_rate": 0.05}, settings, task="sst2"
    )
    log = read_run(tmp_path / "run")
    losses = [
        entry.event.losses
        for entry in read_log(tmp_path / "run" / "events.jsonl").entries
        if entry.event.kind == "step"
    ]
    assert all(loss * 16 == round(loss * 16) for step in losses for loss in step)
    assert np.mean(losses[-2:]) < np.mean(losses[:2]) - 0.2
    from ondevice.artifact.adapter import load_adapter
    from ondevice.core.registry import open_session
    from ondevice.models import tiny_model

    session = open_session(tiny_model(), RunConfig.parse(log.header.config).method, log.header.seed)
    replayed = replay(log, session)
    assert replayed is not None
    for name, value in load_adapter(done.adapter).tensors.items():
        np.testing.assert_array_equal(replayed.tensors[name], value)


@pytest.mark.parametrize(
    "method", [{"name": "prge", "queries": 1, "rank": 2, "calibration_rows": 2}, {"name": "mezo"}]
)
def test_the_example_program_scores_answers(
    data: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    settings = {"objective": "command", "objective_command": EXAMPLE, "batch_size": 2}
    run(data / "pairs.jsonl", tmp_path / "run", method, settings)
    steps = [
        entry.event
        for entry in read_log(tmp_path / "run" / "events.jsonl").entries
        if entry.event.kind == "step"
    ]
    assert len(steps) == 2 and all(
        loss * 4 == round(loss * 4) for step in steps for loss in step.losses
    )


def test_the_example_s_scores() -> None:
    from subprocess import run as call

    rows = [("Yes.", ["yes"]), ("well, yes it is", ["yes"]), ("no", ["yes"]), ("", ["yes"])]
    text = "".join(json.dumps({"prompt": "", "answer": a, "answers": b}) + "\n" for a, b in rows)
    done = call(shlex.split(EXAMPLE), input=text, capture_output=True, text=True, check=True)
    assert [float(x) for x in done.stdout.split()] == [1.0, 0.5, 0.5, 0.0]


def test_f1_of_generated_answers(data: Path, tmp_path: Path) -> None:
    run(
        data / "squad.jsonl",
        tmp_path / "run",
        PRGE | {"queries": 1},
        {"objective": "f1", "steps": 1},
        task="squad",
    )
    steps = [
        entry.event
        for entry in read_log(tmp_path / "run" / "events.jsonl").entries
        if entry.event.kind == "step"
    ]
    assert all(0 <= loss <= 1 for loss in steps[0].losses)


def test_what_cannot_be_trained_on_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run(
            data / "sst2.jsonl",
            tmp_path / "a",
            {"name": "lora"},
            {"objective": "accuracy"},
            task="sst2",
        )
    assert error.value.needs is Need.ZEROTH_ORDER and "prge" in error.value.methods
    with pytest.raises(ConfigError) as error:
        run(data / "pairs.jsonl", tmp_path / "b", PRGE, {"objective": "accuracy"})
    assert error.value.expected == "rows with candidates"
    with pytest.raises(ConfigError, match="go together"):
        run(data / "pairs.jsonl", tmp_path / "c", PRGE, {"objective": "command"})
    for command, message in (
        ("false", "objective_command failed"),
        ("no-such-program", "could not be run"),
        ("echo 1", "did not print a score for each row"),
        ("echo 1 2 3 nan", "did not print a score for each row"),
    ):
        with pytest.raises(TrainingError, match=message):
            settings = {"objective": "command", "objective_command": command}
            run(
                data / "pairs.jsonl",
                tmp_path / command,
                PRGE | {"queries": 1},
                settings | {"batch_size": 4},
            )
