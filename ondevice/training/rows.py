"""The rows of a run: opened once, for their format, their length and their encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.data import Batches, length_of, pad_id_of, split_rows
from ondevice.data.encode import dated, encode
from ondevice.data.examples import check_ids, refuse_preferences
from ondevice.data.readers.objects import NAME, PythonRows
from ondevice.data.reading import as_rows, ensure_usable, open_reading
from ondevice.data.rows import Rows
from ondevice.data.stream import Stream, StreamBatches, first_rows
from ondevice.data.tasks.record import label_tokens_of_rows
from ondevice.data.tasks.templates import find_task
from ondevice.data.tasks.trained import TrainedTask, example_prompt, trained_task
from ondevice.data.token_rows import tokens
from ondevice.models import load_tokenizer, read_dims
from ondevice.training.identity import encoded_identity

if TYPE_CHECKING:
    from datetime import datetime

    from ondevice.core.config import DataConfig, ModelConfig, TrainConfig
    from ondevice.data import Dataset
    from ondevice.data.lengths import RowSizes
    from ondevice.data.reading import Reading
    from ondevice.data.rows import Format
    from ondevice.models import LoadedModel


class OpenedRows:
    """The rows of a run before a tokenizer has seen them, opened when they are first needed.

    Args:
        data: how they are read.
        rows, eval_rows: rows that Python holds, instead of `data.path` and `data.eval_path`.
        task: the task of an exported program; `data.task` comes first.
    """

    def __init__(
        self,
        data: DataConfig,
        rows: PythonRows | None = None,
        eval_rows: PythonRows | None = None,
        task: str | None = None,
    ) -> None:
        self.data = data
        self.rows = rows
        self.eval_rows = eval_rows
        self.task = data.task or task
        self.streams = data.streaming and rows is None
        self.sizes: RowSizes | None = None
        """Of the rows to train on, once `maximum_length` has measured them."""

    @property
    def format(self) -> Format:
        """The format of the rows to train on; only the records that decide it are read."""
        if self.rows is not None and self.rows.tokenized:
            return "text"
        if self.task is not None:
            return find_task(self.task).kind
        assert not isinstance(self.train, PythonRows)  # noqa: S101  these are token ids
        return self.train.format

    @cached_property
    def train(self) -> Rows | Reading | PythonRows:
        """The rows to train on: texts, of a streamed file the first ones, or token ids."""
        if not self.streams:
            return self._open(self.rows, self.data.path)
        path, window = self.data.path, self.data.shuffle_records
        assert path is not None  # noqa: S101  the callers refuse a run without rows
        return first_rows(path, window, task=self.task, columns=self.data.columns)

    @cached_property
    def held_out(self) -> Rows | Reading | PythonRows | None:
        """The rows to evaluate on, likewise; None if there are none."""
        if self.eval_rows is None and self.data.eval_path is None:
            return None
        return self._open(self.eval_rows, self.data.eval_path)

    def _open(self, rows: PythonRows | None, path: Path | None) -> Rows | Reading | PythonRows:
        if rows is None:
            assert path is not None  # noqa: S101  the callers refuse a run without rows
            return open_reading(path, task=self.task, columns=self.data.columns)
        if rows.tokenized:
            return rows
        return as_rows(rows, self.task, self.data.columns)

    def texts(self) -> Rows:
        """Return every text to train on, of a streamed file the first ones.

        Raises:
            DataError: none can be used.
        """
        assert not isinstance(self.train, PythonRows)  # noqa: S101  these are token ids
        if isinstance(self.train, Rows):
            return self.train
        return self.train.read()

    def close(self) -> None:
        """Forget the texts, once they are encoded."""
        for name in ("train", "held_out"):
            self.__dict__.pop(name, None)


def maximum_length(
    model: ModelConfig,
    opened: OpenedRows,
    loaded: LoadedModel | None = None,
    when: datetime | None = None,
    fits: Callable[[int], bool] | None = None,
) -> tuple[int | None, tuple[str, ...]]:
    """Return the maximum length of a run's rows in tokens, and a note if the rows decided it.

    The setting wins. Rows of token ids are not cut. Without rows there is no length.

    Args:
        loaded: the model, if it is loaded.
        when: the date that the chat template sees; None for the present.
        fits: whether a run of a length fits into memory; without it the longest row decides.

    Raises:
        DataError: no row can be used.
        ModelError: the model has no tokenizer, or its sizes cannot be read.
    """
    named = opened.data.max_length_tokens
    if named is not None or (opened.rows is None and opened.data.path is None):
        return named, ()
    train = opened.train
    held_out = opened.held_out
    if isinstance(train, PythonRows):
        return tokens(train, None).max_length_tokens, ()
    if isinstance(held_out, PythonRows):
        held_out = None
    most = (loaded.dims if loaded else read_dims(model.source, model.revision)).max_positions
    ensure_usable(train)
    tokenizer = loaded.tokenizer if loaded else load_tokenizer(model.source, model.revision)
    length = length_of(train, dated(tokenizer, when), most_tokens=most, held_out=held_out)
    opened.sizes = length.sizes
    if length.shorter is not None and fits is not None and not fits(length.tokens):
        length = length.shorter
    return length.tokens, (length.note,)


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, encoded: those to train on, those to evaluate on (or None), and the padding token.

    If the file is streamed, `train` is its first window and `stream` all of it. `encoded` has their digests.
    """

    train: Dataset
    evaluation: Dataset | None
    pad: int
    stream: Stream | None = None
    encoded: dict[str, Any] = field(default_factory=dict)
    task: TrainedTask | None = None
    """What the rows teach; None for rows that were token ids already."""
    tokenizer: Any = None
    """The model's own, without the date of the run."""
    sha256: str | None = None
    """Of rows that Python holds; None for a file's."""

    def figures(self) -> dict[str, Any]:
        """Return facts about the rows to train on."""
        if self.stream is None:
            return self.train.figures()
        return self.stream.figures()

    def label_tokens(self) -> tuple[tuple[int, ...], str]:
        """Return the token of each label, or () and the reason, as `label_tokens_of_rows`."""
        found, reason = label_tokens_of_rows(self.train)
        if self.stream is not None and len(found) == 1:
            return (), "the first window has only one label"
        return found, reason

    def batches(
        self,
        settings: TrainConfig,
        data: DataConfig,
        size: int | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> Batches | StreamBatches:
        """Return the batches of every step.

        Args:
            size, lengths: of an exported program, which fixes them; any other takes what the run file says.
        """
        size = size or settings.batch_size
        if self.stream is not None:
            return StreamBatches(self.stream, size, lengths, self.pad, packing=data.packing)
        return Batches(
            self.train, size, lengths, settings.seed, self.pad, data.packing, data.group_by_length
        )


def read_rows_of(
    opened: OpenedRows,
    tokenizer: Any,
    max_length_tokens: int,
    seed: int,
    *,
    when: datetime | None = None,
    classes: int = 0,
    vocabulary: int | None = None,
    preferences: bool = False,
) -> RunRows:
    """Read and encode the rows of a run; for `classes` see `encode`.

    Args:
        when: the date that the chat template sees; None for the present.
        preferences: take preference pairs and rated answers, too.
        vocabulary: rows of the model's embedding; each token id is held against it.

    Raises:
        DataError: a file has no row that can be used, or a row has a token that the model does not know.
    """
    data = opened.data
    framed = dated(tokenizer, when)
    pad = pad_id_of(framed)
    if vocabulary is not None and pad >= vocabulary:
        pad = 0  # padding is never trained on

    def encoded(rows: Rows, allow_empty: bool = False) -> Dataset:
        dataset = encode(
            rows,
            framed,
            max_length_tokens=max_length_tokens,
            train_on_prompt=data.train_on_prompt,
            allow_empty=allow_empty,
            classes=classes,
            strict_columns=data.strict_columns,
        )
        return known(dataset, Path(rows.file).name)

    def known(dataset: Dataset, name: str) -> Dataset:
        if vocabulary is None:
            return dataset
        return check_ids(dataset, vocabulary, name)

    def read(opened_rows: Rows | Reading | PythonRows) -> Dataset:
        if isinstance(opened_rows, PythonRows):
            return known(tokens(opened_rows, max_length_tokens, data.strict_columns), NAME)
        rows = opened_rows if isinstance(opened_rows, Rows) else opened_rows.read()
        if not preferences:
            refuse_preferences(rows)
        return encoded(rows)

    stream = evaluation = None
    if opened.streams:
        assert data.path is not None  # noqa: S101  checked by `check_data`
        stream = Stream(
            data.path,
            partial(encoded, allow_empty=True),
            task=opened.task,
            columns=data.columns,
            window_records=data.shuffle_records,
            seed=seed,
        )
        train = stream.first
    else:
        train = read(opened.train)
    if data.validation_split:
        train, evaluation = split_rows(train, data.validation_split, seed)
    elif opened.held_out is not None:
        evaluation = read(opened.held_out)
    opened.close()
    compared = train if stream is None else None  # windows are compared as they are read
    digests = encoded_identity(tokenizer, compared, evaluation)
    rows = RunRows(train, evaluation, pad, stream, digests)
    if opened.rows is not None:
        rows = replace(rows, sha256=opened.rows.sha256)
        if opened.rows.tokenized:
            return rows
    task = trained_task(data, train, tokenizer, task=opened.task, date=when)
    if not classes:  # a classification head reads the text itself
        task = task.model_copy(update={"prompt": example_prompt(task, tokenizer)})
    return replace(rows, task=task, tokenizer=tokenizer)


def vocabulary_of(loaded: Any) -> int:
    """Return how many rows the embedding of a loaded or opened model has."""
    model = getattr(loaded, "model", None)
    table = None if model is None else model.get_input_embeddings()
    return int(getattr(table, "num_embeddings", loaded.dims.vocab))
