"""The tokens that a task's rows can be answered with, for methods whose loss is over them alone."""

from __future__ import annotations

from typing import Any

from ondevice.core.session import IGNORE
from ondevice.data.encode import encode
from ondevice.data.examples import Dataset
from ondevice.data.rows import Row, Rows
from ondevice.data.tasks.task import Task, is_template
from ondevice.data.tasks.templates import find_task

LONGEST = 512
"""Tokens of a row that is made to see a task's answers."""


def answers_of_rows(dataset: Dataset) -> tuple[tuple[int, ...], str]:
    """Return the candidates' tokens, and why there are none: all rows must share theirs, of one token each."""
    if any(not item.candidates for item in dataset.items):
        return (), "its rows have no candidates"
    found = None
    for item in dataset.items:
        tokens = tuple(
            tuple(label for label in c.labels if label != IGNORE) for c in item.candidates
        )
        if any(len(answer) != 1 for answer in tokens):
            return (), "an answer has several tokens"
        if len(set(tokens)) < len(tokens):
            return (), "two answers are the same token"
        if found not in (None, tokens):
            return (), "its rows have different candidates"
        found = tokens
    return tuple(answer[0] for answer in found or ()), ""


def answers_of_task(name: str, tokenizer: Any) -> tuple[tuple[int, ...], str]:
    """Return `answers_of_rows` of a task whose classes are words, without a row of it."""
    task: Task = find_task(name)
    if task.kind != "classification" or task.pairs or task.own or is_template(name):
        return (), f"the answers of {name} are known from its rows alone"
    prompt = task.prompt.format(**dict.fromkeys(task.columns, "word"))
    pairs = tuple((prompt, choice.answer) for choice in task.choices)
    rows = Rows("", "classification", items=[Row(1, pairs, 0, end=False)], task=name)
    return answers_of_rows(encode(rows, tokenizer, max_length_tokens=LONGEST))
