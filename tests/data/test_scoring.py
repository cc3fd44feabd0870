"""SQuAD's F1 and exact match as its evaluation script computes them, and the rule that picks a candidate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice.data import exact_match, f1_score, first_line, pick_candidate
from ondevice.data.scoring import normalize_answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("an apple, a day", "apple day"),
        ("theory of another anthem", "theory of another anthem"),
        ("A", ""),
        ("Zürich\t\n1999", "zürich 1999"),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "answers", "f1", "exact"),
    [
        ("The Norman conquest", ["norman conquest"], 1.0, 1.0),
        ("25 minutes long", ["25 minutes of transmission length", "25 minutes"], 0.8, 0.0),
        ("red red blue", ["red blue blue"], 2 / 3, 0.0),
        ("nothing alike", ["something else"], 0.0, 0.0),
        ("", ["word"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),
        ("word", [], 0.0, 0.0),
    ],
)
def test_scores(prediction: str, answers: list[str], f1: float, exact: float) -> None:
    assert f1_score(prediction, answers) == pytest.approx(f1)
    assert exact_match(prediction, answers) == exact


@given(st.text(), st.text())
def test_scores_are_bounded_and_symmetric(left: str, right: str) -> None:
    score = f1_score(left, [right])
    assert 0 <= score <= 1 and score == pytest.approx(f1_score(right, [left]))
    assert f1_score(left, [right, left]) == exact_match(left, [right, left]) == 1.0
    assert exact_match(left, [right]) <= score


def test_lowest_mean_a_token_wins() -> None:
    assert pick_candidate([6.0, 2.5], [3, 1]) == 0  # 2.0 against 2.5, though the sum is larger
    assert pick_candidate([2.5, 2.0, 2.0], [1, 1, 1]) == 1
    with pytest.raises(ValueError, match="shorter"):
        pick_candidate([1.0, 2.0], [1])


@pytest.mark.parametrize(("text", "line"), [(" Paris\nQuestion: next?", "Paris"), ("\n\n two \n", "two"), ("", "")])
def test_first_line(text: str, line: str) -> None:
    assert first_line(text) == line
