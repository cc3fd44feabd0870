"""A fleet whose processes are killed at any moment; `python -m benchmarks.fleet.kills` does it fifty times."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fleet.kills import run

ROUNDS = 12


def test_a_fleet_under_kill_9_ends_with_the_hash_of_one_that_was_left_alone(tmp_path: Path) -> None:
    alone, killed = (
        run(tmp_path / "alone", ROUNDS, 0),
        run(tmp_path / "killed", ROUNDS, 6, timeout_s=120),
    )
    assert killed["kills"] >= 1
    assert (killed["hash"], killed["hashes"]) == (alone["hash"], 1)
