"""Evaluate a model or an artifact on labelled rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.inputs import Rows, in_memory, texts_of
from ondevice.api.opened import Opened, open_source, opened_in_memory
from ondevice.artifact.files import atomic_write
from ondevice.core.errors import DataError
from ondevice.core.process import path_of
from ondevice.data import encode, length_of, pad_id_of, read_rows
from ondevice.data.examples import refuse_preferences
from ondevice.data.readers.files import read_records
from ondevice.data.readers.objects import NAME, PythonRows
from ondevice.data.reading import as_rows
from ondevice.data.tasks.prompts import label_texts
from ondevice.data.tasks.record import refuse_other_labels
from ondevice.data.tasks.scoring import softmax
from ondevice.training.evaluate import EvalResult, evaluate_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ondevice.api.inputs import Model
    from ondevice.data.rows import Rows as ReadRows

ANSWER_TOKENS = 50
"""Longest generated answer of question answering (MeZO's setting)."""


def evaluate(
    source: Model,
    rows: Rows,
    *,
    task: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    most_rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    max_length_tokens: int | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    strict_columns: bool = False,
    predictions: Path | None = None,
) -> EvalResult:
    """Evaluate a model, or an artifact in its runtime, with or without an adapter.

    A recorded task is followed. Question answering is scored by the F1 of generated answers, which
    an artifact's program does not make.

    Args:
        source: a model or its source, a run, an adapter or an artifact.
        rows, tokenizer: as for `train`.
        task: in place of the recorded one.
        adapter: a run or an adapter; a model in memory is left as it was.
        most_rows: only the first so many.
        columns: {field: column}.
        max_length_tokens: by default the training's, or what the model takes.
        revision, dtype, device: as for `load_model`.
        strict_columns: refuse rows with a column that nothing reads.
        predictions: a file to write, a JSON line for each row.

    Raises:
        ConfigError: an argument is of the wrong type.
        DataError: no row can be used.
        ArtifactError, ModelError: the source or the adapter cannot be read, or they do not fit.
    """
    taken: Path | PythonRows
    if isinstance(rows, str | os.PathLike):
        taken = Path(rows)
    else:
        taken = texts_of(rows)
    with _opened(source, adapter, tokenizer, dtype, device, revision) as opened:
        read, tokenizer, length_tokens = _rows(opened, taken, task, columns, max_length_tokens)
        classes = 0
        if opened.loaded is not None:
            classes = opened.loaded.dims.classes
        dataset = encode(
            read,
            tokenizer,
            max_length_tokens=length_tokens,
            classes=classes,
            strict_columns=strict_columns,
        )
        refuse_other_labels(dataset, opened.answers)
        generate = opened.write and partial(opened.write, max_new_tokens=ANSWER_TOKENS)
        result = evaluate_dataset(
            opened.session, dataset, pad_id_of(opened.tokenizer), rows=most_rows, generate=generate
        )
    if result is None:
        raise DataError("the evaluation was stopped")
    if predictions is not None:
        _write_predictions(predictions, result, read)
    return result


@contextmanager
def _opened(
    source: Model,
    adapter: str | os.PathLike[str] | None,
    tokenizer: Any,
    dtype: str,
    device: str,
    revision: str | None,
) -> Iterator[Opened]:
    """Open a source for the duration of a block."""
    place = None
    if adapter is not None:
        place = path_of(adapter, "the adapter's folder")
    if isinstance(source, str | os.PathLike):
        yield open_source(os.fspath(source), place, dtype, device, revision)
        return
    with opened_in_memory(in_memory(source, tokenizer), place) as opened:
        yield opened


def _rows(
    opened: Opened,
    data: Path | PythonRows,
    task: str | None,
    columns: Mapping[str, str] | None,
    max_length_tokens: int | None,
) -> tuple[ReadRows, Any, int]:
    """Read rows as the named task, the record or their own columns say.

    Returns:
        the rows, the tokenizer that frames them, and their maximum length in tokens.
    """
    if opened.loaded is None:  # an artifact has fixed lengths, and the task of its export
        task = task or (None if opened.record else opened.artifact_task)
        max_length_tokens = max(opened.session.lengths_tokens or (2,))
    tokenizer = opened.tokenizer
    record = opened.record
    if task is None and record is not None:
        record = record.model_copy(update={"columns": {**record.columns, **(columns or {})}})
        tokenizer = record.with_template(tokenizer)
        if isinstance(data, PythonRows):
            read = record.labelled_rows(data.source(), NAME)
        else:
            read = record.labelled_rows(read_records(data), str(data))
        max_length_tokens = max_length_tokens or record.max_length_tokens or None
    elif isinstance(data, PythonRows):
        read = as_rows(data, task, columns)
    else:
        read = read_rows(data, task=task, columns=columns)
    refuse_preferences(read)
    if max_length_tokens is None:
        assert opened.loaded is not None  # noqa: S101  an artifact's is known
        most = opened.loaded.dims.max_positions
        max_length_tokens = length_of(read, tokenizer, percentile=100, most_tokens=most).tokens
    return read, tokenizer, max_length_tokens


def _write_predictions(path: Path, result: EvalResult, rows: ReadRows) -> None:
    """Write a JSON line for each evaluated row: its label and the model's, or the generated text."""
    texts = {row.line: label_texts(row) for row in rows.items}
    lines = []
    for row in result.predictions:
        values: dict[str, Any] = {"line": row.line, "loss": row.loss}
        if row.gold is not None and row.predicted is not None:
            labels = texts[row.line]
            shares = softmax(row.scores)
            values |= {"label": labels[row.gold], "prediction": labels[row.predicted]}
            values["probability"] = shares[row.predicted]
            values["probabilities"] = dict(zip(labels, shares, strict=True))
        elif row.text is not None:
            values |= {"prediction": row.text, "f1": row.f1, "exact_match": row.exact_match}
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    atomic_write(path, "".join(lines))
