"""The table of tasks by methods: cells are runs of the product, and a second call goes on where the
first ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.prge import superglue

ROOT = Path(__file__).resolve().parents[3]


def test_a_committed_result_is_drawn_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "accuracy.png"
    result = ROOT / "benchmarks/results/prge/superglue/nvidia-h200.json"
    monkeypatch.setattr(superglue, "cells", None)
    monkeypatch.setattr(sys, "argv", ["table", "--of", str(result), "--plot", str(picture)])
    superglue.main()
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_a_table_continues_at_its_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"sentence": f"film {i} was {'good' if i % 2 else 'bad'}", "label": i % 2}
        for i in range(16)
    ]
    (tmp_path / "sst2").mkdir()
    for part in ("train", "valid"):
        (tmp_path / "sst2" / f"{part}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )

    def call(*more: str) -> str:
        words = f"table --model tiny:llama --data {tmp_path} --runs {tmp_path / 'runs'} --tasks sst2 --steps 2"
        words += " --fo-steps 2 --eval-every 1 --eval-rows 8"
        monkeypatch.setattr(sys, "argv", [*words.split(), *more])
        superglue.main()
        return capsys.readouterr().out

    methods = "zero-shot,default,mezo,full"
    picture = tmp_path / "accuracy.png"
    assert "left out for want of time: 7 runs" in call(
        "--methods", methods, "--seeds", "2", "--budget-s", "-1"
    )
    call("--methods", "zero-shot,default", "--seeds", "1")
    said = call("--methods", methods, "--seeds", "2", "--dry-run")
    assert "5 runs are left, 288 row forwards; 2 are done" in said
    first = next((tmp_path / "runs").rglob("default/0/figures.json"))
    before = first.stat().st_mtime_ns
    document: dict[str, Any] = json.loads(
        call(
            *("--methods", methods, "--seeds", "2", "--json"),
            *("--processes", "2", "--plot", str(picture)),
        ).splitlines()[-1]
    )
    jsonschema.validate(document, json.loads((ROOT / "benchmarks/results/schema.json").read_text()))
    assert [(row["method"], row["seeds"], row["steps"]) for row in document["rows"]] == [
        ("zero-shot", 1, 0), ("default", 2, 2), ("mezo", 2, 2), ("full", 2, 2)
    ]  # fmt: skip
    assert first.stat().st_mtime_ns == before and picture.read_bytes().startswith(b"\x89PNG")
    log = [
        json.loads(line)
        for line in (first.parent / "run" / "events.jsonl").read_text().splitlines()
    ]
    evaluations = [event["accuracy"] for event in log if event["event"] == "evaluate"]
    figures = json.loads(first.read_text())
    assert (figures["best"], figures["last"]) == (max(evaluations), evaluations[-1])
    assert {row["metric"] for row in document["rows"]} == {"accuracy"}
