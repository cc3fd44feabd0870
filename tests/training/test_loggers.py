"""Trackers beside a run's own log: what they are given, and that none of them can end a run."""

from __future__ import annotations

import importlib.util
import logging

import pytest

import ondevice
from ondevice.core.errors import MissingPackageError
from ondevice.training import events
from ondevice.training.events import read_log
from ondevice.training.loggers import TRACKERS, Reports, Tracker, check_installed, open_reports
from tests.cli.command import write_rows
from tests.training.bigram import logged, train
from tests.training.test_preferences import pairs


class Kept(Tracker):
    """Keeps what it is given; fails at one step."""

    def __init__(self, folder, fail_at: int = -1) -> None:
        super().__init__(folder)
        self.given: list = []
        self.fail_at = fail_at

    def begin(self, config, step) -> None:
        self.given.append(("begin", config, step))

    def log(self, figures, step) -> None:
        if step == self.fail_at:
            raise OSError("the server is gone")
        self.given.append((figures, step))

    def end(self, whole) -> None:
        self.given.append(("end", whole))


def test_a_tracker_gets_the_log_s_figures_and_one_that_fails_is_left_out(tmp_path, caplog) -> None:
    good, bad = Kept(tmp_path), Kept(tmp_path, fail_at=2)
    reports = Reports({"good": good, "bad": bad})
    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, 4, sinks=[reports])
    assert result.steps == 4 and "bad gets nothing more of this run: OSError" in caplog.text
    steps = logged(tmp_path, events.Step)
    assert [(figures["train/loss"], step) for figures, step in good.given[1:-1]] == [
        (event.loss, event.step + 1) for event in steps
    ]
    assert good.given[0] == ("begin", {"train": {"seed": 7}}, 0) and good.given[-1] == ("end", True)
    assert len(bad.given) == 2


def test_tensorboard_has_every_step_of_a_run_and_of_its_resume(tmp_path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in (3, 5):
        train(
            tmp_path, steps, resume=steps > 3, sinks=[open_reports(["tensorboard"], tmp_path, {})]
        )
    read = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    shown = read.Tensors("train/loss")
    assert [point.step for point in shown] == [1, 2, 3, 4, 5]
    values = [float(point.tensor_proto.float_val[0]) for point in shown]
    assert values == pytest.approx([event.loss for event in logged(tmp_path, events.Step)])


def test_tensorboard_has_the_figures_of_preferences(tmp_path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    data = write_rows(tmp_path / "pairs.jsonl", pairs(8))
    ondevice.train(
        "tiny:llama", data, method="lora", steps=2, report_to=["tensorboard"],
        validation_split=0.5, out=tmp_path / "run",
    )  # fmt: skip
    read = loader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    log = read_log(tmp_path / "run" / "events.jsonl")
    for name in ("rewards_chosen", "rewards_rejected", "margin", "accuracy"):
        shown = read.Tensors(f"train/{name}")
        values = [float(point.tensor_proto.float_val[0]) for point in shown]
        assert values == pytest.approx([step.preferences[name] for step in log.steps()])
        assert read.Tensors(f"eval/{name}"), name


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_others_write_below_the_run_s_folder(name, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip(TRACKERS[name][1])
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(variable, raising=False)
    reports = open_reports([name], tmp_path, {"model": {"source": "bigram"}})
    train(tmp_path, 2, sinks=[reports])
    assert name in reports.trackers and capsys.readouterr().out == ""
    folder = {"wandb": "wandb", "mlflow": "mlruns", "trackio": "trackio"}[name]
    written = [path.name for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert any(path.endswith((".wandb", "loss", ".db")) for path in written), written


def test_an_absent_package_is_named_before_anything_is_loaded(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError):
        check_installed(["mlflow"])
