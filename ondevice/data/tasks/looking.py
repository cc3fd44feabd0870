"""A file at a first look: its columns, its first rows as they are, and what they most likely hold.

This is for somebody who is about to say which column holds what: nothing is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ondevice.data.readers.files import read_records
from ondevice.data.readers.source import UNLIMITED, Limits
from ondevice.data.rows import Format
from ondevice.data.tasks.columns import (
    length_of,
    question_and_answer,
    renaming,
    text_and_label,
)
from ondevice.data.tasks.formats import format_of
from ondevice.data.tasks.task import Task, plain_name
from ondevice.data.tasks.templates import TASKS

READ = 500
"""Records that a first look reads."""
SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Form:
    """The fields of a format; `optional` ones may be left out."""

    name: Format
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMS = (
    Form("classification", ("text", "label")),
    Form("instruct", ("instruction", "output"), ("input", "system")),
    Form("completion", ("prompt", "completion")),
    Form("text", ("text",)),
    Form("chat", ("messages",)),
    Form("multiple_choice", ("question", "choices", "answer")),
    Form("preference", ("chosen", "rejected"), ("prompt",)),
    Form("thumbs", ("prompt", "completion", "label")),
)
"""The formats that columns can be named for, those of every day first."""


@dataclass(frozen=True)
class Look:
    """What a file has.

    Attributes:
        columns: names, in the order of the file.
        rows: the first ones, each value as a text.
        format: that the names fit by themselves; None if columns have to be named.
        suggested: {format: {field: column}} of the likeliest columns for some formats, the
            likeliest format first.
    """

    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]
    format: Format | None
    suggested: dict[str, dict[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return asdict(self)


def look_at(path: str | Path, rows: int = 5, limits: Limits = UNLIMITED) -> Look:
    """Read the first records of a file.

    Raises:
        DataError, MissingPackageError: the file cannot be read.
    """
    first = islice(read_records(path, limits).records, READ)
    records = [record.fields for record in first if isinstance(record.fields, dict)]
    names: dict[str, None] = {}
    for record in records:
        names.update(dict.fromkeys(map(str, _fields(record))))
    return Look(
        columns=tuple(names),
        rows=tuple(
            {str(key): _shown(value) for key, value in _fields(record).items()}
            for record in records[:rows]
        ),
        format=next((_own_format(record) for record in records if _own_format(record)), None),
        suggested=_suggest([_fields(record) for record in records], tuple(names)),
    )


def form_of(task: Task) -> dict[str, Any]:
    """Return the fields of a template: the placeholders of its prompt, and the label."""
    return {
        "name": task.name,
        "format": task.kind,
        "fields": {**{key: list(names) for key, names in task.columns.items()},
                   "label": list(task.label)},
        "labels": [choice.text.strip() for choice in task.choices],
    }  # fmt: skip


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    inner = record.get("prompt_fields")
    return {**inner, **record} if isinstance(inner, dict) else record


def _own_format(record: dict[str, Any]) -> Format | None:
    if "prompt_fields" in record:
        task = TASKS.get(plain_name(str(record.get("task"))))
        return task.kind if task else None
    change, _ = renaming(record, None, None, [])
    return format_of(change(record))


def _shown(value: Any) -> str:
    text = value
    if not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text[:SHOWN_CHARACTERS]


def _suggest(records: Sequence[dict[str, Any]], names: tuple[str, ...]) -> dict[str, Any]:
    """Suggest columns: the longest texts, and one with few different short values."""
    if not records or not names:
        return {}
    found: dict[str, Any] = {}
    if pair := text_and_label(records):
        text, label = pair
        found["classification"] = {"text": text, "label": label}
    if len(names) > 1:
        question, answer = question_and_answer(records)
        found["instruct"] = {"instruction": question, "output": answer}
        found["completion"] = {"prompt": question, "completion": answer}
    found["text"] = {"text": max(names, key=lambda name: length_of(records, name))}
    return found
