"""The table of accuracies over weights off the grid: only seeds that both forms have are compared."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.models.low_bits_tasks import file_of, table


def test_seeds_that_one_form_lacks_are_left_out(tmp_path: Path) -> None:
    args = Namespace(runs=tmp_path, tasks="sst2,rte", seeds=3, steps=4)
    found = {"float32": [0.5, 0.7, 0.9], "q4dq": [0.52, 0.68]}
    for form, values in found.items():
        for seed, accuracy in enumerate(values):
            file = file_of(args, ("sst2", form, seed))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"accuracy": accuracy, "loss": 1.0}))
    first, rounded = table(args, bits=4.55)
    assert (first["task"], first["seeds"], first["accuracy"]) == ("sst2", 2, [0.5, 0.7])
    assert (rounded["form"], rounded["bits"], rounded["accuracy"]) == ("q4dq", 4.55, [0.52, 0.68])
    assert rounded["against_float32"] == pytest.approx(0.0)
    assert rounded["error"] == pytest.approx(0.02)
    assert first["error"] is None
