"""A program whose loss is over some labels refuses rows with others, whose loss would be 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ondevice
from ondevice.api.runfile import RunConfig
from ondevice.api.train import run_artifact
from ondevice.core.errors import DataError
from tests.programs import program

PROGRAM = "subspace, stateful"
KNOWN = {"input_ids": [5, 6, 70], "labels": [-100, -100, 70]}
OTHER = {"input_ids": [5, 6, 71], "labels": [-100, -100, 71]}


def test_rows_with_other_labels_are_refused_by_run_and_eval(tmp_path: Path) -> None:
    """Its labels are F, ! and a tab, each of one token of the tiny tokenizer."""
    artifact = program(PROGRAM)
    data = tmp_path / "rows.jsonl"
    rows = [{"text": f"row {i}", "label": "ab"[i % 2]} for i in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def template(second: str) -> str:
        path = tmp_path / f"{ord(second)}.yaml"
        path.write_text(
            f"prompt: |\n  {{text}}\nlabel: label\ncandidates: {{a: F, b: '{second}'}}\n"
        )
        return str(path)

    def run(second: str) -> None:
        values = {
            "model.source": "the artifact's",
            "data.path": str(data),
            "data.task": template(second),
            "train.steps": 1,
            "train.out": str(tmp_path / "run"),
        }
        run_artifact(artifact, RunConfig.load(None, values), overwrite=True)

    for call in (run, lambda second: ondevice.evaluate(artifact, data, task=template(second))):
        with pytest.raises(DataError) as caught:
            call("G")
        assert "3 of 3 rows, the first in line 1" in str(caught.value)
        assert "9, 33, 70" in str(caught.value)
        call("!")


def test_held_out_rows_with_other_labels_are_refused_by_a_run_in_pytorch() -> None:
    """The labels of a loss over labels are those of the rows to train on."""
    with pytest.raises(DataError) as caught:
        ondevice.train(
            "tiny:llama", [KNOWN], method="prge", steps=1, eval_rows=[OTHER], answers=[70, 9]
        )
    assert "1 of 1 rows" in str(caught.value)
