"""Parquet and Arrow files as records, through pyarrow; a few rows are in memory at once.

A file of a few kB can hold gigabytes. The sizes that the file states decide how many rows are
decoded at once. Because those sizes may lie, the decoded bytes are counted, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.untrusted import Refused, parse_json
from ondevice.core.untrusted.columns import check_batch, rows_of
from ondevice.data.readers.hub import with_label_names, without_fills
from ondevice.data.readers.source import UNLIMITED, Limits, Record, Source, missing_package

_ROWS = 1024
_BATCH_BYTES = 16 << 20
"""Decoded at once, by the sizes that the file states."""
_BUFFER_BYTES = 1 << 20
"""Read at once of a column; without it pyarrow reads all of a row group's column."""

_DAMAGED = (OSError, ValueError, OverflowError)
"""What reading raises besides pyarrow's own exceptions: a stated length may be more than Python's
`read` takes."""


def read_columnar(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Read a file; a Hugging Face data set's class labels become their names, `line` counts rows.

    Raises:
        DataError: the file is damaged, of another kind, without a row, or too large uncompressed.
        MissingPackageError: pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise missing_package(path, "pyarrow", "JSON lines") from None
    try:
        schema, batches = _open(path, limits)
        first = next(batches, None)
    except MemoryError:  # also an ArrowException: a damaged file may state any size
        raise
    except (pyarrow.ArrowException, *_DAMAGED) as error:
        message = f"cannot read {path}: {_first_line(error)}"
        raise DataError(message, expected="a Parquet or Arrow file") from None
    if first is None:
        raise DataError(f"{path} is empty", expected="at least one row", received="none")
    return Source("columnar", _records(path, first, batches, _names(schema.metadata or {}), limits))


def _open(path: Path, limits: Limits) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the batches of rows."""
    size = path.stat().st_size
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as parquet

        file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        limits.check_unpacked(path, sum(group.total_byte_size for group in groups), "JSON lines")
        widths = (group.total_byte_size // max(1, group.num_rows) for group in groups)
        count = max(1, min(_ROWS, _BATCH_BYTES // max(1, *widths, 1)))
        # One thread: each additional one would decode a column of its own, and take a stack.
        batches = file.iter_batches(count, use_threads=False)
        return file.schema_arrow, (check_batch(batch, size) for batch in batches if batch.num_rows)
    from pyarrow import ipc

    with path.open("rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    if is_file:
        reader = ipc.open_file(path)
        stored = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        reader = stored = ipc.open_stream(path.open("rb"))
    return reader.schema, (piece for batch in stored for piece in _pieces(check_batch(batch, size)))


def _pieces(batch: Any) -> Iterator[Any]:
    return (batch.slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))


def _records(
    path: Path, first: Any, batches: Iterator[Any], names: dict[str, list[str]], limits: Limits
) -> Iterator[Record]:
    import pyarrow

    batch, number, unpacked_bytes = first, 0, 0
    while batch is not None:
        unpacked_bytes += batch.nbytes
        limits.check_unpacked(path, unpacked_bytes, "JSON lines")
        try:
            rows, batch = rows_of(batch), None
        except Refused as error:
            raise DataError(f"{path} is damaged after row {number}: {error}") from None
        for row in rows:
            number += 1
            yield Record(number, with_label_names(without_fills(row), names))
        try:
            batch = next(batches, None)
        except MemoryError:
            raise
        except (pyarrow.ArrowException, *_DAMAGED) as error:
            raise DataError(f"{path} is damaged after row {number}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of class labels from the metadata that the package `datasets` writes."""
    try:
        features = parse_json(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return {
            key: list(feature["names"])
            for key, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
