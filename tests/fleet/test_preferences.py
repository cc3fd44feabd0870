"""Fleets whose devices learn from preference pairs and rated answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api.train import train
from ondevice.artifact.adapter import load_adapter
from ondevice.core.errors import ConfigError, FleetError
from ondevice.fleet.charter import Charter
from ondevice.training.preferences import FILE_NAME
from tests.cli.command import CommandLine, write_rows
from tests.fleet.fleets import charter
from tests.fleet.test_simulate import rows as classes
from tests.training.test_preferences import pairs, thumbs

TINY = ("--model", "tiny:llama", "--seed", 3, "--max-length", 256)
METHOD = ("--queries", 2, "--set", "method.rank=2")


def simulate(ondevice: CommandLine, out: Path, data: Path, *more: object) -> Any:
    words = ("--data", data, "--out", out, "--json", *more)
    return ondevice("fleet", "simulate", *TINY, *words)


@pytest.mark.parametrize(
    ("made", "objective"),
    [(pairs, "loss"), (pairs, "ipo"), (pairs, "orpo"), (pairs, "simpo"), (thumbs, "loss")],
)
def test_a_simulated_fleet_learns_from_preferences(
    made: Any, objective: str, ondevice: CommandLine, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", made(12))
    more = (*METHOD, "--devices", 3, "--rounds", 2, "--batch-size", 2, "--learning-rate", 0.02)
    more = (*more, "--set", f"train.objective={objective}")
    done = simulate(ondevice, tmp_path / "a fleet", data, *more).json
    assert done["hashes_equal"] is True
    assert done["loss_last"] < done["loss_first"] and done["accuracy_last"] is not None
    if objective == "loss":  # the model before training ties every pair
        first = np.log(2) if made is pairs else 0.5
        assert done["loss_first"] == pytest.approx(first, abs=1e-6)
    replayed = ondevice("fleet", "replay", done["log"], "--json").json
    assert replayed["final_hash"] == done["final_hash"]
    status = ondevice("fleet", "status", tmp_path / "a fleet", "--json").json
    name = {"loss": "dpo" if made is pairs else "kto"}.get(objective, objective)
    assert status["charter"]["objective"]["name"] == name
    again = simulate(ondevice, tmp_path / "a fleet", data, *more, "--resume", "--rounds", 3).json
    assert again["rounds"] == 3 and again["hashes_equal"] is True


@pytest.mark.parametrize("made", [pairs, thumbs])
def test_one_device_takes_the_step_of_an_ordinary_run(
    made: Any, ondevice: CommandLine, tmp_path: Path
) -> None:
    """A fleet's numbers are 16 bits of the largest: that is all in which the adapters differ."""
    data = write_rows(tmp_path / "rows.jsonl", made(8))
    rate = ("--batch-size", 4, "--learning-rate", 0.02, *METHOD)
    one = simulate(ondevice, tmp_path / "a fleet", data, *rate, "--devices", 1, "--rounds", 1).json
    status = ondevice("fleet", "status", tmp_path / "a fleet", "--json").json
    settings = {
        "model.source": "tiny:llama",
        "method": status["charter"]["method"] | {"subspace": "random", "optimizer": "sgd"},
        "train.seed": 3,
        "train.batch_size": 4,
        "train.schedule": "constant",
        "data.max_length_tokens": 256,
    }
    trained = train(settings, data, steps=1, out=tmp_path / "run")
    assert status["rounds_table"][0]["loss"] == pytest.approx(trained.history.losses[0], rel=1e-6)
    ours, theirs = load_adapter(one["adapter"]), load_adapter(tmp_path / "run" / "adapter")
    assert not ours.changes_nothing
    for name, expected in theirs.tensors.items():
        most = 2**-13 * float(np.abs(expected).max())
        np.testing.assert_allclose(ours.tensors[name], expected, rtol=0, atol=most)


def test_a_first_order_fleet_learns_from_preferences(ondevice: CommandLine, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", pairs(12))
    weak = ("--set", "simulation.weak=0.5", "--set", "simulation.weak_rate=0.02")
    more = ("--method", "lora-fa", "--devices", 2, "--rounds", 3, "--learning-rate", 5e-3, *weak)
    done = simulate(
        ondevice, tmp_path / "a fleet", data, *more, "--batch-size", 4, "--local-steps", 2
    ).json
    assert done["loss_first"] == pytest.approx(np.log(2), abs=1e-6)
    assert done["loss_last"] < np.log(2) - 0.01 and done["accuracy_last"] > 0.8


def begun(ondevice: CommandLine, fleet: Path, *more: object) -> Any:
    words = (*TINY, *METHOD, "--learning-rate", 0.02, "--out", fleet, "--json", *more)
    return ondevice("fleet", "begin", *words)


def test_a_device_keeps_the_likelihoods_before_training_beside_its_copy(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    """One that joins after a round has those of the model before training, too."""
    fleet = tmp_path / "a fleet"
    assert begun(ondevice, fleet, "--set", "train.objective=dpo").code == 0
    data = write_rows(tmp_path / "rows.jsonl", pairs(6))
    file, reply = tmp_path / "round.odfleet", tmp_path / "answer.odfleet"

    def answered(device: int, folder: Path, rows: Path) -> Any:
        ondevice("fleet", "carry", "out", fleet, "--device", device, "--to", file, "--json")
        words = ("--out", folder, "--to", reply, "--json")
        return ondevice("fleet", "carry", "answer", file, "--data", rows, *words)

    assert answered(1, tmp_path / "first", data).code == 0
    kept = (tmp_path / "first" / FILE_NAME).read_bytes()
    assert (tmp_path / "first" / FILE_NAME).stat().st_mode & 0o077 == 0
    ondevice("fleet", "carry", "in", fleet, reply, "--close", "--json")
    assert answered(1, tmp_path / "first", data).code == 0
    assert (tmp_path / "first" / FILE_NAME).read_bytes() == kept
    assert answered(2, tmp_path / "late", data).code == 0
    assert (tmp_path / "late" / FILE_NAME).read_bytes() == kept
    # Other rows have others; rows of another format have none.
    others = write_rows(tmp_path / "others.jsonl", pairs(8)[2:])
    assert answered(3, tmp_path / "third", others).code == 0
    first, third = (
        json.loads((tmp_path / name / FILE_NAME).read_text()) for name in ("first", "third")
    )
    assert first["rows"] != third["rows"] and first["model"] == third["model"]
    for wrong in (classes(tmp_path / "classes.jsonl"), write_rows(tmp_path / "t.jsonl", thumbs(4))):
        shutil.rmtree(tmp_path / "wrong", ignore_errors=True)
        assert answered(4, tmp_path / "wrong", wrong).code != 0
        assert not (tmp_path / "wrong" / FILE_NAME).exists()


def test_a_device_may_have_ratings_of_one_kind_and_a_whole_fleet_not(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    rows = sorted(thumbs(8), key=lambda row: row["label"])
    liked = write_rows(tmp_path / "liked.jsonl", [row for row in rows if row["label"]])
    more = (*METHOD, "--devices", 2, "--rounds", 1)
    for dry in ([], ["--dry-run"]):
        refused = simulate(ondevice, tmp_path / "liked", liked, *more, *dry).json
        assert refused["message"].startswith(f"{liked}:1: 'label'")
    assert not (tmp_path / "liked").exists()
    fleet = tmp_path / "a fleet"
    assert begun(ondevice, fleet, "--set", "train.objective=kto").code == 0
    file = tmp_path / "round.odfleet"
    ondevice("fleet", "carry", "out", fleet, "--device", 1, "--to", file, "--json")
    words = ("--out", tmp_path / "first", "--to", tmp_path / "answer.odfleet", "--json")
    assert ondevice("fleet", "carry", "answer", file, "--data", liked, *words).code == 0


def test_a_charter_of_another_objective_is_another_fleet() -> None:
    plain = charter()
    assert b"objective" not in plain.to_bytes(), "a fleet on the loss keeps its number"
    judged = plain.model_copy(update={"objective": {"name": "dpo", "beta": 0.1}})
    assert judged.id != plain.id
    assert Charter.from_bytes(judged.to_bytes()).learns() is not None
    for wrong in ({"name": "grpo"}, {"name": "dpo", "margin": 1.0}, {"name": "dpo", "beta": "x"}):
        with pytest.raises(FleetError):
            Charter.from_bytes(judged.model_copy(update={"objective": wrong}).to_bytes())
    with pytest.raises(ConfigError):
        Charter(**{**judged.model_dump(), "subspace": "given"})
