"""Scores: candidates by likelihood, free answers by SQuAD's F1 and exact match, sums by number, and
the metrics of a file's classes and numbers."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])-)?(?:[$€£]\s?)?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
_MARK = "####"


def pick_candidate(nll_sums: Sequence[float], token_counts: Sequence[int]) -> int:
    """Return the index of the candidate with the lowest mean negative log likelihood, as in MeZO.

    Only label tokens count (labels other than -100, after the shift); the first of equals wins.
    With label texts of one token each, as most verbalisers are, the mean and the sum pick the same
    candidate; WinoGrande's candidates share their text and its length.

    Args:
        nll_sums: summed negative log likelihood of each candidate's label tokens, in nats.
        token_counts: number of label tokens of each candidate, at least 1.
    """
    means = [nll / count for nll, count in zip(nll_sums, token_counts, strict=True)]
    return min(range(len(means)), key=means.__getitem__)


def first_line(generated: str) -> str:
    """Return the first line with text, as training answers end with a newline."""
    return generated.strip().partition("\n")[0].strip()


def normalize_answer(text: str) -> str:
    """Normalise as SQuAD's evaluation script v1.1: case, punctuation, articles, extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction equals one of the answers after normalisation, else 0.0."""
    normal = normalize_answer(prediction)
    return float(any(normalize_answer(answer) == normal for answer in answers))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Return the best F1, 0 to 1, of the normalised prediction's words against any answer's.

    Two texts that are both empty score 1, one empty text scores 0 (as in SQuAD 2.0).
    """
    words = normalize_answer(prediction).split()
    return max((_f1(words, normalize_answer(answer).split()) for answer in answers), default=0.0)


def _f1(predicted: list[str], right: list[str]) -> float:
    if not predicted or not right:
        return float(predicted == right)
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right))


def final_number(text: str) -> Decimal | None:
    """Parse an answer's final number, without thousands separators, currency and units, or None.

    It is the first number after `####`, as in GSM8K's answers, or without one the last number of
    the text. Equal numbers compare equal however they are written: 18, 18.00, $18.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    marked = _NUMBER.search(text.partition(_MARK)[2])
    number = marked or next(reversed(list(_NUMBER.finditer(text))), None)
    if number is None:
        return None
    return Decimal((number["sign"] or "") + number["digits"].replace(",", ""))


def wilson_interval(correct: int, rows: int) -> tuple[float, float]:
    """Compute Wilson's 95% score interval of a fraction; (0, 1) without rows.

    Unlike the normal approximation it stays within 0 and 1, and has a width if all rows or none are
    right.
    """
    if not rows:
        return 0.0, 1.0
    z = 1.959964
    fraction = correct / rows
    spread = z * z / rows
    centre = fraction + spread / 2
    width = z * math.sqrt((fraction * (1 - fraction) + spread / 4) / rows)
    low = (centre - width) / (1 + spread) if correct else 0.0
    high = (centre + width) / (1 + spread) if correct < rows else 1.0
    return low, high


def macro_f1(gold: Sequence[int], predicted: Sequence[int]) -> float:
    """Compute the mean over classes of F1, over the classes that occur on either side."""
    scores = []
    for label in sorted({*gold, *predicted}):
        both = sum(right == guess == label for right, guess in zip(gold, predicted, strict=True))
        total = gold.count(label) + predicted.count(label)
        scores.append(2 * both / total)
    if not scores:
        return math.nan
    return sum(scores) / len(scores)


def matthews(gold: Sequence[int], predicted: Sequence[int]) -> float:
    """Compute Matthews' correlation, -1 to 1, for any number of classes; 0 if a side has only one."""
    count, right = len(gold), sum(a == b for a, b in zip(gold, predicted, strict=True))
    labels = {*gold, *predicted}
    golds, guesses = ({label: side.count(label) for label in labels} for side in (gold, predicted))
    shared = right * count - sum(golds[label] * guesses[label] for label in labels)
    spread = [
        count**2 - sum(number**2 for number in counts.values()) for counts in (golds, guesses)
    ]
    if not all(spread):
        return 0.0
    return shared / math.sqrt(spread[0] * spread[1])


def pearson(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute Pearson's correlation, -1 to 1; NaN if one side does not vary."""
    if len(first) < 2 or len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute Spearman's rank correlation, -1 to 1; equal values share the mean of their ranks."""
    return pearson(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((2 * ends - counts + 1) / 2)[indices].tolist()


def expected_value(scores: Sequence[float], values: Sequence[float]) -> float:
    """Compute the mean of `values`, weighted by probabilities with the log likelihoods `scores`."""
    weights = np.exp(np.asarray(scores, dtype=np.float64) - max(scores))
    return float(weights @ np.asarray(values, dtype=np.float64) / weights.sum())


def softmax(scores: Sequence[float]) -> list[float]:
    """Return the candidates' probabilities: the shares of their mean log likelihoods.

    A candidate whose score is not finite has none.
    """
    most = max(scores)
    if not math.isfinite(most):
        return [0.0] * len(scores)
    shares = [math.exp(score - most) if math.isfinite(score) else 0.0 for score in scores]
    total = math.fsum(shares)
    return [share / total for share in shares]
