"""The two benchmarks of this machine's CPU, run for real on a tiny model, and the arithmetic of their tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from benchmarks import _programs as programs
from benchmarks import executorch_gradients as gradients
from benchmarks import executorch_step, prge_step
from benchmarks import prge_step_options as options
from benchmarks._prge_forms import Forms
from ondevice.models import read_dims

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "benchmarks/results/schema.json").read_text())
TINY = programs.Spec(model="tiny:llama", length=16, **programs.Q4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one program, lowered here, and its memory."""
    pytest.importorskip("executorch")
    path = tmp_path_factory.mktemp("programs")
    words = [str(path), json.dumps(asdict(TINY))]
    programs.lower_child(words)
    programs.remember(path, f"program {TINY.name}", executorch_step.memory_child(words))
    return path


def test_a_row_of_a_program_has_what_the_table_shows(folder: Path) -> None:
    row = executorch_step.measure("q4", TINY, folder)
    row["step_s"] = executorch_step.time_child([str(folder), "2", json.dumps({"q4": asdict(TINY)})])["q4"]
    assert [column["key"] for column in executorch_step.COLUMNS if row[column["key"]] is None] == []
    assert row["pte_bytes"] == (folder / f"{TINY.name}.pte").stat().st_size
    assert row["peak_rss_bytes"] - row["baseline_rss_bytes"] == row["growth_rss_bytes"]
    assert len(row["step_s"]) == 2 and min(row["step_s"]) > 0 and row["lowering_cpu_s"] > 0


def test_a_program_steps_as_eager_does_and_keeps_its_adapter(folder: Path) -> None:
    import torch

    program = programs.Program(TINY, folder)
    ids, before = program.random_ids(), program.adapter
    losses, projected, after = program.call(step=3)
    _, eager = programs.author(TINY)
    scalars = torch.tensor([programs.SEED]), torch.tensor([3]), torch.tensor([1e-3])
    tokens = torch.from_numpy(ids)
    expected = eager.train_step(tokens, tokens, torch.from_numpy(before), *scalars)
    np.testing.assert_allclose(losses, expected[0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(after, expected[2].numpy(), atol=1e-5)
    assert projected.shape == (1,) and program.adapter is after and np.abs(after).max() > 0


def test_what_a_folder_has_is_not_made_again(folder: Path) -> None:
    path = folder / f"{TINY.name}.pte"
    written = path.stat().st_mtime_ns
    assert programs.ensure(TINY, folder)["pte_bytes"] == path.stat().st_size
    assert path.stat().st_mtime_ns == written


def test_a_process_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(SystemExit, match=r"__main__ no_such_benchmark failed \(2\): expected one of"):
        programs.child("benchmarks.__main__", "no_such_benchmark")


def test_prge_step_ends_with_a_valid_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.prge_step", "--model", "tiny:llama", "--lengths", "16", "--json"]
    command += ["--effective", "2,4", "--skip", "programs,options", "--repeats", "2", "--programs", str(tmp_path)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other on a busy machine cost minutes
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=alone)
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    rows = document["rows"]
    assert [(row["effective"], row["form"]) for row in rows] == [
        (2, "sequential"), (2, "both"), *[(4, name) for name in prge_step.FORMS],
    ]  # fmt: skip
    for row in rows:
        assert len(row["step_s"]) == 2 and row["growth_bytes"] > 0
        assert row["peak_bytes"] > row["growth_bytes"] and 0 < row["ratio"] < 10
    assert [row["speedup"] for row in rows if row["form"] == "sequential"] == [1.0, 1.0]
    assert any("goal" in note for note in document["notes"])


def test_every_option_runs_and_is_predicted_by_the_rule() -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    forms = Forms("tiny:llama")
    pairs = options.option_forms("tiny:llama")
    seconds = {name: forms.seconds(pair, 1) for name, pair in pairs.items()}
    torch.set_num_threads(threads)
    growth = {form: 100 for pair in pairs.values() for form in pair}
    rows = options.option_rows(pairs, seconds, growth, forms)
    assert [row["option"] for row in rows] == list(options.OPTIONS)
    copies = next(row for row in rows if "master" in row["option"])
    assert copies["base_state_bytes"] == 8 * copies["state_bytes"] > 0
    assert all(row["measured_ratio"] > 0 and row["when"] for row in rows)


def test_the_prediction_for_the_top_layers_is_the_formula() -> None:
    dims = replace(read_dims("tiny:llama"), layers=30)
    for queries, top in ((1, 10), (4, 10), (4, 30)):
        values = {"queries": queries, "top_layers": top}
        found = options.predictions(values, {"queries": queries}, dims)
        expected = (30 - top + 2 * queries * top) / (2 * queries * 30)
        assert found["predicted_ratio"] == pytest.approx(expected)
        assert expected <= found["predicted_with_head_ratio"] <= 1
    assert (
        options.predictions({"queries": 4, "estimator": "one_sided"}, {"queries": 4}, dims)["predicted_ratio"] == 0.625
    )


def test_gradients_are_compared_at_every_scale() -> None:
    random = np.random.default_rng(0)
    true = random.normal(size=(len(gradients.SCALES), gradients.DIRECTIONS))
    scales = np.array(gradients.SCALES)[:, None]
    exact = np.stack([7 + true * scales, 7 - true * scales], -1).tolist()
    reversed_ = np.stack([7 - true * scales, 7 + true * scales], -1).tolist()
    both = {"program": exact, "eager": exact}
    rows = gradients.gradient_rows({"fp32": both, "q4": {"program": reversed_, "eager": exact}})
    assert [(row["tested"], row["against"]) for row in rows[:: len(scales)]] == [
        ("fp32 program", "fp32 eager"), ("q4 program", "q4 eager"), ("q4 program", "fp32 program"),
    ]  # fmt: skip
    assert [row["scale"] for row in rows[:3]] == list(gradients.SCALES)
    assert all(row["correlation"] == pytest.approx(1) and row["same_sign"] == 12 for row in rows[:3])
    assert all(row["correlation"] == pytest.approx(-1) and row["same_sign"] == 0 for row in rows[3:])
    assert rows[3]["relative_error"] == pytest.approx(2)


def test_text_batches_carry_only_the_answer() -> None:
    from ondevice.models import tiny_model

    batches = gradients.text_batches(tiny_model().tokenizer, 160)
    assert len(batches) == gradients.DIRECTIONS
    for ids, labels in batches:
        assert ids.shape == labels.shape == (1, 160)
        assert 0 < (labels >= 0).sum() < 16 and (labels[labels >= 0] == ids[labels >= 0]).all()


@pytest.mark.parametrize(("milliseconds", "verdict"), [(150, "met"), (250, "not met")])
def test_goals_say_met_or_not(milliseconds: int, verdict: str) -> None:
    q4 = {
        "config": "q4",
        "pte_bytes": 90e6,
        "step_s": [milliseconds / 1e3],
        "peak_rss_bytes": 8e8,
        "growth_rss_bytes": 1e8,
    }
    (note,) = executorch_step.goals([{"config": "fp32", "pte_bytes": 541e6}, q4])
    assert f"q4 step at 64 tokens {milliseconds / 1e3:g} s, goal 0.2: {verdict};" in note
    assert "q4 peak RSS of the Python process 800 MB, goal 450: not met" in note
    assert "q4 bytes / float32 bytes 0.166, goal 0.3: met" in note
