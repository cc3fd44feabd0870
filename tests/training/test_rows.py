"""The rows of a run: opened once, and its own maximum length, which holds the longest row if memory suffices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.api.runfile import RunConfig
from ondevice.data.readers.objects import PythonRows
from ondevice.data.reading import as_rows
from ondevice.data.rows import Rows
from ondevice.training import rows as training_rows
from ondevice.training.rows import OpenedRows, maximum_length


def write(path: Path, sizes: list[int]) -> Path:
    rows = [{"prompt": "a" * size, "completion": "b"} for size in sizes]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(tmp_path: Path, **data: Any) -> RunConfig:
    path = write(tmp_path / "rows.jsonl", [60] * 198 + [90, 92])
    return RunConfig.parse(
        {"model": {"source": "tiny:llama"}, "data": {"path": str(path), **data}}, "test"
    )


def test_the_longest_row_decides(tmp_path: Path) -> None:
    run = config(tmp_path)
    length, (note,) = maximum_length(run.model, OpenedRows(run.data))
    assert length == 96
    assert note == "max length 96 tokens: the longest row has 94"


def test_memory_that_does_not_suffice_takes_the_length_of_most_rows(tmp_path: Path) -> None:
    asked: list[int] = []

    def fits(tokens: int) -> bool:
        asked.append(tokens)
        return False

    run = config(tmp_path)
    length, (note,) = maximum_length(run.model, OpenedRows(run.data), fits=fits)
    assert (asked, length) == ([96], 64)
    assert note.startswith("max length 64 tokens: memory does not suffice for more; 99% of the")
    assert "2 rows are longer, up to 94" in note


def test_the_rows_of_eval_path_count(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held out.jsonl", [60] * 4 + [130] * 56)
    run = config(tmp_path, eval_path=str(held_out))
    assert maximum_length(run.model, OpenedRows(run.data))[0] == 136


def test_rows_from_python_are_converted_once_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the objective, the length and the encoding."""
    converted: list[int] = []

    def count(rows: PythonRows, *how: Any) -> Rows:
        converted.append(len(rows.records))
        return as_rows(rows, *how)

    monkeypatch.setattr(training_rows, "as_rows", count)
    rows = [{"prompt": "a b", "completion": "c"}] * 4
    trained = ondevice.train("tiny:llama", rows, eval_rows=rows[:3], steps=1, out=tmp_path / "run")
    assert trained.data["train"]["sequences"] == 4
    assert sorted(converted) == [3, 4]
