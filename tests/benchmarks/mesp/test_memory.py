"""The benchmark of MeSP's memory, run for real on one layer: every method's step, and the issue's
bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("mlx.core")

from benchmarks.common import result
from benchmarks.mesp import memory
from benchmarks.mesp.ways import Spec
from tests.sampling import ALL

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "benchmarks/results/schema.json").read_text())


SHAPE: dict[str, Any] = {
    "layers": 1,
    "hidden": 448,
    "intermediate": 2432,
    "vocab": 1024,
    "length": 32,
}
"""Half of Qwen2.5-0.5B's widths."""


CHANGED = ("plain autodiff, all logits", *memory.COMPARED)
"""Measured on a change, a process each: the bars' methods, and those between which everything is
saved. The nightly job measures the other ways of computing the same step as well."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[memory.Bench]:
    """With every method measured once."""
    with pytest.MonkeyPatch.context() as patch:
        if not ALL:
            steps = [("several ideas", *pair) for pair in pairwise(CHANGED)]
            patch.setattr(memory, "METHODS", {name: memory.METHODS[name] for name in CHANGED})
            patch.setattr(memory, "ABLATION", steps)
        measured = memory.Bench(tmp_path_factory.mktemp("mesp") / "kept.json", **SHAPE)
        memory.methods(measured)
        yield measured


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_method_computes_the_same_step_and_the_bars_hold(bench: memory.Bench) -> None:
    rows = memory.methods(bench)
    assert [row["method"] for row in rows] == list(memory.METHODS)
    losses = [row["loss"] for row in rows if "MeZO" not in row["method"]]
    assert max(losses) - min(losses) < 1e-4
    by = {row["method"]: row for row in rows}
    ours = by["MeSP"]["step_bytes"]
    assert ours <= 0.43 * by["checkpoint a block"]["step_bytes"]
    assert ours <= 0.70 * by["block-wise autodiff (MeBP)"]["step_bytes"]
    for row in rows:
        assert row["peak_bytes"] == row["resident_bytes"] + row["step_bytes"]
        assert 0 < row["rss_anon_bytes"] < row["peak_bytes"] + (64 << 20) and row["time_s"][0] > 0
        assert (
            row["resident_bytes"] < by["MeSP"]["resident_bytes"] or "streamed" not in row["method"]
        )
    table = memory.ablation(rows)
    total = sum(row["saved_bytes"] for row in table)
    assert (
        total == by["plain autodiff, all logits"]["peak_bytes"] - by["MeSP, streamed"]["peak_bytes"]
    )
    document = result(
        "mesp/memory", rows, [memory.column("method"), *memory.SIZES], notes=memory.bars(rows)
    )
    jsonschema.validate({**document, "command": "python -m benchmarks.mesp.memory"}, SCHEMA)
    assert memory.methods(memory.Bench(bench.keep, **SHAPE)) == rows  # nothing is measured twice


def test_tiles_hold_less_at_any_length() -> None:
    """In a process that has the tuned BLAS."""
    specs = [
        asdict(
            Spec(
                "mesp",
                **{**SHAPE, "length": length, "vocab": 512},
                loss_tiles=4,
                tiles=tiles,
                product="dequantized",
            )
        )
        for length in (32, 96)
        for tiles in (True, False)
    ]
    code = (
        "import json, sys\nfrom benchmarks.mesp.ways import Spec, measure\n"
        "print([measure(Spec(**spec))['step_bytes'] for spec in json.loads(sys.argv[1])])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(specs)],
        cwd=ROOT, env=os.environ | memory.blas(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    short_tiled, short, long_tiled, long = json.loads(done.stdout.splitlines()[-1])
    assert short_tiled < short and long_tiled < 0.7 * long


@pytest.mark.timeout(900)
def test_the_command_line(bench: memory.Bench, tmp_path: Path) -> None:
    """It measures only the missing rows, and finds the same bytes.

    Within 2%: what MLX holds at once differs between processes by some tenths of a percent.
    """
    spec = replace(memory.METHODS["MeSP"], length=bench.length, **bench.base)
    known = dict(bench.known)
    before = known.pop(json.dumps(asdict(spec), sort_keys=True))
    (tmp_path / "kept.json").write_text(json.dumps(known))
    words = ["--part", "rank", "--values", str(spec.rank), "--json"]
    words += [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mesp.memory", *words, "--keep", str(tmp_path / "kept.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    rows = {row["method"]: row for row in document["rows"]}
    assert list(rows) == list(memory.COMPARED)
    assert (
        rows["MeSP"]["peak_bytes"] == pytest.approx(before["peak_bytes"], rel=0.02)
        and rows["MeSP"]["time_s"] != before["time_s"]
    )
    assert json.loads((tmp_path / "kept.json").read_text()).keys() == bench.known.keys()
    assert replace(Spec("mesp"), folder="x") == Spec(
        "mesp"
    )  # the folder of streamed weights names no other spec
