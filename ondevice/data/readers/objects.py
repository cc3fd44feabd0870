"""Rows that a Python program holds: an iterable of records, a `datasets.Dataset`, or a DataLoader's batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ondevice.core.errors import DataError
from ondevice.data.readers.hub import named, without_fills
from ondevice.data.readers.source import Record, Source

NAME = "rows"
"""The name in messages of rows that are in no file."""


@dataclass(frozen=True)
class Given:
    """Rows from Python, read once.

    Attributes:
        records: one dictionary a row, of texts or of token ids (`input_ids`).
        batch_size: of the DataLoader that they came from.
        notes: to be said of them in the log.
    """

    records: tuple[dict[str, Any], ...]
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    sha256: str = field(init=False, default="")

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for record in self.records:
            digest.update(
                json.dumps(record, sort_keys=True, default=str, ensure_ascii=True).encode() + b"\n"
            )
        object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def tokenized(self) -> bool:
        """True if the rows are token ids already."""
        return bool(self.records) and "input_ids" in self.records[0]

    def source(self) -> Source:
        """Return the rows as a reader of a file does; what is no record is a problem of its row."""
        return Source(
            "json", (Record(number, record) for number, record in enumerate(self.records, 1))
        )


def given(rows: Any) -> Given:
    """Take rows from Python.

    Args:
        rows: any iterable of dictionaries with the keys of a data file, or of texts; a `datasets.Dataset`; a
            DataLoader, whose batches are dictionaries of columns, or lists of rows. Rows with `input_ids` are
            token ids already; without `labels` all of them are trained on.

    Raises:
        DataError: of another type, or without a row.
    """
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        several = (
            isinstance(rows, Mapping)
            and rows
            and all(hasattr(part, "column_names") for part in rows.values())
        )
        raise DataError(
            "rows of the wrong type",
            expected="an iterable of dictionaries, a datasets.Dataset or a DataLoader",
            received=type(rows).__name__,
            hint=f"give one of its splits: {', '.join(map(str, rows))}"
            if several
            else "a file is named by data.path",
        )
    features, size, notes = getattr(rows, "features", None), None, []
    names = {key: part.names for key, part in (features or {}).items() if hasattr(part, "names")}
    records: Iterable[Any] = rows
    arrow = features is not None
    if hasattr(rows, "collate_fn") and hasattr(rows, "dataset"):
        size, records = getattr(rows, "batch_size", None), _unbatched(rows)
        notes.append("rows of a DataLoader: read once; their order is the run's own, by train.seed")
    plain = (_record(record, number) for number, record in enumerate(records, 1))
    kept = tuple(named(without_fills(record) if arrow else record, names) for record in plain)
    if not kept:
        raise DataError(
            "there are no rows", expected="one row or more", received="an empty iterable"
        )
    return Given(kept, size, tuple(notes))


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
                hint="leave out of the collator's batch what is not of a row, as cu_seq_lens",
            )
        for row in range(min(lengths.values())):
            yield {key: column[row] for key, column in columns.items()}


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists of Python numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
