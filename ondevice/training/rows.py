"""The rows of a run: read and encoded, or a window of a stream at a time; their batches, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ondevice.data import Batches, pad_id_of, read_dataset, split_rows

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.api.runfile import RunConfig
    from ondevice.core.session import Session
    from ondevice.data import Dataset
    from ondevice.data.objects import Given
    from ondevice.data.stream import Stream, StreamBatches


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, encoded: those to train on, those to evaluate on (or None), and the padding token.

    Where the file is streamed, `train` is its first window and `stream` all of it.
    """

    train: Dataset
    evaluation: Dataset | None
    pad: int
    stream: Stream | None = None

    def figures(self) -> dict[str, Any]:
        """Return what is known of the rows to train on."""
        return self.train.figures() if self.stream is None else self.stream.figures()


def read_rows_of(
    config: RunConfig, tokenizer: Any, max_length_tokens: int, task: str | None = None,
    given: Given | None = None, given_eval: Given | None = None, classes: int = 0,
) -> RunRows:  # fmt: skip
    """Read and encode the rows that a run file names, or those that Python holds; for `classes` see `encode`.

    Raises:
        DataError: a file has no row that can be used.
    """
    data = config.data
    path, eval_path = given or data.path, given_eval or data.eval_path
    assert path is not None  # noqa: S101  the callers refuse a run without rows before anything is loaded

    def read(path: Path | Given) -> Dataset:
        return read_dataset(
            path,
            tokenizer,
            task=data.task or task,
            columns=data.columns,
            max_length_tokens=max_length_tokens,
            train_on_prompt=data.train_on_prompt,
            classes=classes,
        )

    if data.streaming and not given:
        stream = _open_stream(config, tokenizer, max_length_tokens, task, classes)
        return RunRows(stream.first, read(eval_path) if eval_path else None, pad_id_of(tokenizer), stream)
    train = read(path)
    if data.validation_split:
        return RunRows(*split_rows(train, data.validation_split, config.train.seed), pad_id_of(tokenizer))
    return RunRows(train, read(eval_path) if eval_path else None, pad_id_of(tokenizer))


def _open_stream(config: RunConfig, tokenizer: Any, max_length_tokens: int, task: str | None, classes: int) -> Stream:
    from ondevice.data.encode import encode
    from ondevice.data.stream import Stream

    data = config.data
    assert data.path is not None  # noqa: S101  checked by `check_data`
    return Stream(
        data.path,
        lambda rows: encode(
            rows,
            tokenizer,
            max_length_tokens=max_length_tokens,
            train_on_prompt=data.train_on_prompt,
            allow_empty=True,
            classes=classes,
        ),
        task=data.task or task,
        columns=data.columns,
        window_records=data.shuffle_records,
        seed=config.train.seed,
    )


def batches_of(session: Session, rows: RunRows, config: RunConfig) -> Batches | StreamBatches:
    """Return the batches of a run by step number."""
    # An exported program fixes the rows of a step; any other session takes what the run file says.
    size, packing = session.batch_size or config.train.batch_size, config.data.packing
    if rows.stream is None:
        return Batches(rows.train, size, session.lengths_tokens, config.train.seed, rows.pad, packing=packing)
    from ondevice.data.stream import StreamBatches

    return StreamBatches(rows.stream, size, session.lengths_tokens, rows.pad, packing=packing)


def answers_of_run(rows: RunRows) -> tuple[tuple[int, ...], str]:
    """Return the tokens of the answers that the rows share, or none and why."""
    from ondevice.data.answers import answers_of_rows

    answers, reason = answers_of_rows(rows.train)
    if rows.stream is not None and len(answers) == 1:
        return (), "the first window has one label alone"
    return answers, reason
