"""A run's own maximum length: of its longest row, unless memory does not suffice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ondevice.api.runfile import RunConfig
from ondevice.training.length import with_length


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
    run, (note,) = with_length(config(tmp_path))
    assert run.data.max_length_tokens == 96
    assert note == "max length 96 tokens: the longest row has 94"


def test_memory_that_does_not_suffice_takes_the_length_of_most_rows(tmp_path: Path) -> None:
    asked: list[int | None] = []

    def fits(run: RunConfig) -> bool:
        asked.append(run.data.max_length_tokens)
        return False

    run, (note,) = with_length(config(tmp_path), fits=fits)
    assert (asked, run.data.max_length_tokens) == ([96], 64)
    assert note.startswith("max length 64 tokens: memory does not suffice for more; 99% of the")
    assert "2 rows are longer, up to 94" in note


def test_the_rows_of_eval_path_count(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held out.jsonl", [60] * 4 + [130] * 56)
    run, _ = with_length(config(tmp_path, eval_path=str(held_out)))
    assert run.data.max_length_tokens == 136
