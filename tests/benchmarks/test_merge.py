"""Rows of new runs go into the committed result of the same benchmark and machine, and nothing else
changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import committed, merge


def test_rows_are_added_and_those_with_more_seeds_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def document(rows: list[dict], machine: str = "gpu") -> dict:
        return {
            "benchmark": "prge/race",
            "machine": {"name": machine},
            "notes": [machine],
            "rows": rows,
        }

    def row(variant: str, seeds: int, mean: float) -> dict:
        return {"task": "t", "variant": variant, "seeds": seeds, "mean": mean, "curve": [1]}

    monkeypatch.setattr(committed, "RESULTS", tmp_path)
    new = tmp_path / "new.json"
    place = tmp_path / "prge" / "race" / "gpu.json"

    def call(rows: list[dict]) -> list[tuple]:
        new.write_text(json.dumps(document(rows)))
        monkeypatch.setattr(
            sys, "argv", ["merge", str(new), "--key", "task,variant", "--sort", "task,-mean"]
        )
        merge.main()
        return [
            (one["variant"], one["seeds"], one["mean"])
            for one in json.loads(place.read_text())["rows"]
        ]

    assert call([row("a", 2, 0.5), row("b", 5, 0.6)]) == [("b", 5, 0.6), ("a", 2, 0.5)]
    assert call([row("a", 5, 0.7), row("b", 2, 0.9), row("c", 2, 0.1)]) == [
        ("a", 5, 0.7),
        ("b", 5, 0.6),
        ("c", 2, 0.1),
    ]
    kept = json.loads(place.read_text())
    assert kept["notes"] == ["gpu"] and all("curve" not in one for one in kept["rows"])
    with pytest.raises(SystemExit) as refused:
        merge.merged(kept, document([], "cpu"), ("task",))
    assert str(refused.value).startswith("machine: ")


def test_rows_of_another_processor_with_the_same_name_are_refused() -> None:
    old, new = of_rows({"task": "x"}), of_rows({"task": "y"})
    new["machine"] = {"name": "m", "instructions": "AVX2"}
    assert len(merge.merged(old, new, ("task",))["rows"]) == 2  # an older result does not say
    old["machine"] = {"name": "m", "instructions": "AVX-512 VNNI"}
    with pytest.raises(SystemExit) as refused:
        merge.merged(old, new, ("task",))
    assert str(refused.value) == "instructions: expected AVX-512 VNNI, received AVX2"


def of_rows(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": "a/b", "machine": {"name": "m"}, "columns": [], "rows": list(rows)}


@pytest.mark.parametrize("of", [len, list], ids=["number", "names"])
def test_of_two_rows_with_one_key_the_one_with_more_seeds_stays(of: Any) -> None:
    def row(seeds: int, mean: float, task: str = "x") -> dict[str, Any]:
        return {"task": task, "seeds": of(range(5 - seeds, 5)), "mean": mean}

    two, five, other = row(2, 0.5), row(5, 0.75), row(1, 0.25, "y")
    for old, new, stays in (
        (two, five, five),
        (five, two, five),
        (two, row(2, 0.625), row(2, 0.625)),
    ):
        assert merge.merged(of_rows(old), of_rows(new, other), ("task",))["rows"] == [stays, other]


def test_new_columns_are_added() -> None:
    old, new = of_rows({"task": "x"}), of_rows({"task": "y", "error": "late"})
    old["columns"] = [{"key": "task", "title": "Task"}]
    new["columns"] = [{"key": "error"}, {"key": "task", "title": "Rows"}]
    assert merge.merged(old, new, ("task",))["columns"] == [
        {"key": "task", "title": "Task"},
        {"key": "error"},
    ]
