"""Parquet and Arrow files as records, through pyarrow; a few rows are in memory at once.

A file of a few kB can hold gigabytes. How many rows are decoded at once follows from the sizes that the file states,
and what they take is counted as they come, because those sizes may lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.untrusted import Refused, parse_json
from ondevice.core.untrusted.columns import check_batch, rows_of
from ondevice.data.readers.hub import named, without_fills
from ondevice.data.readers.source import UNLIMITED, Limits, Record, Source, missing_package

_ROWS = 1024
_BATCH_BYTES = 16 << 20
"""Of the rows that are decoded at once, by the sizes that the file states."""
_BUFFER_BYTES = 1 << 20
"""Read at once of a column; without it pyarrow reads a column of a row group whole."""


def read_columnar(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Read a file; class labels of a Hugging Face data set become their names. `line` counts rows from 1.

    Raises:
        DataError: the file is damaged or of another kind, has no row, or is too large unpacked.
        MissingPackageError: pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise missing_package(path, "pyarrow", "JSON lines") from None
    try:
        schema, batches = _open(path, limits)
        first = next(batches, None)
    except MemoryError as error:  # also an ArrowException: a damaged file may state any size
        raise _needs_memory(path, error) from None
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"cannot read {path}: {reason}", expected="a Parquet or Arrow file"
        ) from None
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
        widest = max(
            (group.total_byte_size // max(1, group.num_rows) for group in groups), default=0
        )
        count = max(1, min(_ROWS, _BATCH_BYTES // max(1, widest)))
        # One thread: each more would decode a column besides, and take a stack.
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
            raise DataError(f"{path} is damaged behind row {number}: {error}") from None
        for row in rows:
            number += 1
            yield Record(number, named(without_fills(row), names))
        try:
            batch = next(batches, None)
        except MemoryError as error:
            raise _needs_memory(path, error) from None
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{path} is damaged behind row {number}: {str(error).partition(chr(10))[0]}"
            ) from None


def _needs_memory(path: Path, error: MemoryError) -> DataError:
    """Build the error of a file that is damaged or too large: a column's stated size is all that is known of it."""
    reason = str(error).partition("\n")[0]
    return DataError(
        f"{path} needs too much memory to be read", received=reason, hint="save it as JSON lines"
    )


def _names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The names of class labels, from what the package `datasets` writes beside the schema."""
    try:
        features = parse_json(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return {key: list(feature["names"]) for key, feature in features.items()
                if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"}  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
