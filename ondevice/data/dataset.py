"""A file, or rows that Python holds, as an encoded data set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice.data.encode import Encoder, encode
from ondevice.data.examples import Dataset, refuse_preferences, refuse_unread
from ondevice.data.readers.objects import PythonRows
from ondevice.data.reading import about, as_rows, each_row, open_reading, read_rows
from ondevice.data.token_rows import tokens


def read_dataset(
    path: Path | str | PythonRows,
    tokenizer: Any,
    *,
    task: str | None,
    max_length_tokens: int,
    train_on_prompt: bool = False,
    columns: Mapping[str, str] | None = None,
    classes: int = 0,
    strict_columns: bool = False,
) -> Dataset:
    """Read and encode the rows of a file, or those that Python holds; bad rows are in `.problems`.

    Raises:
        DataError: if no row can be used, or the rows are preferences, which no method here trains on.
    """
    if isinstance(path, PythonRows):
        if path.tokenized:
            return tokens(path, max_length_tokens, strict_columns)
        rows = as_rows(path, task, columns)
    else:
        rows = read_rows(path, task=task, columns=columns)
    refuse_preferences(rows)
    return encode(
        rows,
        tokenizer,
        max_length_tokens=max_length_tokens,
        train_on_prompt=train_on_prompt,
        classes=classes,
        strict_columns=strict_columns,
    )


def check_columns(
    path: Path | str,
    tokenizer: Any,
    *,
    task: str | None,
    max_length_tokens: int,
    train_on_prompt: bool = False,
    columns: Mapping[str, str] | None = None,
) -> None:
    """Refuse a file with columns that nothing reads, as `read_dataset` does with `strict_columns`.

    One row is in memory at a time.

    Raises:
        DataError: a column, or a key of a turn, is read by neither the format nor the template.
    """
    reading, encoder = open_reading(path, task=task, columns=columns), None
    rows = about(reading)
    for row in each_row(reading):
        encoder = encoder or Encoder(
            rows,
            row,
            tokenizer,
            max_length_tokens=max_length_tokens,
            train_on_prompt=train_on_prompt,
        )
        encoder.encoded(row)
    if encoder is not None:
        refuse_unread(rows.file, encoder.report)
