"""How answers are judged: candidates by likelihood, free answers by SQuAD's F1 and exact match."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def pick_candidate(nll_sums: Sequence[float], token_counts: Sequence[int]) -> int:
    """Index of the candidate with the lowest mean negative log likelihood per answer token, as in MeZO.

    Only the tokens of the answer count (labels other than -100, after the shift); the first of equals
    wins. With answers of one token each, as the verbalisers of most tokenizers are, the mean and the
    sum pick the same candidate; WinoGrande's candidates share their answer and so its length.

    Args:
        nll_sums: summed negative log likelihood of each candidate's answer, in nats.
        token_counts: number of answer tokens of each candidate, at least 1.
    """
    means = [nll / count for nll, count in zip(nll_sums, token_counts, strict=True)]
    return min(range(len(means)), key=means.__getitem__)


def first_line(generated: str) -> str:
    """The answer in generated text: its first line that has any. Training answers end with a newline."""
    return generated.strip().partition("\n")[0].strip()


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces: SQuAD's evaluation script v1.1."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the prediction equals one of the answers after normalisation, else 0.0."""
    normal = normalize_answer(prediction)
    return float(any(normalize_answer(answer) == normal for answer in answers))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Best F1, 0 to 1, of the prediction's words against those of any answer, after normalisation.

    Two texts that are both empty after normalisation score 1, one empty text 0 (as SQuAD 2.0 does).
    """
    words = normalize_answer(prediction).split()
    return max((_f1(words, normalize_answer(answer).split()) for answer in answers), default=0.0)


def _f1(predicted: list[str], right: list[str]) -> float:
    if not predicted or not right:
        return float(predicted == right)
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right))
