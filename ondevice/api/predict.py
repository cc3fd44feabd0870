"""Predict rows with what was trained: the label with its probability, or generated text.

A label's probability is the softmax over the candidates' mean log likelihoods per label token, the
numbers by which an evaluation picks the label.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.api.chat import generator_of_artifact
from ondevice.api.inputs import Rows, in_memory, texts_of
from ondevice.api.opened import NoScores, Opened, open_loaded, open_source, opened_in_memory
from ondevice.api.predictions import PredictedRow, Predictions
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.manifest import MANIFEST_NAME
from ondevice.core.errors import ArtifactError, DataError
from ondevice.core.untrusted import parse_row
from ondevice.data import encode, length_of, pad_id_of
from ondevice.data.examples import Dataset, Item
from ondevice.data.readers.files import read_records
from ondevice.data.readers.objects import NAME, take_rows
from ondevice.data.readers.source import Record, Source
from ondevice.data.tasks.prompts import label_texts
from ondevice.data.tasks.scoring import expected_value, first_line, softmax
from ondevice.data.tasks.trained import TrainedTask, named_task_only
from ondevice.exporters.executorch.packed import PackedScores
from ondevice.generation.generator import Generator, generator_of
from ondevice.training.evaluate import evaluate_dataset
from ondevice.training.trained import adapter_folder, find_trained, task_of_adapter

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from ondevice.api.inputs import Model
    from ondevice.models import LoadedModel

ROWS_AT_ONCE = 16
"""Rows that are scored together: what a kill loses at most."""
LEAST_NEW_TOKENS = 64
"""Tokens that an answer may have at least."""


class Predictor:
    """A model with its task, open to predict rows.

    Args:
        opened: scores labelled rows.
        task: what was trained.
        generator: generates answers, and ends them as the training did from now on; not needed if
            the task has labels.
        max_new_tokens: most tokens of a generated answer; by default twice the longest answer of
            the training, and at least 64.
    """

    def __init__(
        self,
        opened: Opened,
        task: TrainedTask,
        generator: Generator | None = None,
        *,
        max_new_tokens: int | None = None,
    ) -> None:
        self.opened = opened
        self.task = task
        self.tokenizer = task.with_template(opened.tokenizer)
        self.generator = generator
        if generator is not None:
            generator.end_tokens = task.end_ids(generator.tokenizer) or generator.end_tokens
        self.max_new_tokens = max_new_tokens or max(
            LEAST_NEW_TOKENS, 2 * task.longest_answer_tokens
        )

    @property
    def weights_sha256(self) -> tuple[str, ...]:
        """Digests of the model, and of the adapter if there is one."""
        session: Any = self.opened.session
        loaded = self.opened.loaded
        if loaded:
            model = loaded.source.sha256
        elif isinstance(session, PackedScores):
            model = session.sha256
        else:
            model = session.manifest.files[session.manifest.program]
        return (model, *filter(None, [self.opened.adapter_sha256]))

    @classmethod
    def of(cls, loaded: LoadedModel, task: TrainedTask, **options: Any) -> Predictor:
        """Return a predictor over a loaded model; adapters that are applied to it take part."""
        generator = None
        if not task.has_candidates:
            generator = generator_of(loaded)
        return cls(open_loaded(loaded), task, generator, **options)

    @classmethod
    def of_program(cls, generator: Generator, task: TrainedTask) -> Predictor:
        """Return a predictor over a program that generates, for a task without labels."""
        opened = Opened(NoScores(generator.model.context_tokens), generator.tokenizer)
        return cls(opened, task, generator)

    def asked(self, records: Sequence[Record], name: str = NAME) -> Asked:
        """Encode records as the training did.

        Raises:
            DataError: no record has the columns of the task.
        """
        numbered = [
            record._replace(line=number, file="") for number, record in enumerate(records, 1)
        ]
        try:
            rows = self.task.prompt_rows(Source("json", iter(numbered)), name)
        except DataError as error:
            if error.message.startswith("no usable row"):
                raise
            raise self.task.no_columns(numbered, name) from None
        if rows.format != self.task.format:
            raise self.task.no_columns(numbered, name)
        loaded = self.opened.loaded
        limit = self.task.max_length_tokens
        if loaded is None:
            limit = max(self.opened.session.lengths_tokens or (limit or 2,))
        elif not limit:
            most = loaded.dims.max_positions
            limit = length_of(rows, self.tokenizer, percentile=100, most_tokens=most).tokens
        dataset = encode(
            rows,
            self.tokenizer,
            max_length_tokens=limit,
            classes=loaded.dims.classes if loaded else 0,
        )
        reasons = {problem.line: str(problem.reason) for problem in dataset.problems}
        items = {item.line: item for item in dataset.items}  # of a conversation its last answer
        texts = {row.line: label_texts(row) for row in rows.items}
        return Asked(dataset, items, texts, reasons, len(numbered))

    def asked_text(self, text: str) -> Asked:
        """Encode a row that is only one text.

        Raises:
            DataError: the task asks for several texts.
        """
        return self.asked([self.record(text)])

    def record(self, text: str) -> Record:
        """Return a text, or a row that is written as JSON, as a record."""
        if text.lstrip().startswith("{"):
            try:
                return Record(1, parse_row(text))
            except ValueError:
                pass
        return Record(1, self.task.record_of(text))

    def one(self, asked: Asked) -> PredictedRow:
        """Predict the row of `asked_text`; DataError if it cannot be predicted."""
        (row,) = self.predict(asked)
        if row.reason is not None:
            raise DataError(f"the text cannot be predicted: {row.reason}")
        return row

    def predict(self, asked: Asked, start: int = 0) -> Iterator[PredictedRow]:
        """Yield the predictions of the rows after the first `start`."""
        for begin in range(start, asked.count, ROWS_AT_ONCE):
            numbers = range(begin + 1, min(begin + ROWS_AT_ONCE, asked.count) + 1)
            yield from self.predict_rows([(asked, number) for number in numbers])

    def predict_rows(self, rows: Sequence[tuple[Asked, int]]) -> Iterator[PredictedRow]:
        """Yield the predictions of rows by number; labels of all of them are scored together."""
        items = [asked.items.get(number) for asked, number in rows]
        scored = [item for item in items if item is not None and item.candidates]
        scores = iter(self._scores(rows[0][0].dataset, scored))
        for (asked, number), item in zip(rows, items, strict=True):
            if item is None:
                yield asked.refusal(number)
                continue
            if item.candidates:
                row = self._choose(asked, item, next(scores))
            else:
                row = self._write(item)
            yield replace(row, left_out_tokens=item.dropped_tokens)

    def _scores(self, dataset: Dataset, items: list[Item]) -> list[tuple[float, ...]]:
        """Return the mean log likelihood per label token of each candidate, in the items' order."""
        if not items:
            return []
        result = evaluate_dataset(
            self.opened.session, replace(dataset, items=items), pad_id_of(self.tokenizer)
        )
        assert result is not None  # noqa: S101  nothing stops it
        return [row.scores for row in result.predictions]

    def _choose(self, asked: Asked, item: Item, scores: tuple[float, ...]) -> PredictedRow:
        chosen = max(range(len(scores)), key=scores.__getitem__)
        if not np.isfinite(scores[chosen]):
            return PredictedRow(item.line, None, reason="the model's loss is not a number")
        shares = softmax(scores)
        texts = asked.texts[item.line]
        prediction: str | float = texts[chosen]
        if asked.dataset.values:
            prediction = expected_value(scores, asked.dataset.values)
        named = dict(zip(texts, shares, strict=True))
        return PredictedRow(item.line, prediction, shares[chosen], named)

    def _write(self, item: Item) -> PredictedRow:
        text, is_cut = self.answer(item.example.ids[: item.prompt_tokens])
        return PredictedRow(item.line, text, is_cut=is_cut)

    def answer(self, prompt: Sequence[int]) -> tuple[str, bool]:
        """Generate the answer to a prompt; also return whether it reached its most tokens."""
        generator = self.generator
        if generator is None:
            assert self.opened.write is not None  # noqa: S101  `open_predictor` refuses it
            return self.opened.write(tuple(prompt), max_new_tokens=self.max_new_tokens), False
        ids, ended = [], False
        for token in generator.tokens(prompt, max_new_tokens=self.max_new_tokens):
            ended = token.ends
            if not ended:
                ids.append(token.id)
            ended = ended or self.is_complete(ids)
            if ended:
                break
        return self.text_of(ids), not ended

    def is_complete(self, ids: list[int]) -> bool:
        """Return True if an answer needs no more tokens: that to a question is one line."""
        return self.task.format == "qa" and "\n" in self._text(ids).lstrip("\n")

    def text_of(self, ids: list[int]) -> str:
        """Return the text of an answer's tokens."""
        text = self._text(ids)
        if self.task.format == "qa":
            text = first_line(text)
        return text

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Asked:
    """Encoded rows, by number from 1: items, candidates' texts, and why others cannot be predicted."""

    dataset: Dataset
    items: Mapping[int, Item]
    texts: Mapping[int, tuple[str, ...]]
    reasons: Mapping[int, str]
    count: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens of the first row's prompt; DataError if it cannot be encoded."""
        item = self.items.get(1)
        if item is None:
            raise DataError(f"the text cannot be a prompt: {self.reasons.get(1)}")
        return item.example.ids[: item.prompt_tokens]

    def refusal(self, number: int) -> PredictedRow:
        """Say why a row cannot be predicted."""
        reason = self.reasons.get(number, "cannot be predicted")
        return PredictedRow(number, None, reason=reason)


def predict(
    source: Model,
    rows: Rows,
    *,
    model: Model | None = None,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    max_new_tokens: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    on_row: Callable[[int, int], None] | None = None,
) -> Predictions:
    """Predict rows, which need no labels, as the training asked for them.

    Args:
        source: a run, an adapter, a model or its folder, or an artifact.
        rows, tokenizer: as for `train`.
        model: the base model of an adapter, by default the one that it names.
        adapter: a run or an adapter; a model in memory is left as it was.
        task: only for what has no record of its task: a task's name or a template's path.
        columns: {field: column}, if the columns are not named as in the training.
        max_new_tokens: most tokens of a generated answer.
        dtype, device: as for `load_model`.
        on_row: called with the rows that are done and all rows.

    Raises:
        ArtifactError: nothing trained is there, its task is not recorded, or the adapter was
            trained on another base model.
        DataError: the file has no rows, or none has the columns of the task.
    """
    started = time.perf_counter()
    texts: dict[int, str] = {}
    if _is_place(rows):
        records, name = read_input(rows)
    else:
        taken = texts_of(rows)
        records, name = list(taken.source().records), NAME
        texts = {number: taken.records[number - 1]["text"] for number in taken.texts}
    options: dict[str, Any] = {"task": task, "columns": columns, "max_new_tokens": max_new_tokens}
    if _is_place(source) and (model is None or _is_place(model)):
        base = None if model is None else os.fspath(model)
        chosen = {"adapter": adapter, "dtype": dtype, "device": device, **options}
        opened = nullcontext(open_predictor(source, model=base, **chosen))
    elif _is_place(source):
        opened = _in_memory(in_memory(model, tokenizer), adapter or source, **options)
    else:
        opened = _in_memory(in_memory(source, tokenizer), adapter, **options)
    with opened as predictor:
        for number, text in texts.items():
            records[number - 1] = predictor.record(text)
        asked = predictor.asked(records, name)
        done: list[PredictedRow] = []
        for row in predictor.predict(asked):
            done.append(row)
            if on_row is not None:
                on_row(len(done), asked.count)
    return collect(predictor.task, asked, done, records, time.perf_counter() - started)


def _is_place(source: Any) -> TypeIs[str | os.PathLike[str]]:
    """Return whether a model, a run, an adapter or rows are named by their place."""
    return isinstance(source, str | os.PathLike)


@contextmanager
def _in_memory(
    loaded: LoadedModel, adapter: str | os.PathLike[str] | None, *,
    task: str | None, columns: Mapping[str, str] | None, max_new_tokens: int | None,
) -> Iterator[Predictor]:  # fmt: skip
    """Open a model in memory; arguments and errors are those of `predict`."""
    with opened_in_memory(loaded, adapter) as opened:
        described = _described(opened.record, loaded.source.source, task, columns)
        yield Predictor.of(loaded, described, max_new_tokens=max_new_tokens)


def read_input(rows: Any) -> tuple[list[Record], str]:
    """Return the records of a path or of Python's rows, and their name in messages."""
    if _is_place(rows):
        return list(read_records(os.fspath(rows)).records), os.fspath(rows)
    return list(take_rows(rows).source().records), NAME


def collect(
    task: TrainedTask,
    asked: Asked,
    done: Sequence[PredictedRow],
    records: Sequence[Record],
    seconds_s: float,
) -> Predictions:
    """Return predictions with the labels, and compare them with those that the records have."""
    labels: tuple[str, ...] = ()
    if task.format in ("classification", "regression"):
        labels = next(iter(asked.texts.values()), ())
    right = task.answers(records[: len(done)])
    compared = correct = 0
    for row in done:
        answers = right.accepted.get(row.line)
        if answers and row.prediction is not None:
            compared += 1
            chosen = row.prediction
            if row.probabilities:
                chosen = max(row.probabilities, key=row.probabilities.__getitem__)
            correct += str(chosen).strip() in answers
    return Predictions(tuple(done), labels, compared, correct, seconds_s, right.unseen)


def open_predictor(
    source: str | os.PathLike[str],
    *,
    model: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    max_new_tokens: int | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
) -> Predictor:
    """Open what was trained; arguments and errors are those of `predict`."""
    trained = find_trained(source, model)
    used = trained.adapter if adapter is None else adapter_folder(adapter)
    record = trained.task
    if used is not None and used != trained.adapter:
        record = task_of_adapter(used) or record
    described = _described(record, os.fspath(source), task, columns)
    opened = open_source(trained.model, used, dtype, device, revision or trained.revision)
    generator = None
    if not described.has_candidates:
        generator = _generator(opened, trained.model, used)
    return Predictor(opened, described, generator, max_new_tokens=max_new_tokens)


def _described(
    record: TrainedTask | None, name: str, task: str | None, columns: Mapping[str, str] | None
) -> TrainedTask:
    """Return the recorded task, or the one that the caller names, with the file's columns.

    Raises:
        ArtifactError: `name` has no record, and none is named.
    """
    if record is None and task is not None:
        record = named_task_only(task)
    if record is None:
        raise no_task(name)
    if columns:
        record = record.model_copy(update={"columns": {**record.columns, **columns}})
    return record


def _generator(opened: Opened, model: str, adapter: Path | None) -> Generator | None:
    """Return the generator of answers; None if a network of a method's own has its own way."""
    if opened.is_network:
        return None
    if opened.loaded is not None:
        return generator_of(opened.loaded)
    generator = generator_of_artifact(Path(model))
    if adapter is not None:
        generator.model.use(load_adapter(adapter))
    return generator


def no_task(source: str) -> ArtifactError:
    """Build the error for a source without a recorded task."""
    received = "no such file"
    hint = "name the task of the training: --task sst2, or --task my.yaml; or train again"
    if (Path(source) / MANIFEST_NAME).exists():
        hint = "export it with its rows (--data) or its task (--task)"
    elif not Path(source).exists():
        received = "no such folder"
        hint = f"give the folder of a run or an adapter; for a model of that name, {hint}"
    return ArtifactError(
        f"{source} does not record its task",
        expected="ondevice_task.json, which every training of this version writes",
        received=received,
        hint=hint,
    )
