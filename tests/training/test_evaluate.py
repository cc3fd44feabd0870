"""Evaluation against the same figures computed row by row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ondevice.core.errors import DataError
from ondevice.data import Dataset, Example, Item
from ondevice.training.evaluate import EvalResult, evaluate_dataset
from tests.training.bigram import VOCABULARY, BigramSession

PAD = 0
LENGTHS = (3, 9, 17, 4, 12, 30, 5, 8, 2, 11)


def example(prompt: list[int], answer: list[int]) -> Example:
    return Example((*prompt, *answer), (*[-100] * len(prompt), *answer))


@pytest.fixture
def choices() -> Dataset:
    """Ten rows of three candidates of one, two and three tokens, of very different lengths."""
    items, random = [], np.random.default_rng(5)
    for line, length in enumerate(LENGTHS, start=1):
        prompt = random.integers(0, VOCABULARY, length).tolist()
        candidates = tuple(
            example(prompt, random.integers(0, VOCABULARY, n).tolist()) for n in (1, 2, 3)
        )
        gold = 0 if line <= 4 else 1 + line % 2
        items.append(Item(candidates[gold], candidates, gold, line=line, prompt_tokens=length))
    return Dataset(items)


def session(**options) -> BigramSession:
    built = BigramSession(**options)
    built.logits = np.random.default_rng(1).normal(size=built.logits.shape).astype(np.float32) * 2
    return built


def likelihood(
    logits: np.ndarray, ids: tuple[int, ...], labels: tuple[int, ...]
) -> tuple[float, int]:
    """Summed negative log likelihood in float64, token by token."""
    total, count = 0.0, 0
    for before, label in zip(ids, labels[1:]):
        if label != -100:
            row = logits[before].astype(np.float64)
            total, count = total + math.log(np.exp(row).sum()) - row[label], count + 1
    return total, count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eval_batch_size": 4},
        {"eval_batch_size": 64, "lengths_tokens": (40,)},
        {"lengths_tokens": (8, 16, 40)},
    ],
)
def test_it_is_what_one_row_at_a_time_gives(choices, options) -> None:
    opened = session(**options)
    result = evaluate_dataset(opened, choices, PAD, batch_size=7)
    assert isinstance(result, EvalResult)
    right, nll, tokens = 0, 0.0, 0
    for item, row in zip(choices.items, result.predictions):
        each = [likelihood(opened.logits, c.ids, c.labels) for c in item.candidates]
        means = [-total / count for total, count in each]
        assert row.scores == pytest.approx(means, abs=1e-5)
        assert (row.line, row.gold, row.predicted) == (item.line, item.gold, int(np.argmax(means)))
        assert row.loss == pytest.approx(-means[item.gold], abs=1e-5)
        right += int(np.argmax(means)) == item.gold
        nll, tokens = nll + each[item.gold][0], tokens + each[item.gold][1]
    assert result.accuracy == right / 10 and 0 < right < 10
    assert result.loss == pytest.approx(nll / tokens, abs=1e-6)
    assert (result.rows, result.tokens, result.majority_share, result.f1) == (10, tokens, 0.4, None)
    rows = {shape[0] for shape in opened.shapes}
    lengths = {shape[1] for shape in opened.shapes}
    if "eval_batch_size" in options:
        assert rows == {options["eval_batch_size"]}
    assert lengths <= set(options.get("lengths_tokens", lengths))
    assert sum(shape[0] for shape in opened.shapes) >= 30


def test_the_first_rows_only_and_giving_up(choices) -> None:
    result = evaluate_dataset(session(), choices, PAD, rows=3)
    assert (
        result is not None
        and result.rows == 3
        and [row.line for row in result.predictions] == [1, 2, 3]
    )
    answers = iter([False, True])
    opened = session()
    assert (
        evaluate_dataset(opened, choices, PAD, batch_size=4, should_stop=lambda: next(answers))
        is None
    )
    assert len(opened.shapes) == 1


def test_text_rows_give_a_loss_only() -> None:
    items = [
        Item(example([], [1, 2, 3, 4]), line=1),
        Item(example([1, 2], [5]), line=2),
        Item(example([1], []), line=3),
    ]
    opened = session(eval_batch_size=2)
    result = evaluate_dataset(opened, Dataset(items), PAD)
    assert result is not None
    totals = [likelihood(opened.logits, item.example.ids, item.example.labels) for item in items]
    assert [count for _, count in totals] == [3, 1, 0]
    assert result.loss == pytest.approx(sum(total for total, _ in totals) / 4, abs=1e-6)
    assert result.predictions[2].loss is None
    assert (result.accuracy, result.majority_share, result.exact_match, result.tokens) == (
        None,
        None,
        None,
        4,
    )


def test_generated_answers_are_scored_like_squad() -> None:
    items = [
        Item(
            example([1, 2, 3], [4]),
            answers=("the Denver Broncos", "Broncos"),
            line=1,
            prompt_tokens=3,
        ),
        Item(example([5, 6], [7]), answers=("Paris, France",), line=2, prompt_tokens=2),
        Item(example([8], [9]), line=3, prompt_tokens=1),
    ]
    said = {(1, 2, 3): " denver broncos!\nQuestion: and", (5, 6): "In Paris"}
    result = evaluate_dataset(session(), Dataset(items), PAD, generate=said.__getitem__)
    assert result is not None
    assert [row.text for row in result.predictions] == ["denver broncos!", "In Paris", None]
    assert [row.f1 for row in result.predictions] == [1.0, 0.5, None]
    assert (result.f1, result.exact_match) == (0.75, 0.5)
    without = evaluate_dataset(session(), Dataset(items), PAD)
    assert without is not None and without.f1 is None and without.loss == result.loss


def test_a_row_that_is_too_long_and_no_rows_are_named(choices) -> None:
    with pytest.raises(DataError) as caught:
        evaluate_dataset(session(lengths_tokens=(8, 16)), choices, PAD)
    assert "line 6" in caught.value.message
    assert "at most 16" in str(caught.value) and "33 tokens" in str(caught.value)
    with pytest.raises(DataError):
        evaluate_dataset(session(), Dataset(), PAD)


def test_a_candidate_that_is_not_a_number_is_never_the_answer(choices) -> None:
    opened = session()
    opened.logits[:] = np.nan
    result = evaluate_dataset(opened, choices, PAD)
    assert result is not None and math.isnan(result.loss)
    assert all(score == -math.inf for row in result.predictions for score in row.scores)
    better = EvalResult(9.0, result.accuracy, None, None, 0.5, 1, 1, 0.0)
    assert better.score > result.score


def test_what_is_best() -> None:
    def key_of(
        loss: float, accuracy: float | None = None, f1: float | None = None
    ) -> tuple[float, ...]:
        return EvalResult(loss, accuracy, f1, None, None, 1, 1, 0.0).score

    assert key_of(2.0, accuracy=0.9) > key_of(1.0, accuracy=0.8)
    assert key_of(1.0, accuracy=0.9) > key_of(2.0, accuracy=0.9)
    assert key_of(2.0, f1=0.5) > key_of(1.0, f1=0.4)
    assert key_of(1.0) > key_of(2.0) > key_of(math.inf)


@pytest.mark.parametrize("metric", ["pearson", "spearman", "macro_f1", "matthews"])
def test_a_templates_metric_is_over_all_rows(choices, metric) -> None:
    """Of numbers: the candidates' mean by their probabilities against the rows' own; of classes: what was chosen."""
    values = (0.0, 2.5, 5.0)
    choices.items = [replace(item, value=0.5 * item.line) for item in choices.items]
    plain = evaluate_dataset(session(), choices, PAD)
    choices.metric, choices.values = metric, values
    result = evaluate_dataset(session(), choices, PAD)
    assert (
        plain is not None
        and plain.metric is None
        and result is not None
        and result.metric == metric
    )
    shares = [np.exp(row.scores) / np.exp(row.scores).sum() for row in result.predictions]
    means = [float(share @ values) for share in shares]
    own = [0.5 * line for line in range(1, 11)]
    gold, predicted = (
        [row.gold for row in result.predictions],
        [row.predicted for row in result.predictions],
    )
    f1 = [
        2 * sum(g == p == c for g, p in zip(gold, predicted)) / (gold.count(c) + predicted.count(c))
        for c in range(3)
    ]
    expected = {
        "pearson": lambda: np.corrcoef(own, means)[0, 1],
        "spearman": lambda: np.corrcoef(np.argsort(np.argsort(own)), np.argsort(np.argsort(means)))[0, 1],
        "macro_f1": lambda: np.mean(f1),
        "matthews": lambda: np.corrcoef(
            np.eye(3)[gold].ravel() - np.tile(np.bincount(gold, minlength=3) / 10, 10),
            np.eye(3)[predicted].ravel() - np.tile(np.bincount(predicted, minlength=3) / 10, 10),
        )[0, 1],
    }[metric]()  # fmt: skip
    assert result.metric_value == pytest.approx(expected, abs=1e-5)
    assert result.score[0] == result.metric_value and result.figures()["metric"] == metric
