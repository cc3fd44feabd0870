"""Evaluate a data set: loss on the right answers, accuracy by label likelihood, F1 of generated answers."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import DataError
from ondevice.data.tasks.scoring import (
    exact_match,
    expected_value,
    f1_score,
    first_line,
    macro_f1,
    matthews,
    pearson,
    spearman,
    wilson_interval,
)
from ondevice.training.candidates import score_examples

if TYPE_CHECKING:
    from ondevice.core.session import Evaluator
    from ondevice.data import Dataset, Item

Generate = Callable[[tuple[int, ...]], str]
"""Prompt ids to the model's answer, decoded and without the prompt."""


@dataclass(frozen=True)
class Prediction:
    """One row of data.

    Attributes:
        line: line of the data file, from 1.
        loss: mean negative log likelihood of the right answer, nats a token; None without a labelled token.
        gold, predicted: index of the right and of the most likely candidate; None without candidates.
        scores: mean log likelihood a token of each candidate; of an answer with a reward, the reward.
        text: first line of the generated answer; None if none was generated.
        f1, exact_match: of `text` against the nearest right answer, 0 to 1 (SQuAD).
    """

    line: int
    loss: float | None
    gold: int | None = None
    predicted: int | None = None
    scores: tuple[float, ...] = ()
    text: str | None = None
    f1: float | None = None
    exact_match: float | None = None


@dataclass(frozen=True, repr=False)
class EvalResult:
    """Figures over all rows.

    Attributes:
        loss: negative log likelihood of the right answers, nats a token, over all their tokens.
        accuracy: share of rows whose right candidate is the most likely one; None without candidates.
        f1, exact_match: means over the rows with generated answers; None without.
        majority_share: accuracy of always giving the most frequent answer; None without candidates.
        rows: rows evaluated.
        tokens: labelled tokens of the right answers.
        seconds_s: wall time.
        predictions: one a row, in the order of the data.
        metric, metric_value: what a template of one's own is judged by, if it is another one.
        preferences: of preferences: rewards of chosen and rejected answers, margin, KL; then `loss` is the objective's
            and `accuracy` the share of rows in the right order.
    """

    loss: float
    accuracy: float | None
    f1: float | None
    exact_match: float | None
    majority_share: float | None
    rows: int
    tokens: int
    seconds_s: float
    predictions: tuple[Prediction, ...] = ()
    metric: str | None = None
    metric_value: float | None = None
    preferences: dict[str, float] | None = None

    def summary(self) -> str:
        """Return the figures in a line."""
        parts = [f"{self.rows:,} rows", f"loss {self.loss:.4f}"]
        for name in ("accuracy", "f1", "exact_match"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name.replace('_', ' ')} {value:.4f}")
        if self.metric is not None and self.metric_value is not None:
            parts.append(f"{self.metric.replace('_', ' ')} {self.metric_value:.4f}")
        if self.majority_share is not None:
            parts.append(f"majority class {self.majority_share:.4f}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"EvalResult({self.summary()})"

    @property
    def correct(self) -> int | None:
        """Rows whose right candidate is the most likely one; None without candidates."""
        if self.accuracy is None:
            return None
        return sum(row.gold == row.predicted for row in self._with_candidates)

    @property
    def accuracy_interval(self) -> tuple[float, float] | None:
        """Wilson's 95% interval of the accuracy over the rows with candidates; None without any."""
        if self.correct is None:
            return None
        return wilson_interval(self.correct, len(self._with_candidates))

    @property
    def _with_candidates(self) -> list[Prediction]:
        return _with_candidates(self.predictions)

    @property
    def score(self) -> tuple[float, ...]:
        """For comparison, higher is better: the template's metric, F1 or accuracy first if there is one, then the
        loss."""
        main = self.f1 if self.f1 is not None else self.accuracy
        if self.metric_value is not None and math.isfinite(self.metric_value):
            main = self.metric_value
        quality = (
            -self.loss if math.isfinite(self.loss) else -sys.float_info.max
        )  # JSON has no infinity
        if main is None:
            return (quality,)
        return (main, quality)

    def figures(self) -> dict[str, Any]:
        """Return all but the predictions, as JSON values."""
        return {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "predictions"
        }


def evaluate_dataset(
    session: Evaluator,
    dataset: Dataset,
    pad_id: int,
    *,
    rows: int | None = None,
    batch_size: int | None = None,
    generate: Generate | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> EvalResult | None:
    """Run a session over a data set.

    A classification or multiple-choice row is scored once for each candidate; the candidate with the highest
    mean log likelihood a token is the answer (MeZO's protocol, which P-RGE follows). A session that is `Branching`
    computes a prompt once for all its candidates. A program's batch is always filled; the last one is padded with
    copies that are not counted.

    Args:
        rows: evaluate only the first so many.
        batch_size: rows at once if the session takes any number.
        generate: answers questions; without it question-answering rows give only a loss.
        should_stop: called before every batch and row; the evaluation is abandoned if it returns True.

    Returns:
        The figures, or None if it was abandoned.

    Raises:
        DataError: if there are no rows, or one is longer than the session takes.
    """
    started = time.perf_counter()
    items = dataset.items[:rows]
    if not items:
        raise DataError("there are no rows to evaluate", hint="check `data.eval_path`")
    totals = score_examples(session, items, pad_id, batch_size, should_stop)
    if totals is None:
        return None
    # Predict row by row, in the order of the data; answers are generated here, one at a time.
    predictions, gold_nll, gold_tokens = [], 0.0, 0
    for index, item in enumerate(items):
        if should_stop is not None and should_stop():
            return None
        nll, count = totals[index, -1 if item.gold is None else item.gold]
        gold_nll += nll
        gold_tokens += count
        scores = tuple(_score(*totals[index, slot]) for slot in range(len(item.candidates)))
        predictions.append(_predict(item, nll / count if count else None, scores, generate))
    result = _summary(predictions, gold_nll, gold_tokens, time.perf_counter() - started)
    return result if dataset.metric not in METRICS else replace(
        result, metric=dataset.metric, metric_value=_measure(dataset, items, predictions))  # fmt: skip


METRICS = ("macro_f1", "matthews", "pearson", "spearman")


def _measure(dataset: Dataset, items: list[Item], predictions: list[Prediction]) -> float | None:
    """Compute a template's metric: of classes, or of a regression's numbers against the expected ones.

    The expected number is the mean of the candidates' by their probabilities, so that ranked answers ("0" to "5") give
    every number between them.
    """
    if dataset.metric in ("macro_f1", "matthews"):
        chosen = [
            (row.gold, row.predicted)
            for row in predictions
            if row.gold is not None and row.predicted is not None
        ]
        gold, predicted = ([pair[side] for pair in chosen] for side in (0, 1))
        if chosen:
            return {"macro_f1": macro_f1, "matthews": matthews}[dataset.metric](gold, predicted)
        return None
    pairs = [(item.value, expected_value(row.scores, dataset.values)) for item, row in zip(items, predictions)
             if item.value is not None and any(map(math.isfinite, row.scores))]  # fmt: skip
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    value = {"pearson": pearson, "spearman": spearman}[dataset.metric](first, second)
    if math.isfinite(value):
        return value
    return None


def _score(nll: float, count: int) -> float:
    """Mean log likelihood a token; a candidate that has none, or is not a number, is never the answer."""
    if count and math.isfinite(nll):
        return -nll / count
    return -math.inf


def _predict(
    item: Item, loss: float | None, scores: tuple[float, ...], generate: Generate | None
) -> Prediction:
    predicted = max(range(len(scores)), key=scores.__getitem__, default=None)
    if generate is None or not item.answers:
        return Prediction(item.line, loss, item.gold, predicted, scores)
    text = first_line(generate(item.example.ids[: item.prompt_tokens]))
    return Prediction(
        item.line,
        loss,
        item.gold,
        predicted,
        scores,
        text,
        f1_score(text, item.answers),
        exact_match(text, item.answers),
    )


def _with_candidates(predictions: Sequence[Prediction]) -> list[Prediction]:
    return [row for row in predictions if row.gold is not None and row.predicted is not None]


def _summary(predictions: list[Prediction], nll: float, tokens: int, seconds: float) -> EvalResult:
    chosen = _with_candidates(predictions)
    answered = [row for row in predictions if row.f1 is not None]
    golds = Counter(row.gold for row in chosen)
    return EvalResult(
        loss=nll / tokens if tokens else math.nan,
        accuracy=_mean([float(row.gold == row.predicted) for row in chosen]),
        f1=_mean([row.f1 for row in answered if row.f1 is not None]),
        exact_match=_mean([row.exact_match for row in answered if row.exact_match is not None]),
        majority_share=golds.most_common(1)[0][1] / len(chosen) if chosen else None,
        rows=len(predictions),
        tokens=tokens,
        seconds_s=seconds,
        predictions=tuple(predictions),
    )


def _mean(values: Sequence[float]) -> float | None:
    if values:
        return math.fsum(values) / len(values)
    return None
