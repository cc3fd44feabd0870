"""The maximum length of a run that names none: what its rows need, in the model's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.data import length_of
from ondevice.data.encode import dated
from ondevice.data.reading import as_rows, ensure_usable, open_reading
from ondevice.data.stream import first_rows
from ondevice.data.token_rows import tokens
from ondevice.models import load_tokenizer, read_dims

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from ondevice.api.runfile import RunConfig
    from ondevice.core.config import DataConfig
    from ondevice.data import Length
    from ondevice.data.readers.objects import PythonRows
    from ondevice.data.reading import Reading
    from ondevice.data.rows import Rows
    from ondevice.models import LoadedModel


def _rows_of(data: DataConfig) -> Rows | Reading:
    """Return the rows that are measured: all, one at a time, or of a streamed file the first."""
    assert data.path is not None  # noqa: S101  checked by the caller
    if not data.streaming:
        return open_reading(data.path, task=data.task, columns=data.columns)
    return first_rows(data.path, data.shuffle_records, task=data.task, columns=data.columns)


def with_length(
    config: RunConfig,
    rows: Rows | Reading | None = None,
    loaded: LoadedModel | None = None,
    when: datetime | None = None,
    held_out: Rows | Reading | None = None,
    fits: Callable[[RunConfig], bool] | None = None,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run file with a maximum length, and a note about it: none if it has one already.

    Args:
        rows: of `data.path`, if they have been read.
        loaded: the model, if it is loaded.
        when: the date that the chat template sees; None for the present.
        held_out: of `data.eval_path`, if they have been read.
        fits: whether a run of a length fits into memory; without it the longest row decides.

    Raises:
        DataError: no row can be used.
        ModelError: the model has no tokenizer, or its sizes cannot be read.
    """
    data = config.data
    model = config.model
    if data.max_length_tokens is not None or (data.path is None and rows is None):
        return config, ()
    most = (loaded.dims if loaded else read_dims(model.source, model.revision)).max_positions
    if rows is None:
        assert data.path is not None  # noqa: S101  checked above
        rows = _rows_of(data)
    ensure_usable(rows)
    if held_out is None and data.eval_path is not None:
        held_out = open_reading(data.eval_path, task=data.task, columns=data.columns)
    tokenizer = loaded.tokenizer if loaded else load_tokenizer(model.source, model.revision)
    length = length_of(rows, dated(tokenizer, when), most_tokens=most, held_out=held_out)
    chosen = _of_length(config, length)
    if length.shorter is not None and fits is not None and not fits(chosen):
        length = length.shorter
        chosen = _of_length(config, length)
    return chosen, (length.note,)


def with_length_of(
    config: RunConfig,
    rows: PythonRows | None,
    held_out: PythonRows | None = None,
    loaded: LoadedModel | None = None,
    when: datetime | None = None,
    fits: Callable[[RunConfig], bool] | None = None,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return what `with_length` does, of rows that Python holds; None takes those of the run file.

    Rows of token ids are not cut.
    """
    data = config.data
    if data.max_length_tokens is not None:
        return config, ()
    if rows is not None and rows.tokenized:
        longest = tokens(rows, None).max_length_tokens
        settings = data.model_copy(update={"max_length_tokens": longest})
        return config.model_copy(update={"data": settings}), ()
    read = read_held_out = None
    if rows is not None:
        read = as_rows(rows, data.task, data.columns)
    if held_out is not None and not held_out.tokenized:
        read_held_out = as_rows(held_out, data.task, data.columns)
    return with_length(config, read, loaded, when, read_held_out, fits)


def _of_length(config: RunConfig, length: Length) -> RunConfig:
    settings = config.data.model_copy(update={"max_length_tokens": length.tokens})
    return config.model_copy(update={"data": settings})
