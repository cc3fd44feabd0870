"""`ondevice fleet simulate`, `replay` and `status`: one adapter whatever happens to its devices."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.core.errors import DataError
from ondevice.fleet.config import FleetRun
from ondevice.fleet.simulate import Simulation
from ondevice.fleet.split import split
from tests.cli.command import CommandLine, write_rows
from tests.fleet.quadratic import Quadratic, QuadraticRows

TINY = (
    "--model",
    "tiny:llama",
    "--batch-size",
    1,
    "--set",
    "method.rank=2",
    "--queries",
    2,
    "--seed",
    3,
)


def rows(path: Path, count: int = 16) -> Path:
    """Rows of SST-2's form."""
    words = ["a dull mess", "a fine film"]
    return write_rows(path, [{"text": f"{words[i % 2]} {i}", "label": i % 2} for i in range(count)])


def simulate(ondevice: CommandLine, folder: Path, *more: object):
    data = rows(folder / "rows.jsonl")
    return ondevice("fleet", "simulate", *TINY, "--data", data, "--task", "sst2", "--devices", 4, "--rounds", 3,
                    "--out", folder / "a fleet", "--json", *more)  # fmt: skip


def test_a_simulated_fleet_ends_with_one_hash_that_its_log_gives(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    done = simulate(ondevice, tmp_path, "--local-steps", 2).json
    assert done["hashes_equal"] is True
    assert done["rounds"] == 3
    assert done["bytes_per_device_round"] == 33 + (38 + 2 * 4) + (29 + 11 + 2 * 4)
    assert done["loss_first"] != done["loss_last"]
    for place in (done["log"], tmp_path / "a fleet"):
        replayed = ondevice("fleet", "replay", place, "--json").json
        assert replayed["final_hash"] == done["final_hash"]
    assert (
        ondevice("fleet", "replay", done["log"], "--rounds", 2, "--json").json["final_hash"]
        != done["final_hash"]
    )
    status = ondevice("fleet", "status", tmp_path / "a fleet", "--json").json
    assert status["hash"] == done["final_hash"]
    assert [row["answers"] for row in status["rounds_table"]] == [4, 4, 4]


def test_a_replay_writes_the_adapter(ondevice: CommandLine, tmp_path: Path) -> None:
    from ondevice.artifact.adapter import load_adapter

    done = simulate(ondevice, tmp_path).json
    ondevice("fleet", "replay", done["log"], "--out", tmp_path / "again", "--json")
    first, again = load_adapter(done["adapter"]), load_adapter(tmp_path / "again")
    assert first.tensors.keys() == again.tensors.keys()
    for name, tensor in first.tensors.items():
        assert np.array_equal(tensor, again.tensors[name]), name
    assert not first.changes_nothing


@pytest.mark.parametrize("more", [
    ("--set", "simulation.dropout=0.5"),
    ("--set", "simulation.late=0.5"),
    ("--dirichlet", 0.1, "--set", "fleet.seeds=own", "--set", "fleet.sample=0.5"),
    ("--set", "simulation.hostile=0.25", "--set", "simulation.attack=huge", "--set", "fleet.combine=median"),
    ("--set", "fleet.momentum=0.9", "--set", "method.noise=gaussian"),
    ("--set", "fleet.open_rounds=2", "--set", "simulation.late=0.5"),
    ("--set", "fleet.clip_norm=1", "--set", "fleet.noise_multiplier=0.5"),
], ids=lambda more: str(more[-1]))  # fmt: skip
def test_whatever_happens_every_device_has_the_servers_hash(
    ondevice: CommandLine, tmp_path: Path, more: tuple[object, ...]
) -> None:
    done = simulate(ondevice, tmp_path, *more).json
    assert done["hashes_equal"] is True
    assert (
        ondevice("fleet", "replay", done["log"], "--json").json["final_hash"] == done["final_hash"]
    )
    if "simulation.late=0.5" in more and "fleet.open_rounds=2" not in more:
        assert list(done["refused"]) == ["late"]


def test_a_run_that_goes_on_ends_where_an_uninterrupted_one_does(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    whole = simulate(ondevice, tmp_path / "whole").json
    simulate(ondevice, tmp_path, "--rounds", 1)
    assert simulate(ondevice, tmp_path).code == 14, "a fleet is never replaced unasked"
    again = simulate(ondevice, tmp_path, "--resume").json
    assert again["final_hash"] == whole["final_hash"]
    other = simulate(ondevice, tmp_path, "--resume", "--learning-rate", 0.5)
    assert other.code == 14
    assert "learning_rate" in other.json["message"]
    assert simulate(ondevice, tmp_path, "--overwrite").json["final_hash"] == whole["final_hash"]


def test_wrong_settings_are_refused(ondevice: CommandLine, tmp_path: Path) -> None:
    whole = ondevice(
        "fleet", "simulate", "--model", "tiny:llama", "--method", "mezo", "--json"
    ).json
    assert "a fleet cannot share" in whole["message"]
    assert (
        "first-order fleet"
        in simulate(ondevice, tmp_path, "--set", "simulation.weak=0.5").json["message"]
    )
    few = simulate(ondevice, tmp_path, "--devices", 40).json
    assert few["error"] == "DataError"
    assert "fewer rows than devices" in few["message"]
    assert "needs seeds: shared" in simulate(
        ondevice, tmp_path, "--set", "fleet.seeds=own", "--set", "fleet.combine=median"
    ).json["message"]  # fmt: skip
    adam = simulate(ondevice, tmp_path, "--set", "method.optimizer=adam").json
    assert adam["error"] == "ConfigError"
    assert "given subspaces" in adam["message"]
    assert not (tmp_path / "a fleet").exists()
    plan = simulate(ondevice, tmp_path, "--dry-run").json["config"]
    assert plan["method"]["noise"] == "rademacher"
    assert plan["simulation"]["devices"] == 4


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_scores_rewards_and_rows_of_another_objective_are_refused(
    dry: list[str], ondevice: CommandLine, tmp_path: Path
) -> None:
    out = tmp_path / "a fleet"
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"chosen": "a b", "rejected": "a c"}] * 8)

    def refused(*more: object) -> Any:
        words = ("--model", "tiny:llama", "--devices", 2, "--out", out, "--json", *dry, *more)
        return ondevice("fleet", "simulate", *words).json

    data = rows(tmp_path / "rows.jsonl")
    for file, name, more in (
        (data, "dpo", []),
        (pairs, "kto", []),
        (data, "accuracy", []),
        (data, "grpo", ["--method", "lora", "--set", "train.reward=rewards:vowels"]),
    ):
        done = refused("--data", file, *more, "--set", f"train.objective={name}")
        assert done["error"] == "ConfigError" and f"train.objective {name}" in done["message"]
    assert not out.exists()


def dataset(count: int) -> Any:
    from types import SimpleNamespace

    from ondevice.data.examples import Dataset

    return Dataset(items=[SimpleNamespace(gold=i % 3, number=i) for i in range(count)])  # type: ignore[misc]


@pytest.mark.parametrize("concentration", [None, 0.05, 100.0])
def test_a_split_gives_every_row_to_one_device(concentration: float | None) -> None:
    parts = split(dataset(60), 7, concentration, seed=1)
    numbers = [item.number for part in parts for item in part.items]
    assert sorted(numbers) == list(range(60))
    assert min(map(len, parts)) >= 1
    again = split(dataset(60), 7, concentration, seed=1)
    assert [item.number for part in again for item in part.items] == numbers


def test_a_small_concentration_separates_the_labels() -> None:
    def purity(concentration: float) -> float:
        parts = split(dataset(600), 6, concentration, seed=2)
        most = [max(np.bincount([item.gold for item in part.items])) for part in parts]
        return sum(most) / 600

    assert purity(100.0) < 0.45 < 0.6 < purity(0.05)


def test_rows_without_labels_cannot_be_split_by_them() -> None:
    rows = dataset(8)
    rows.items[3].gold = None
    with pytest.raises(DataError):
        split(rows, 2, 0.1, seed=0)


def quadratic_fleet(folder: Path, **sections: Any) -> Simulation:
    """A session whose loss is a quadratic: its numbers are exact, so what the server does decides."""
    method = {"name": "prge", "queries": 4, "noise": "rademacher", "learning_rate": 0.05}
    values = {"model": {"source": "tiny:llama"}, "method": method, "train": {"out": folder}}
    session = Quadratic(32, seed=0, queries=4)
    return Simulation(FleetRun.parse({**values, **sections}), session, QuadraticRows(20), session)


def test_robust_rules_keep_what_hostile_devices_would_ruin(tmp_path: Path) -> None:
    def distance(attack: str, **fleet: Any) -> float:
        simulation = quadratic_fleet(
            tmp_path / f"{attack} {fleet}",
            fleet={"rounds": 30, **fleet},
            simulation={"devices": 10, "hostile": 0.2, "attack": attack},
        )
        simulation.run(False, False, lambda done: None)
        return float(np.linalg.norm(simulation.members[0].state.flat() - simulation.session.target))

    start = float(np.linalg.norm(Quadratic(32, seed=0, queries=4).target))
    for attack in ("flip", "huge"):
        assert distance(attack, combine="trimmed_mean", trim=0.2) < 0.6 * start
        assert distance(attack, combine="median") < 0.6 * start
        assert distance(attack, combine="mean") < 0.6 * start, (
            "a fifth of the devices, each no longer than an honest one"
        )


def test_a_signal_ends_the_running_round_and_the_fleet_goes_on(tmp_path: Path) -> None:
    whole = quadratic_fleet(tmp_path / "whole", fleet={"rounds": 6}, simulation={"devices": 3})
    expected = whole.run(False, False, lambda done: None).final_hash

    def interrupt(done: Any) -> None:
        if done.number == 2:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = quadratic_fleet(tmp_path / "stopped", fleet={"rounds": 6}, simulation={"devices": 3})
    result = stopped.run(False, False, interrupt)
    assert result.interrupted
    assert result.rounds == 3
    again = quadratic_fleet(tmp_path / "stopped", fleet={"rounds": 6}, simulation={"devices": 3})
    assert again.run(True, False, lambda done: None).final_hash == expected
