"""The figure of docs/results/models.md: each of twenty checkpoints trains three steps, computes the same in
peft, and takes the memory that its plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.checkpoints import CHECKPOINTS

EACH_CHANGE = ("gemma-4-E2B-it", "Qwen3.5-35B-A3B", "SmolVLM2-2.2B-Instruct")
"""A text model's own embeddings for layers, a mixture with delta rules, and a tower of vision."""
WITHIN = 0.15
"""The plan of the memory that was measured."""
ROUNDING = 16 * 2.0**-24
"""Of a logit. Both compute the same products, and may add them up in another order."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(EACH_CHANGE, id="three"),
        *(
            pytest.param(tuple(CHECKPOINTS)[start : start + 5], marks=pytest.mark.nightly)
            for start in range(0, len(CHECKPOINTS), 5)
        ),
    ],
)
def test_checkpoints_compute_the_same_in_peft_and_take_what_is_planned(
    names: tuple[str, ...],
) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.models.checkpoints",
        "--json",
        "--only",
        ",".join(names),
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["checkpoint"] for row in rows] == list(names)
    for row in rows:
        assert row["peft_difference"] <= ROUNDING, row
        assert abs(row["ratio"] - 1) <= WITHIN, row
        assert row["loss_last"] != row["loss_first"], row
