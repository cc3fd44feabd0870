"""Fine-tuning tasks on which benchmarks of methods compare losses: rows encoded once, of at most
MAX_TOKENS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_TOKENS = 256
LENGTHS = tuple(range(32, MAX_TOKENS + 1, 32))
"""Padded lengths, tokens."""


class Task:
    """Rows of one task, encoded once; those that are longer than MAX_TOKENS lose tokens or are left
    out."""

    def __init__(self, name: str, folder: Path, tokenizer: Any, eval_rows: int) -> None:
        from ondevice.data import encode, read_rows

        self.name = name
        known = None if name == "alpaca" else name
        self.train, self.valid = (
            encode(
                _cola(path) if name == "cola" else read_rows(path, task=known),
                tokenizer,
                max_length_tokens=MAX_TOKENS,
            )
            for path in (folder / name / f"{part}.jsonl" for part in ("train", "valid"))
        )
        self.valid.items[:] = self.valid.items[:eval_rows]


def _cola(path: Path) -> Any:
    """CoLA's rows; the project's templates have no CoLA, so its question is this benchmark's."""
    from ondevice.data.rows import Row, Rows
    from ondevice.data.tasks.task import Choice, Task
    from ondevice.data.tasks.templates import render

    question = "Is this sentence grammatical? Yes or No?\n{sentence}\n"
    choices = (Choice("No", ("0",)), Choice("Yes", ("1",)))
    task = Task("cola", "classification", {"sentence": ("sentence",)}, choices, question)
    rows = Rows(str(path), "classification", task="cola")
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = json.loads(text)
        actual = render(task, record.get("prompt_fields", record) | {"label": record["label"]})
        rows.items.append(Row(line, actual.pairs, actual.gold, label=actual.label, end=False))
    return rows
