"""The script of the GPU run works: without a GPU it runs the same steps over the same NF4 weights
in eager."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from benchmarks.prge import jetson

SCHEMA = json.loads(
    (Path(__file__).resolve().parents[3] / "benchmarks/results/schema.json").read_text()
)


def test_the_script_ends_with_a_valid_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    words = f"--shapes tiny --lengths 8 --batches 1,2 --replays 2 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", ["jetson", *words.split()])
    jetson.main()
    document = json.loads(out.read_text())
    jsonschema.validate(document, SCHEMA)
    rows = document["rows"]
    assert [(row["length"], row["batch"]) for row in rows] == [(8, 1), (8, 2)]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["sequential_s"][0] / row["inner_s"][0])
        assert 0 <= row["loss_difference"] < 2e-2 and row["paper_speedup"] is None


def test_the_papers_figures_are_those_of_table_3() -> None:
    row = jetson.paper("Llama2-7B", 64, 1)
    assert row == {"paper_sequential_s": 3.10, "paper_inner_s": 1.69, "paper_speedup": 1.83}
    for shape, (sequential, inner, printed) in jetson.PAPER.items():
        for place, ratio in enumerate(printed):  # printed from more digits than the seconds have
            assert sequential[place] / inner[place] == pytest.approx(ratio, abs=0.03), (
                shape,
                place,
            )
    assert jetson.paper("Llama2-7B", 128, 8)["paper_inner_s"] == 8.60


def test_the_result_says_which_goals_are_met() -> None:
    rows = [
        {"model": "Llama2-7B", "length": 64, "batch": 1, "speedup": 1.93, "inner_peak_bytes": None},
        {
            "model": "Llama2-7B",
            "length": 128,
            "batch": 2,
            "speedup": 1.5,
            "inner_peak_bytes": 4.6e9,
        },
    ]
    assert [sentence.split()[-1] for sentence in jetson.bars(rows)] == ["met.", "missed."]
    assert jetson.bars([]) == []
