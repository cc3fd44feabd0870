"""Runs on preferences: two texts of each row, and their likelihoods before training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import CheckpointError, DataError
from ondevice.core.registry import spec_of
from ondevice.core.session import IGNORE, Scoring, StepResult, Weighing, require
from ondevice.core.untrusted import read_object
from ondevice.data.batching import Batch, Batches, InOrder, collate
from ondevice.data.examples import Dataset, Example, Item, rows_sha256
from ondevice.objectives import Graded, Objective, Scores
from ondevice.training.candidates import score_examples
from ondevice.training.evaluate import EvalResult, Prediction

if TYPE_CHECKING:
    from ondevice.core.session import Evaluator, Session

FILE_NAME = "reference.json"
"""File of a run for its rows' log likelihoods before training."""


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
    same prompt, the answer of the row before (the first row's is the last one's)."""
    if dataset.format == "preference":
        return [(item.candidates[0], item.candidates[1]) for item in dataset.items]
    limit = dataset.max_length_tokens
    before = [dataset.items[-1], *dataset.items[:-1]]
    return [
        (item.example, mismatched(item, other, limit))
        for item, other in zip(dataset.items, before, strict=True)
    ]


def check_rated(dataset: Dataset) -> None:
    """Refuse answers to train on that all have the same rating.

    Raises:
        DataError: they have.
    """
    liked = {item.liked for item in dataset.items}
    if len(liked) < 2:
        rating, other = ("up", "down") if True in liked else ("down", "up")
        place = dataset.place(dataset.items[0])
        left_out = f"; {len(dataset.problems)} are left out" if dataset.problems else ""
        raise DataError(
            f"{place}: 'label', 'thumbs' or 'liked': this answer and all others are rated {rating}",
            expected="liked and disliked answers",
            received=f"{len(dataset.items)} rows, all rated {rating}{left_out}",
            hint=f"add answers that are rated {other}; or "
            "--column prompt=prompt --column completion=completion trains on the texts alone",
        )


def text_likelihoods(
    session: Evaluator, texts: Sequence[Example], lines: Sequence[int], pad: int
) -> np.ndarray:
    """Return each text's log likelihood, float64 [texts]; `lines` are those of their rows."""
    items = [Item(text, (text,), 0, line=line) for text, line in zip(texts, lines, strict=True)]
    totals = score_examples(session, items, pad, len(items), None)
    assert totals is not None  # noqa: S101  nothing stops it
    return np.array([-totals[row, 0][0] for row in range(len(items))])


@dataclass
class Weighed:
    """Computes the weights of one step's texts for a session, and stores the step's figures.

    Attributes:
        others: log likelihoods of the texts that have no gradient, float64 [n]; None if all have
            one.
    """

    grade: Callable[[np.ndarray], Graded]
    others: np.ndarray | None = None
    figures: dict[str, float] = field(default_factory=dict)

    def __call__(self, nll: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss and each text's weight; see `ondevice.core.session.Weigh`."""
        found = -nll.astype(np.float64)
        if self.others is None:
            graded = self.grade(found.reshape(-1, 2))
            weights = -graded.coefficients.reshape(-1)
        else:
            graded = self.grade(np.stack([found, self.others], 1))
            weights = -graded.coefficients[:, 0]
        self.figures = graded.figures
        return graded.loss, weights


class PreferenceRows:
    """Rows of preferences with their likelihoods before training.

    Attributes:
        reference: log likelihoods of both texts, float64 [rows, 2]; zeros if the objective has no
            reference.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.texts = texts_of(dataset)
        count = [[text.trained_tokens for text in pair] for pair in self.texts]
        self.tokens = np.array(count, dtype=np.int64)
        self.reference = np.zeros((len(self.texts), 2))
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

    def second(self, session: Evaluator, pad: int, rows: np.ndarray) -> np.ndarray:
        """Return the log likelihoods of some rows' second texts, float64 [rows]."""
        texts = [self.texts[row][1] for row in rows]
        return text_likelihoods(session, texts, [self.dataset.items[row].line for row in rows], pad)


def reference_identity(
    identity: dict[str, str], datasets: Sequence[Dataset | None]
) -> dict[str, str]:
    """Return what likelihoods before training are of: a model, a run, and the rows of its parts."""
    parts = [part for part in datasets if part is not None]
    rows = hashlib.sha256("".join(rows_sha256(part.items) for part in parts).encode())
    return {**identity, "rows": rows.hexdigest()}


def check_reference(folder: Path, identity: dict[str, str]) -> None:
    """Refuse a run that goes on with likelihoods of something else; see `reference_identity`.

    Raises:
        CheckpointError: the folder has those of another model, run or rows.
    """
    file = folder / FILE_NAME
    stored = _read(file)
    changed = [name for name, value in identity.items() if stored.get(name) != value]
    if stored and changed:
        raise CheckpointError(
            f"{file}: the likelihoods before training are of another {changed[0]}",
            expected=f"{changed[0]}: {identity[changed[0]]}",
            received=f"{changed[0]}: {stored.get(changed[0])}",
            hint="resume with the model and the rows of the run; if they are, delete the file",
        )


class Preferences:
    """Trains and evaluates a session on preferences.

    Args:
        identity: of the model before training, by the setting that names it: `model`, `run`.
    """

    def __init__(
        self,
        made: Objective,
        train: Dataset,
        held_out: Dataset | None,
        pad: int,
        identity: dict[str, str],
    ) -> None:
        self.objective = made
        self.train = PreferenceRows(train)
        self.held_out = None if held_out is None else PreferenceRows(held_out)
        self.pad = pad
        self.identity = identity

    def begin(
        self,
        session: Evaluator,
        folder: Path | None,
        resumes: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take the rows' log likelihoods before training from the run's folder, or compute and store them.

        The session must be as it was opened, before a step and before a checkpoint is restored.

        Args:
            folder: None computes them and stores nothing.
            resumes: the folder's run goes on, so likelihoods of something else are a mistake.

        Raises:
            CheckpointError: a run that goes on has those of another model, run or rows.
        """
        if not self.objective.has_reference:
            return
        parts = [part for part in (self.train, self.held_out) if part is not None]
        identity = reference_identity(self.identity, [part.dataset for part in parts])
        if resumes and folder is not None:
            check_reference(folder, identity)
        stored = {} if folder is None else _read(folder / FILE_NAME)
        found = stored.get("log_likelihoods")
        is_other = any(stored.get(name) != value for name, value in identity.items())
        shapes = [part.reference.shape for part in parts]
        if is_other or [np.shape(values) for values in found or ()] != shapes:
            found = [part.log_likelihoods(session, self.pad, None, should_stop) for part in parts]
            if any(values is None for values in found):
                return  # the run ends before its first step
            lists = [np.asarray(values).tolist() for values in found]
            if folder is not None:
                text = json.dumps({**identity, "log_likelihoods": lists})
                atomic_write(folder / FILE_NAME, text)
        for part, values in zip(parts, found or (), strict=True):
            part.reference = np.array(values, dtype=np.float64)

    def step(
        self, session: Session, batch: Batch, step: int, rate: float
    ) -> tuple[StepResult, dict[str, float]]:
        """Run a step; return its result and the preferences' figures."""
        assert batch.rows_of_data is not None  # noqa: S101  it is of `PreferenceBatches`
        rows = np.array(batch.rows_of_data)
        others = None
        if self.objective.texts == 1:
            others = self.train.second(session, self.pad, rows)
        weigh = Weighed(lambda found: self.objective.grade(self.train.scores(rows, found)), others)
        if spec_of(session.config).order == "first":
            weighing = require(session, Weighing)
            result = weighing.weighted_step(batch.ids, batch.labels, weigh, step, rate)
            return result, weigh.figures
        losses = require(session, Scoring)
        # A zeroth-order method needs the loss and nothing else.
        result = losses.score_step(
            lambda: 1.0 - weigh(session.evaluate(batch.ids, batch.labels)[0])[0], step, rate
        )
        return result, weigh.figures

    def batch(self, rows: tuple[int, ...], lengths: tuple[int, ...] | None) -> Batch:
        """Return the texts of each row that have a gradient, one row after the other."""
        count = self.objective.texts
        texts = [text for row in rows for text in self.train.texts[row][:count]]
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
class PreferenceBatches(InOrder):
    """The texts of each row of a step; the order of the rows is that of `Batches`."""

    preferences: Preferences
    order: Batches

    def at(self, step: int) -> Batch:
        """Return a step's batch."""
        return self.preferences.batch(self.rows_at(step), self.order.lengths_tokens)


def _read(file: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if the file cannot be read."""
    try:
        return read_object(file, DataError)
    except (OSError, DataError):
        return {}
