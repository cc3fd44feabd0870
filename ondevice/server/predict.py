"""Predict rows in the helper that holds the model, by the functions of `ondevice predict`."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ondevice.api.predict import Predictor, collect, read_input
from ondevice.artifact.adapter import load_adapter
from ondevice.core.errors import ArtifactError, DataError
from ondevice.data.tasks.trained import TrainedTask, named_task_only, read_trained_task
from ondevice.nn.adapters import adapted
from ondevice.server.engine.model import hold
from ondevice.training.trained import check_base


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


def predict(
    model: str | None,
    adapter: str | None,
    rows: list[Any],
    folder: str | None,
    name: str,
    task: str | None = None,
    max_new_tokens: int | None = None,
    artifact: str | None = None,
    job: dict[str, Any] | None = None,
) -> Generator[None, None, dict[str, Any]]:
    """Predict rows; yield after each, and return the predictions with their counts.

    Args:
        folder: where the task is recorded (`task_of`); `name` is its name.
        max_new_tokens: of a generated answer; None for twice the longest of the training.
        model, artifact, job: as for `server.engine.model.hold`.

    Raises:
        ArtifactError: the adapter was trained on another model, or the task is not recorded.
        BusyError: the model does not fit next to the job.
        DataError: no row has the columns of the task.
    """
    began = time.perf_counter()
    place = None
    if folder is not None:
        place = Path(folder)
    record = task_of(place, name, task)
    records, source = read_input(as_records(rows, record))
    longest = max(len(str(record.fields)) for record in records)
    loaded = hold(model, artifact, longest + (max_new_tokens or 0), job, precise=True)
    applied: Any = nullcontext()
    if adapter is not None:
        base: Any = loaded.source  # its digest is a cached property
        check_base(record, base, name)
        applied = adapted(loaded, load_adapter(Path(adapter)))
    with applied:
        predictor = Predictor.of(loaded, record, max_new_tokens=max_new_tokens)
        asked = predictor.asked(records, source)
        done = []
        for row in predictor.predict(asked):
            done.append(row)
            yield None
    found = collect(record, asked, done, records, time.perf_counter() - began)
    data = [{"index": row.line - 1, **_fields(row)} for row in found]
    return {"format": record.format, "data": data, **found.summary()}


def _fields(row: Any) -> dict[str, Any]:
    values = asdict(row)
    del values["line"]
    return values
