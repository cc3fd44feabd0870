"""Rows to predict, and the task that says how: the one that is recorded, or a named one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ondevice.core.errors import ArtifactError, DataError
from ondevice.data.tasks.trained import TrainedTask, named_task_only, read_trained_task


class NoTaskError(ArtifactError):
    """The model or the adapter does not record its task."""


def task_of(folder: Path | None, name: str, task: str | None = None) -> TrainedTask:
    """Return the task that a folder of the store records, or the named one.

    Args:
        folder: of an adapter, a model or an artifact; None for a model that is elsewhere.
        name: of the folder, for messages.
        task: used if nothing is recorded.

    Raises:
        NoTaskError: there is neither.
        ConfigError: the named task does not exist.
    """
    record = None
    if folder is not None:
        record = read_trained_task(folder)
    if record is None and task is not None:
        record = named_task_only(task)
    if record is None:
        raise NoTaskError(
            f"{name} does not record its task",
            expected="a job of this version, or an upload with its ondevice_task.json",
            received="no record",
            hint="train again, or name its `task`: GET /v1/settings lists the tasks",
        )
    return record


def as_records(rows: list[Any], task: TrainedTask) -> list[dict[str, Any]]:
    """Return rows with the task's columns; a text is the row's only column.

    Raises:
        DataError: a text for a task with several columns.
    """
    places = list(task.inputs.values())
    if any(isinstance(row, str) for row in rows) and len(places) != 1:
        raise DataError(
            "a row of this task is more than a text",
            expected=f"objects with {', '.join(places)}",
            received="a text",
        )
    records = []
    for row in rows:
        if isinstance(row, str) and task.format == "chat":
            row = {"messages": [{"role": "user", "content": row}]}
        elif isinstance(row, str):
            row = {places[0]: row}
        records.append(row)
    return records
