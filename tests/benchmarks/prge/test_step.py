"""The forms of a step, run for real on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest

from benchmarks.prge import step
from tests.warm import Warm

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "benchmarks/results/schema.json").read_text())


@pytest.mark.nightly
def test_the_script_ends_with_a_valid_result(tmp_path: Path, warm: Warm) -> None:
    command = [
        str(warm.python),
        "-m",
        "benchmarks.prge.step",
        "--model",
        "tiny:llama",
        "--lengths",
        "16",
        "--json",
    ]
    command += [
        "--effective",
        "2,4",
        "--skip",
        "programs",
        "--repeats",
        "2",
        "--programs",
        str(tmp_path),
    ]
    alone = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }  # threads that wait for each other on a busy machine cost minutes
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=alone)
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    rows = document["rows"]
    assert [(row["effective"], row["form"]) for row in rows] == [
        (2, "sequential"), (2, "both"), *[(4, name) for name in step.FORMS],
    ]  # fmt: skip
    for row in rows:
        assert len(row["step_s"]) == 2 and row["growth_bytes"] > 0
        assert row["peak_bytes"] > row["growth_bytes"] and 0 < row["ratio"] < 10
    assert [row["speedup"] for row in rows if row["form"] == "sequential"] == [1.0, 1.0]
    assert any("goal" in note for note in document["notes"])
