"""The tokens of a task's label texts, for methods whose loss is over these tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.data.encode import encode
from ondevice.data.examples import Dataset
from ondevice.data.rows import Row, Rows
from ondevice.data.tasks.task import is_template
from ondevice.data.tasks.templates import find_task

LONGEST = 512
"""Maximum tokens of the made-up row that shows a task's label tokens."""


def label_tokens_of_rows(dataset: Dataset) -> tuple[tuple[int, ...], str]:
    """Return the token of each candidate, or () and the reason: all rows must share one token each."""
    if any(not item.candidates for item in dataset.items):
        return (), "its rows have no candidates"
    shared = None
    for item in dataset.items:
        tokens = tuple(
            tuple(label for label in candidate.labels if label != IGNORE)
            for candidate in item.candidates
        )
        if any(len(text) != 1 for text in tokens):
            return (), "a label text has several tokens"
        if len(set(tokens)) < len(tokens):
            return (), "two label texts are the same token"
        if shared not in (None, tokens):
            return (), "its rows have different candidates"
        shared = tokens
    return tuple(text[0] for text in shared or ()), ""


def label_tokens_of_task(name: str, tokenizer: Any) -> tuple[tuple[int, ...], str]:
    """Return `label_tokens_of_rows` for a task whose classes are words, without any of its rows."""
    task = find_task(name)
    if task.kind != "classification" or task.pairs or task.own or is_template(name):
        return (), f"the label texts of {name} are known only from its rows"
    prompt = task.prompt.format(**dict.fromkeys(task.columns, "word"))
    pairs = tuple((prompt, choice.text) for choice in task.choices)
    rows = Rows("", "classification", items=[Row(1, pairs, 0, end=False)], task=name)
    return label_tokens_of_rows(encode(rows, tokenizer, max_length_tokens=LONGEST))


def refuse_other_labels(dataset: Dataset | None, answers: Sequence[int]) -> None:
    """Refuse rows with a label that a loss over `answers` does not know: their loss would be 0.

    Raises:
        DataError: with the number of such rows and the first one's line.
    """
    if dataset is None or not answers:
        return
    known = {*answers, IGNORE}
    others = [
        item
        for item in dataset.items
        if any(not known.issuperset(one.labels) for one in (item.example, *item.candidates))
    ]
    if others:
        raise DataError(
            "rows have labels that the loss over label tokens does not know",
            expected=f"labels of one token: {', '.join(map(str, sorted(answers)))} (token ids)",
            received=f"{len(others):,} of {len(dataset.items):,} rows, the first in line {others[0].line}",
            hint="use the task or template of the training, or train or export again with rows of all labels",
        )
