"""Predict the rows of a file into another one: it resumes after a kill, and writes all or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ondevice.api.predict import Predictor, collect, open_predictor, read_input
from ondevice.api.predictions import PredictedRow, Predictions
from ondevice.artifact.files import atomic_file, atomic_write, storage_errors
from ondevice.core.errors import ConfigError, DataError, StorageError
from ondevice.core.process import path_of
from ondevice.core.untrusted import parse_row
from ondevice.data.readers.source import Record
from ondevice.data.tasks.trained import to_text
from ondevice.data.writing import check_suffix, write_records

PARTIAL = ".partial.jsonl"
"""Is appended to the output's name: the rows that are done."""
DIGITS = 6
"""Decimal places of a probability in a file."""


@dataclass(frozen=True)
class FilePredictions:
    """The result for a file.

    Attributes:
        out: the file; it is there unless `is_interrupted`.
        predictions: of its rows; those before an interrupt.
        rows: of the file.
        resumed: rows that an earlier call had done.
        is_interrupted: Ctrl-C stopped it; the same call goes on.
    """

    out: Path
    predictions: Predictions
    rows: int
    resumed: int
    is_interrupted: bool

    def summary(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        values = self.predictions.summary() | {"rows": self.rows, "resumed": self.resumed}
        return {"out": str(self.out), "interrupted": self.is_interrupted, **values}


def predict_file(
    source: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    rows: int | None = None,
    overwrite: bool = False,
    on_row: Callable[[int, int], None] = lambda done, rows: None,
    **options: Any,
) -> FilePredictions:
    """Predict the rows of `data`, and write them to `out` with the predictions as further columns.

    Finished rows are kept next to `out` until it is written; the same call goes on from there.

    Args:
        source: a run's folder, an adapter, a model's folder or an artifact.
        data: a CSV, JSON lines or Excel file, or whatever else `read_records` reads.
        out: a .csv, .tsv, .jsonl or .xlsx file.
        rows: predict only the first so many.
        overwrite: replace `out`, and begin again.
        on_row: called with the rows that are done and all rows, first with 0.
        options: as for `open_predictor`.

    Raises:
        ConfigError, StorageError: the output has another suffix, is the input, or is there already.
        DataError: the file is empty, lacks the task's columns, or has a column "prediction".
    """
    target = path_of(out, "the output")
    check_suffix(target)
    _check_free(target, Path(data), overwrite)
    every, name = read_input(str(data))
    if not every:
        raise DataError(f"{data} is empty", expected="one row or more", received="no row")
    records = every[:rows]
    names = _columns(records)
    if taken := [name for name in names if name in ("prediction", "probability", "reason")]:
        raise DataError(
            f"{data} has a column '{taken[0]}', which the predictions would replace",
            expected="no column of that name",
            received=", ".join(names),
            hint="rename the column, or predict the file that it was made from",
        )
    started = time.perf_counter()
    predictor = open_predictor(source, **options)
    asked = predictor.asked(records, name)
    partial = _Partial(target, _identity(predictor, every, options), overwrite)
    done = partial.done[: len(records)]
    resumed = len(done)
    is_interrupted = False
    on_row(0, len(records) - resumed)
    with partial:
        try:
            for row in predictor.predict(asked, resumed):
                partial.add(row)
                done.append(row)
                on_row(len(done) - resumed, len(records) - resumed)
        except KeyboardInterrupt:
            is_interrupted = True
    seconds_s = time.perf_counter() - started
    predictions = collect(predictor.task, asked, done, records, seconds_s)
    if not is_interrupted:
        _write(target, Path(data), names, records, predictions)
        partial.remove()
    return FilePredictions(target, predictions, len(records), resumed, is_interrupted)


def _check_free(target: Path, data: Path, overwrite: bool) -> None:
    if os.path.realpath(target) == os.path.realpath(data):
        raise ConfigError(
            "the output is the input", expected="another file for --out", received=str(target)
        )
    if target.exists() and not overwrite:
        raise StorageError(
            f"{target} is there already",
            expected="a new file",
            hint="choose another name, or --overwrite",
        )


def _columns(records: Sequence[Record]) -> list[str]:
    """Return the names of all columns, in the order in which the records have them."""
    names: dict[str, None] = {}
    for record in records:
        if isinstance(record.fields, dict):
            names.update(dict.fromkeys(map(str, record.fields)))
    return list(names)


def _identity(predictor: Predictor, records: Sequence[Record], options: Mapping[str, Any]) -> str:
    """Hash what decides the predictions: task, weights, settings and rows."""
    digest = hashlib.sha256(to_text(predictor.task).encode())
    digest.update(repr((predictor.max_new_tokens, options.get("dtype"))).encode())
    digest.update("\n".join(predictor.weights_sha256).encode())
    for record in records:
        digest.update(json.dumps(record.fields, default=str, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


class _Partial:
    """The rows that are done, one JSON object a line, after a line that says of what they are.

    Raises:
        StorageError: the rows of another call are there.
    """

    def __init__(self, target: Path, identity: str, overwrite: bool) -> None:
        self.path = target.with_name(target.name + PARTIAL)
        self.done: list[PredictedRow] = []
        head = json.dumps({"identity": identity})
        lines: list[str] = []
        if self.path.is_file() and not overwrite:
            lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be cut
            if lines and lines[0] != head:
                raise StorageError(
                    f"{self.path} holds rows of another model, task or file",
                    expected="the rows of the same call, to go on",
                    received="others",
                    hint="--overwrite begins again",
                )
        try:
            self.done = [PredictedRow(**parse_row(line)) for line in lines[1:]]
        except (ValueError, TypeError):
            raise StorageError(
                f"{self.path} is damaged",
                expected="a predicted row a line",
                received=f"{len(lines) - 1} lines, one of which cannot be read",
                hint="--overwrite begins again",
            ) from None
        atomic_write(self.path, "".join(f"{line}\n" for line in (head, *lines[1:])))
        self._file = self.path.open("a", encoding="utf-8")

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: PredictedRow) -> None:
        """Save a row that is done."""
        with storage_errors(self.path):
            self._put(json.dumps(asdict(row), ensure_ascii=False))

    def remove(self) -> None:
        """Remove the file, as the output is written."""
        self.path.unlink(missing_ok=True)

    def _put(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def _write(
    target: Path, data: Path, names: list[str], records: Sequence[Record], done: Predictions
) -> None:
    """Write the input's columns and the predictions."""
    added = ["prediction"]
    if any(row.probability is not None for row in done):
        added += ["probability", *(f"probability:{label}" for label in done.labels)]
    if any(row.reason is not None for row in done):
        added.append("reason")

    def rows() -> Iterator[dict[str, Any]]:
        for record, row in zip(records, done, strict=True):
            fields = record.fields if isinstance(record.fields, dict) else {}
            values: dict[str, Any] = {"prediction": row.prediction}
            if "probability" in added:
                values["probability"] = _rounded(row.probability)
            for label in done.labels:
                values[f"probability:{label}"] = _rounded(row.probabilities.get(label))
            if "reason" in added:
                values["reason"] = row.reason
            yield {str(key): value for key, value in fields.items()} | values

    with atomic_file(target) as partial:
        write_records(partial, target, [*names, *added], rows(), like=data)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
