"""Rows that a Python program holds: dictionaries, a `datasets.Dataset`, or a DataLoader's batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ondevice.core.errors import DataError
from ondevice.data.readers.hub import with_label_names, without_fills
from ondevice.data.readers.source import Record, Source

NAME = "rows"
"""The name in messages of rows that are not in a file."""


@dataclass(frozen=True)
class PythonRows:
    """Rows from Python, read once.

    Attributes:
        records: one dictionary a row, of texts or of token ids (`input_ids`).
        batch_size: of the DataLoader that they came from.
        notes: for the run's log.
        texts: numbers, from 1, of the rows that were only a text.
    """

    records: tuple[dict[str, Any], ...]
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    texts: frozenset[int] = frozenset()
    sha256: str = field(init=False, default="")

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for record in self.records:
            text = json.dumps(record, sort_keys=True, default=str, ensure_ascii=True)
            digest.update(text.encode() + b"\n")
        object.__setattr__(self, "sha256", digest.hexdigest())

    def source(self) -> Source:
        """Return the rows as the records of a file, numbered from 1."""
        numbered = (Record(number, record) for number, record in enumerate(self.records, 1))
        return Source("json", numbered, list(self.notes))

    @property
    def tokenized(self) -> bool:
        """True if the rows are already token ids."""
        return bool(self.records) and "input_ids" in self.records[0]


def take_rows(rows: Any) -> PythonRows:
    """Take rows from Python.

    Args:
        rows: any iterable of dictionaries with the keys of a data file, or of texts; a
            `datasets.Dataset`; a pandas `DataFrame`; or a DataLoader, whose batches are
            dictionaries of columns or lists of rows. Rows with `input_ids` are already token ids;
            without `labels` all of them are trained on.

    Raises:
        DataError: the type is another one, or the iterable is empty.
    """
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        hint = "data.path names a file"
        if isinstance(rows, Mapping) and rows:
            if all(hasattr(split, "column_names") for split in rows.values()):
                hint = f"pass one of its splits: {', '.join(map(str, rows))}"
        raise DataError(
            "rows of the wrong type",
            expected="a list of dictionaries or texts, a datasets.Dataset, a DataFrame or a DataLoader",
            received=type(rows).__name__,
            hint=hint,
        )
    to_records = getattr(rows, "to_dict", None)
    if hasattr(rows, "itertuples") and to_records:  # a DataFrame iterates its columns
        rows = [_without_holes(row) for row in to_records("records")]
    features = getattr(rows, "features", None)
    names = {key: part.names for key, part in (features or {}).items() if hasattr(part, "names")}
    batch_size, notes = None, ()
    records: Iterable[Any] = rows
    if hasattr(rows, "collate_fn") and hasattr(rows, "dataset"):
        batch_size = getattr(rows, "batch_size", None)
        records = _unbatched(rows)
        notes = ("rows of a DataLoader: read once; train.seed decides the run's own order",)
    taken = []
    texts = set()
    for number, row in enumerate(records, 1):
        record = _record(row, number)
        if isinstance(row, str):
            texts.add(number)
        if features is not None:  # a table of Arrow
            record = without_fills(record)
        taken.append(with_label_names(record, names))
    if not taken:
        raise DataError(
            "there are no rows", expected="one row or more", received="an empty iterable"
        )
    return PythonRows(tuple(taken), batch_size, notes, frozenset(texts))


def _without_holes(row: dict[Any, Any]) -> dict[str, Any]:
    """Return a row of a DataFrame with None in place of NaN."""
    return {
        str(key): None if isinstance(value, float) and value != value else value
        for key, value in row.items()
    }


def _record(row: Any, number: int) -> dict[str, Any]:
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
        raise DataError(
            f"row {number} is of the wrong type",
            expected="a dictionary with the keys of a data file, or a text",
            received=type(row).__name__,
        )
    return {key: _plain(value) for key, value in row.items()}


def _unbatched(loader: Any) -> Iterator[Any]:
    for batch in loader:
        if not isinstance(batch, Mapping):
            yield from batch
            continue
        columns = {key: _plain(value) for key, value in batch.items()}
        lengths = {
            key: len(column) if isinstance(column, (list, tuple)) else 0
            for key, column in columns.items()
        }
        if len(set(lengths.values())) != 1:
            raise DataError(
                "a DataLoader's batch has columns of different lengths",
                expected="a value of each row in every column",
                received=", ".join(f"{key} {length}" for key, length in lengths.items()),
                hint="leave out of the collator's batch whatever has no value for each row, "
                "such as cu_seq_lens",
            )
        for row in range(min(lengths.values())):
            yield {key: column[row] for key, column in columns.items()}


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists of Python numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value
