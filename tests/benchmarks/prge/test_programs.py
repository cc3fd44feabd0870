"""Programs of a tiny model, lowered and run for real, and the rows that `prge.executorch_step`
makes of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prge import executorch_step, programs

TINY = programs.Spec(model="tiny:llama", length=16, **programs.Q4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one program, lowered here, and its memory."""
    pytest.importorskip("executorch")
    path = tmp_path_factory.mktemp("programs")
    words = [str(path), json.dumps(asdict(TINY))]
    programs.lower_child(words)
    programs.remember(path, f"program {TINY.name}", programs.memory_child(words))
    return path


def test_a_row_of_a_program_has_every_column_of_the_table(folder: Path) -> None:
    row = executorch_step.measure("q4", TINY, folder)
    row["step_s"] = executorch_step.time_child(
        [str(folder), "2", json.dumps({"q4": asdict(TINY)})]
    )["q4"]
    assert [column["key"] for column in executorch_step.COLUMNS if row[column["key"]] is None] == []
    assert row["pte_bytes"] == (folder / f"{TINY.name}.pte").stat().st_size
    assert row["peak_rss_bytes"] - row["baseline_rss_bytes"] == row["growth_rss_bytes"]
    assert len(row["step_s"]) == 2 and min(row["step_s"]) > 0 and row["lowering_cpu_s"] > 0


def test_a_program_steps_like_eager_and_keeps_its_adapter(folder: Path) -> None:
    import torch

    program = programs.Program(TINY, folder)
    ids, before = program.random_ids(), program.adapter
    losses, projected, after = program.call(step=3)
    _, eager = programs.build_program(TINY)
    scalars = torch.tensor([programs.SEED]), torch.tensor([3]), torch.tensor([1e-3])
    tokens = torch.from_numpy(ids)
    expected = eager.train_step(tokens, tokens, torch.from_numpy(before), *scalars)
    np.testing.assert_allclose(losses, expected[0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(after, expected[2].numpy(), atol=1e-5)
    assert projected.shape == (1,) and program.adapter is after and np.abs(after).max() > 0


def test_existing_results_of_a_folder_are_not_computed_again(folder: Path) -> None:
    path = folder / f"{TINY.name}.pte"
    written = path.stat().st_mtime_ns
    assert programs.ensure(TINY, folder)["pte_bytes"] == path.stat().st_size
    assert path.stat().st_mtime_ns == written


def test_a_process_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(SystemExit) as failed:
        programs.child("benchmarks.__main__", "no_such_benchmark")
    assert "no_such_benchmark failed (2)" in str(failed.value)


@pytest.mark.parametrize(("milliseconds", "verdict"), [(150, "met"), (250, "not met")])
def test_goals_say_whether_they_are_met(milliseconds: int, verdict: str) -> None:
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
