"""Runs on preferences: which objective, two texts of each row, their likelihoods before training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import atomic_write
from ondevice.core.capabilities import LearnsPreferences
from ondevice.core.errors import ConfigError, DataError, Need
from ondevice.core.registry import spec_of
from ondevice.core.session import IGNORE, Scoring, StepResult, Weighing, require
from ondevice.core.untrusted import read_object
from ondevice.data.batching import Batch, Batches, collate
from ondevice.data.examples import Dataset, Example, Item, rows_sha256
from ondevice.data.reading import as_rows, open_reading
from ondevice.data.stream import first_rows
from ondevice.data.tasks.templates import find_task
from ondevice.objectives import Graded, Objective, Scores, objective, objective_names
from ondevice.training.candidates import score_examples
from ondevice.training.evaluate import EvalResult, Prediction

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.config import DataConfig, TrainConfig
    from ondevice.core.session import Evaluator, Session
    from ondevice.data.readers.objects import PythonRows
    from ondevice.data.rows import Format

FILE_NAME = "reference.json"
"""File of a run for its rows' log likelihoods before training."""
DEFAULTS: dict[Format, str] = {"preference": "dpo", "thumbs": "kto"}
"""Objective of a run that names none, by the format of its rows."""
_SETTINGS = ("beta", "label_smoothing", "desirable_weight", "undesirable_weight", "margin")


def format_of(data: DataConfig, rows: PythonRows | None = None) -> Format:
    """Return the format of a run's rows; only the records that decide it are read."""
    if rows is not None:
        return "text" if rows.tokenized else as_rows(rows, data.task, data.columns).format
    if data.task is not None:
        return find_task(data.task).kind
    assert data.path is not None  # noqa: S101  the callers refuse a run without rows
    if data.streaming:
        return first_rows(
            data.path, data.shuffle_records, task=data.task, columns=data.columns
        ).format
    return open_reading(data.path, task=data.task, columns=data.columns).format


def with_objective(
    config: RunConfig, backend: str, rows: PythonRows | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run with the objective that its rows need, and a sentence about it.

    Raises:
        ConfigError: the method cannot learn from preferences in this backend, or rows and objective
            do not fit together.
    """
    chosen = config.train.objective
    kind = format_of(config.data, rows)
    if chosen not in objective_names():
        if kind not in DEFAULTS:
            return config, ()
        if chosen != "loss":
            raise ConfigError(
                f"train.objective {chosen} is a score of answers, and the rows are preferences",
                expected=", ".join(objective_names()),
                received=chosen,
            )
    name = chosen if chosen in objective_names() else DEFAULTS[kind]
    settings = {key: getattr(config.train, key) for key in _SETTINGS}
    made = objective(name, **settings)
    _check(config.method, config.data, made, kind, backend)
    train = config.train.model_copy(update={"objective": name})
    sentence = f"objective: {name}, beta {made.beta:g}"
    if name != chosen:
        rows_are = "preference pairs" if kind == "preference" else "rated answers"
        sentence += f", as the rows are {rows_are}"
    return config.model_copy(update={"train": train}), (sentence,)


def _check(method: Any, data: DataConfig, made: Objective, kind: Format, backend: str) -> None:
    formats = {"pairs": "preference", "thumbs": "thumbs"}
    if kind != formats[made.rows]:
        words = {
            "pairs": "preference pairs: columns chosen and rejected",
            "thumbs": "rated answers: columns prompt, completion and label",
        }
        raise ConfigError(
            f"train.objective {made.name} does not fit the rows",
            expected=words[made.rows],
            received=f"format {kind}",
            hint="`ondevice data FILE` shows how the rows are read",
        )
    spec = spec_of(method)
    learns = spec.capability(LearnsPreferences)
    if learns is None or backend not in learns.backends:
        raise ConfigError(
            f"method {spec.name} does not learn from preferences in {backend}",
            expected="a method that does, in torch",
            received=f"method {spec.name}, backend {backend}",
            needs=Need.PREFERENCES,
        )
    if getattr(method, "loss", None) == "answers":
        raise ConfigError(
            "a loss over the answers does not go with preferences",
            expected="method.loss: vocabulary, or left out",
            received="method.loss: answers",
        )
    for name, is_set in (("packing", data.packing), ("streaming", data.streaming)):
        if is_set:
            raise ConfigError(
                f"data.{name} does not go with preferences",
                expected=f"data.{name}: false",
                received=f"data.{name}: true",
                hint=f"leave --{name} out",
            )


def objective_of(settings: TrainConfig) -> Objective | None:
    """Return the objective over preferences that a run's settings name, or None."""
    if settings.objective not in objective_names():
        return None
    return objective(settings.objective, **{key: getattr(settings, key) for key in _SETTINGS})


def mismatched(item: Item, other: Item, limit: int) -> Example:
    """Return another row's answer after this row's prompt, of at most `limit` tokens.

    A prompt that is too long loses tokens at its front, an answer at its end.
    """
    prompt = item.example.ids[: item.prompt_tokens]
    answer = other.example.ids[other.prompt_tokens :][: limit - 1]
    prompt = prompt[max(0, len(prompt) + len(answer) - limit) :]
    return Example((*prompt, *answer), (IGNORE,) * len(prompt) + answer)


def texts_of(dataset: Dataset) -> list[tuple[Example, Example]]:
    """Return the two texts of each row: chosen and rejected, or the rated answer and, after the
    same prompt, the answer of the row before (the first row's is the last one's).

    Raises:
        DataError: answers of only one rating.
    """
    if dataset.format == "preference":
        return [(item.candidates[0], item.candidates[1]) for item in dataset.items]
    liked = {item.liked for item in dataset.items}
    if len(liked) < 2:
        raise DataError(
            "all answers have the same rating, so there is nothing to tell apart",
            expected="liked and disliked answers",
            received=f"{len(dataset.items)} rows, all rated {'up' if True in liked else 'down'}",
            hint="--column prompt=prompt --column completion=completion trains on the texts alone",
        )
    limit = dataset.max_length_tokens
    before = [dataset.items[-1], *dataset.items[:-1]]
    return [
        (item.example, mismatched(item, other, limit))
        for item, other in zip(dataset.items, before, strict=True)
    ]


@dataclass
class Weighed:
    """Computes the weights of one step's rows for a session, and stores the step's figures."""

    grade: Callable[[np.ndarray], Graded]
    figures: dict[str, float] = field(default_factory=dict)

    def __call__(self, nll: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss and each row's weight; see `ondevice.core.session.Weigh`."""
        graded = self.grade(-nll.astype(np.float64).reshape(-1, 2))
        self.figures = graded.figures
        return graded.loss, -graded.coefficients.reshape(-1)


class PreferenceRows:
    """Rows of preferences with their likelihoods before training.

    Attributes:
        reference: log likelihoods of both texts, float64 [rows, 2]; zeros if the objective has no
            reference.
    """

    def __init__(self, dataset: Dataset, reference: np.ndarray | None = None) -> None:
        self.dataset = dataset
        self.texts = texts_of(dataset)
        count = [[text.trained_tokens for text in pair] for pair in self.texts]
        self.tokens = np.array(count, dtype=np.int64)
        self.reference = np.zeros((len(self.texts), 2)) if reference is None else reference
        self.liked = None
        if dataset.format == "thumbs":
            self.liked = np.array([bool(item.liked) for item in dataset.items])

    def scores(self, rows: np.ndarray, log_likelihoods: np.ndarray) -> Scores:
        """Return what an objective takes, of the rows of these numbers."""
        liked = None if self.liked is None else self.liked[rows]
        return Scores(log_likelihoods, self.reference[rows], self.tokens[rows], liked)

    def log_likelihoods(
        self,
        session: Evaluator,
        pad: int,
        rows: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> np.ndarray | None:
        """Return the log likelihoods of both texts of the first rows, float64 [rows, 2]; None if stopped."""
        texts = self.texts[:rows]
        items = [
            Item(pair[0], pair, 0, line=item.line)
            for item, pair in zip(self.dataset.items, texts, strict=False)
        ]
        totals = score_examples(session, items, pad, None, should_stop)
        if totals is None:
            return None
        return np.array([[-totals[row, slot][0] for slot in (0, 1)] for row in range(len(items))])


class Preferences:
    """Trains and evaluates a session on preferences.

    Args:
        identity: of the model before training; log likelihoods that were stored with another one
            are computed again.
    """

    def __init__(
        self, made: Objective, train: Dataset, held_out: Dataset | None, pad: int, identity: str
    ) -> None:
        self.objective = made
        self.train = PreferenceRows(train)
        self.held_out = None if held_out is None else PreferenceRows(held_out)
        self.pad = pad
        self.identity = identity

    def begin(self, session: Session, folder: Path) -> None:
        """Take the rows' log likelihoods before training from the run's folder, or compute and store them.

        The session must be as it was opened, before a step and before a checkpoint is restored.
        """
        if not self.objective.has_reference:
            return
        parts = [part for part in (self.train, self.held_out) if part is not None]
        digest = hashlib.sha256(self.identity.encode())
        for part in parts:
            digest.update(rows_sha256(part.dataset.items).encode())
        stored = _read(folder / FILE_NAME)
        found = stored.get("log_likelihoods")
        if stored.get("identity") != digest.hexdigest() or not isinstance(found, list):
            found = [part.log_likelihoods(session, self.pad) for part in parts]
            lists = [np.asarray(values).tolist() for values in found]
            text = {"identity": digest.hexdigest(), "log_likelihoods": lists}
            atomic_write(folder / FILE_NAME, json.dumps(text))
        for part, values in zip(parts, found, strict=True):
            part.reference = np.array(values, dtype=np.float64)

    def step(
        self, session: Session, batch: Batch, step: int, rate: float
    ) -> tuple[StepResult, dict[str, float]]:
        """Run a step; return its result and the preferences' figures."""
        assert batch.rows_of_data is not None  # noqa: S101  it is of `PreferenceBatches`
        numbers = np.array(batch.rows_of_data)
        weigh = Weighed(lambda found: self.objective.grade(self.train.scores(numbers, found)))
        if isinstance(session, Weighing):
            result = session.weighted_step(batch.ids, batch.labels, weigh, step, rate)
            return result, weigh.figures
        losses = require(session, Scoring)
        # A zeroth-order method needs the loss and nothing else.
        result = losses.score_step(
            lambda: 1.0 - weigh(session.evaluate(batch.ids, batch.labels)[0])[0], step, rate
        )
        return result, weigh.figures

    def batch(self, rows: tuple[int, ...], lengths: tuple[int, ...] | None) -> Batch:
        """Return both texts of each row, one row after the other."""
        texts = [text for row in rows for text in self.train.texts[row]]
        return replace(collate(texts, lengths, self.pad), rows_of_data=rows)

    def evaluate(
        self, session: Evaluator, rows: int | None, should_stop: Callable[[], bool]
    ) -> EvalResult | None:
        """Return loss, accuracy and rewards of the held-out rows, or None if stopped."""
        held_out = self.held_out or self.train
        found = held_out.log_likelihoods(session, self.pad, rows, should_stop)
        if found is None:
            return None
        scores = held_out.scores(np.arange(len(found)), found)
        graded = self.objective.grade(scores)
        rewards = self.objective.rewards(scores)
        gold = [0] * len(found)
        if scores.liked is not None:
            gold = [int(not one) for one in scores.liked]
        predictions = []
        for item, right, first, values in zip(held_out.dataset.items, graded.right, gold, rewards):
            predicted = first if right else 1 - first
            predictions.append(Prediction(item.line, None, first, predicted, tuple(values)))
        return EvalResult(
            loss=graded.loss,
            accuracy=float(graded.right.mean()),
            f1=None,
            exact_match=None,
            majority_share=None,
            rows=len(found),
            tokens=int(scores.tokens.sum()),
            seconds_s=0.0,
            predictions=tuple(predictions),
            preferences={
                name: value for name, value in graded.figures.items() if name != "accuracy"
            },
        )


@dataclass(frozen=True)
class PreferenceBatches:
    """Both texts of each row of a step; the order of the rows is that of `Batches`."""

    preferences: Preferences
    order: Batches

    @property
    def steps_per_epoch(self) -> float:
        """Batches in which every row is seen once."""
        return self.order.steps_per_epoch

    def rows_at(self, step: int) -> tuple[int, ...]:
        """Return the numbers of a step's rows."""
        return self.order.rows_at(step)

    def at(self, step: int) -> Batch:
        """Return a step's batch, two texts a row."""
        return self.preferences.batch(self.rows_at(step), self.order.lengths_tokens)


def _read(file: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if the file cannot be read."""
    try:
        return read_object(file, DataError)
    except (OSError, DataError):
        return {}
