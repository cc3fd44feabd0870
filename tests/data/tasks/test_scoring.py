"""SQuAD's F1 and exact match as its evaluation script computes them, and the rule that picks a candidate."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice.data import exact_match, f1_score, first_line, pick_candidate
from ondevice.data.tasks.scoring import (
    expected_value,
    final_number,
    macro_f1,
    matthews,
    normalize_answer,
    pearson,
    spearman,
    wilson_interval,
)


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
def test_texts_are_normalised_before_they_are_compared(text: str, normal: str) -> None:
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
def test_f1_and_exact_match_follow_squad(
    prediction: str, answers: list[str], f1: float, exact: float
) -> None:
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
    with pytest.raises(ValueError):
        pick_candidate([1.0, 2.0], [1])


@pytest.mark.parametrize(
    ("text", "line"), [(" Paris\nQuestion: next?", "Paris"), ("\n\n two \n", "two"), ("", "")]
)
def test_only_the_first_line_of_a_text_is_scored(text: str, line: str) -> None:
    assert first_line(text) == line


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 * 3 = <<5*3=15>>15 apples\n#### 1,234", "1234"),
        ("#### $18.00 a week", "18"),
        ("So she pays $18.", "18"),
        ("It is -3.50 degrees.", "-3.5"),
        ("It fell by \N{MINUS SIGN}7%.", "-7"),
        ("- 5 apples", "5"),
        ("10-3", "3"),
        ("70,000 dollars, or 1, 2", "2"),
        ("about .5", "0.5"),
        ("12 #### none", "12"),
        ("#### 8 and not 9\n#### 10", "8"),
        ("none at all", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["", "$", "€"]),
    st.sampled_from(["", ".", ".00", " km.", "%", "\n"]),
)
def test_a_number_is_the_same_however_it_is_written(
    number: int, currency: str, behind: str
) -> None:
    sign = "-" if number < 0 else ""
    for mark in ("#### ", "They need 3 x 4 of them: "):
        for digits in (f"{abs(number):,}", f"{abs(number)}"):
            assert final_number(f"1 + 2.\n{mark}{sign}{currency}{digits}{behind}") == number


def test_wilson_interval_is_the_published_one() -> None:
    """Newcombe 1998, table I: 81 of 263 and 15 of 148, 0 of 20, 1 of 29."""
    for correct, rows, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson_interval(correct, rows) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 10_000), st.data())
def test_wilson_interval_contains_the_fraction_and_solves_its_equation(
    rows: int, data: st.DataObject
) -> None:
    correct = data.draw(st.integers(0, rows))
    low, high = wilson_interval(correct, rows)
    share = correct / rows
    assert 0 <= low <= share <= high <= 1 and low < high
    for end in (low, high):
        if 0 < end < 1:
            assert (share - end) ** 2 == pytest.approx(
                1.959964**2 * end * (1 - end) / rows, rel=1e-6, abs=1e-12
            )


def test_measures_of_classes() -> None:
    gold, predicted = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 0, 2]
    # By hand: F1 of the classes is 2/3, 1/2 and 1; of two classes Matthews is (tp*tn - fp*fn) / sqrt(...).
    assert macro_f1(gold, predicted) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    gold, predicted = [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 1]
    assert matthews(gold, predicted) == pytest.approx((2 * 4 - 1 * 1) / math.sqrt(3 * 3 * 5 * 5))
    assert matthews([0, 1, 2], [0, 1, 2]) == 1.0 and matthews([0, 1], [1, 1]) == 0.0
    assert macro_f1([0, 0], [1, 1]) == 0.0 and math.isnan(macro_f1([], []))


def test_measures_of_numbers() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1) and pearson(
        [1, 2, 3], [3, 2, 1]
    ) == pytest.approx(-1)
    assert pearson([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(0)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, spreads 4.5 and 5.
    assert spearman([1, 5, 5, 100], [0, 1, 2, 3]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(pearson([1, 1], [0, 1])) and math.isnan(spearman([], []))


def test_the_expected_value_is_the_mean_by_probability() -> None:
    assert expected_value([math.log(0.25), math.log(0.75)], [0, 4]) == pytest.approx(3)
    assert expected_value([-1e9, -1e9 - 800], [2, 5]) == pytest.approx(2)
    assert expected_value([-math.inf, 0], [2, 5]) == pytest.approx(5)
