"""`ondevice runs` on runs of a small real program."""

from __future__ import annotations

import json

import pytest

from ondevice.core.errors import BusyError
from ondevice.training.checkpoint import RunLock
from ondevice.training.loop import StopRequest
from ondevice.training.runs import remove_run
from tests.training.bigram import BigramSession, train


@pytest.fixture
def folder(tmp_path):
    """A finished run, one that was stopped, and a folder that is none."""
    stop = StopRequest()
    train(tmp_path / "runs" / "a", 4)
    train(
        tmp_path / "runs" / "deep" / "b",
        9,
        BigramSession(seed=8),
        stop=stop,
        sinks=[lambda event: _third(event, stop)],
    )
    (tmp_path / "runs" / "photos").mkdir()
    return tmp_path / "runs"


def _third(event, stop) -> None:
    if getattr(event, "step", None) == 2:
        stop.request("enough")


def test_runs_are_listed_shown_and_compared(ondevice, folder) -> None:
    listed = ondevice("runs", "list", folder, "--json").json["runs"]
    assert [(run["state"], run["steps"], run["asked_steps"]) for run in listed] == [
        ("finished", 4, 4), ("interrupted", 3, 9),
    ]  # fmt: skip
    assert listed[0]["checkpoints"] == ["checkpoint-00000004"]
    shown = ondevice("runs", "show", folder / "a")
    assert shown.code == 0 and "finished" in shown.out and "checkpoint-00000004" in shown.out
    compared = ondevice("runs", "compare", folder / "a", folder / "deep" / "b", "--json").json
    assert compared["settings"] == {"train.seed": [7, 8]}
    assert compared["runs"][0]["final_loss"] == listed[0]["final_loss"]
    assert ondevice("runs", "list", folder).out.count("\n") == 3
    assert ondevice("runs", "show", folder / "photos").code == 6


def test_a_plot_is_a_picture(ondevice, folder, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    done = ondevice(
        "runs", "plot", folder / "a", folder / "deep" / "b", "--out", tmp_path / "both.svg"
    )
    assert (
        done.code == 0 and "training loss" in (tmp_path / "both.svg").read_text()
    ) or "<svg" in done.out
    assert ondevice("runs", "plot", folder / "a", "--out", tmp_path / "both.doc").code == 2


def test_only_runs_that_nobody_holds_are_removed(ondevice, folder) -> None:
    assert ondevice("runs", "remove", folder / "a", folder / "photos", "--yes").code == 6
    assert (folder / "a").is_dir() and (folder / "photos").is_dir()
    with RunLock(folder / "a"):
        assert (
            json.loads(ondevice("runs", "list", folder / "a", "--json").out)["runs"][0]["state"]
            == "running"
        )
        with pytest.raises(BusyError):
            remove_run(folder / "a")
    assert ondevice("runs", "remove", folder / "a").code == 2  # nobody can be asked
    tried = ondevice("runs", "remove", folder / "a", "--dry-run", "--json").json
    assert tried == {"removed": [str(folder / "a")], "dry_run": True} and (folder / "a").is_dir()
    assert ondevice("runs", "remove", folder / "a", "--yes", "--json").json == {
        "removed": [str(folder / "a")]
    }
    assert not (folder / "a").exists()
