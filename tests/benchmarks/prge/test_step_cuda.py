"""The script of the marked GPU run works: without a GPU it runs the same steps in eager."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("torch")

from benchmarks.prge import step_cuda

SCHEMA = json.loads(
    (Path(__file__).resolve().parents[3] / "benchmarks/results/schema.json").read_text()
)


@pytest.mark.parametrize("queries", [1, 2])
def test_the_script_ends_with_a_valid_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queries: int
) -> None:
    out = tmp_path / "result.json"
    words = f"--shapes tiny --lengths 8 --batches 1,2 --replays 2 --repeats 1 --mezo --queries {queries} --out {out}"
    monkeypatch.setattr(sys, "argv", ["step_cuda", *words.split()])
    step_cuda.main()
    document = json.loads(out.read_text())
    jsonschema.validate(document, SCHEMA)
    rows = document["rows"]
    assert [(row["length"], row["batch"]) for row in rows] == [(8, 1), (8, 2)]
    assert [row["mezo_s"] is None for row in rows] == [False, True]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["sequential_s"][0] / row["inner_s"][0])
        assert row["overhead"] > 0
        assert [row[loop] is None for loop in ("signs_s", "queries_s")] == [
            queries == 1
        ] * 2  # each loop alone
