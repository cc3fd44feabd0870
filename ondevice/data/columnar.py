"""Parquet and Arrow files as records, through pyarrow; a few rows are in memory at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ondevice.core.errors import DataError
from ondevice.data.hub import named, without_fills
from ondevice.data.records import Record, Source, missing_package

_ROWS = 1024


def read_columnar(path: Path) -> Source:
    """Read a file; class labels of a Hugging Face data set become their names. `line` counts rows from 1.

    Raises:
        DataError: the file is damaged or of another kind, or has no row.
        MissingPackageError: pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise missing_package(path, "pyarrow", "JSON lines") from None
    try:
        schema, batches = _open(path)
        first = next(batches, None)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"cannot read {path}: {reason}", expected="a Parquet or Arrow file") from None
    if first is None:
        raise DataError(f"{path} is empty", expected="at least one row", received="none")
    return Source("columnar", _records(path, first, batches, _names(schema.metadata or {})))


def _open(path: Path) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the batches of rows."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as parquet

        file = parquet.ParquetFile(path)
        return file.schema_arrow, (batch for batch in file.iter_batches(_ROWS) if batch.num_rows)
    from pyarrow import ipc

    with path.open("rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    if is_file:
        reader = ipc.open_file(path)
        stored = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        reader = stored = ipc.open_stream(path.open("rb"))
    return reader.schema, (piece for batch in stored for piece in _pieces(batch))


def _pieces(batch: Any) -> Iterator[Any]:
    return (batch.slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))


def _records(path: Path, first: Any, batches: Iterator[Any], names: dict[str, list[str]]) -> Iterator[Record]:
    import pyarrow

    batch, number = first, 0
    while batch is not None:
        for row in batch.to_pylist():
            number += 1
            yield Record(number, named(without_fills(row), names))
        try:
            batch = next(batches, None)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged behind row {number}: {str(error).partition(chr(10))[0]}") from None


def _names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The names of class labels, from what the package `datasets` writes beside the schema."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return {key: list(feature["names"]) for key, feature in features.items()
                if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"}  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
