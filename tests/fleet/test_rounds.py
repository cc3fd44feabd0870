"""A server's decisions: combination, refusals with a reason, and rounds that overlap."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ondevice.core.errors import ConfigError, FleetError
from ondevice.fleet.agreement import Agreement
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.combine import clip, coefficients_of, combined
from ondevice.fleet.numbers import Numbers
from ondevice.fleet.rounds import Rounds
from tests.fleet.fleets import answer, charter, drawn, fails
from tests.sampling import part_of


def answers(server: Rounds, values: list[list[float]], rows: list[int] | None = None):
    current = server.begin(range(len(values)))
    return current, [
        answer(current.tasks[device], device, value, (rows or [4] * len(values))[device])
        for device, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {},
            (1 + 2 + 3 + 3) / 4,
        ),  # the median of the rows is 1, and the longest answer is shortened to the next one
        ({"most_rows": 1}, (1 + 2 + 3 + 3) / 4),
        ({"combine": "median"}, 2.5),
        ({"combine": "trimmed_mean", "trim": 0.25}, 2.5),
        ({"combine": "trimmed_mean", "trim": 0.2}, (1 + 2 + 3 + 3) / 4),  # a fifth of four is none
        ({"combine": "trimmed_mean", "trim": 0.49}, 2.5),
        ({"most_rows": 1, "clip_norm": 2.0}, (1 + 2 + 2 + 2) / 4),
    ],
)
def test_replies_are_combined_by_the_settings(settings: dict, expected: float) -> None:
    server = Rounds(charter(**settings))
    _, given_answers = answers(
        server, [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [100.0, 0.0]], [1, 2, 1, 4]
    )
    assert combined(given_answers, server.charter.fleet) == pytest.approx([expected, 0.0], rel=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_clipping_shortens_and_keeps_the_direction(values: list[float], norm: float) -> None:
    short = clip(values, norm)
    assert np.linalg.norm(short) <= norm * (1 + 1e-9)
    assert np.allclose(np.outer(short, values), np.outer(values, short), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize(
    "settings", [{}, {"seeds": "own"}, {"combine": "median"}, {"combine": "trimmed_mean"}]
)
def test_the_update_of_a_round_is_a_function_of_the_set_of_replies(settings: dict) -> None:
    server = Rounds(charter(**settings))
    current, given_answers = answers(
        server, [drawn(2, device) for device in range(7)], [3, 1, 9, 2, 2, 7, 5]
    )
    pairs = [(current.tasks[item.device].first_step, item) for item in given_answers]
    first = coefficients_of(pairs, server.charter.fleet, 5e-3)
    for seed in range(5):
        random.Random(seed).shuffle(pairs)
        assert coefficients_of(pairs, server.charter.fleet, 5e-3) == first
    assert len(first) == (7 if settings.get("seeds") == "own" else 1)


def test_own_seeds_try_other_directions_and_move_by_the_weighted_mean() -> None:
    server = Rounds(charter(seeds="own", local_steps=2))
    current, given_answers = answers(server, [[1.0, 2.0, 3.0, 4.0]] * 3, [1, 1, 2])
    steps = [task.first_step for task in current.tasks.values()]
    assert len({step + k for step in steps for k in range(2)}) == 6
    for item in given_answers:
        server.receive(item.to_bytes(), item.device)
    outcome = server.close(0)
    third = outcome.groups[2].coefficients.values()
    assert third == pytest.approx([1e-2 / 2 * value / 3 for value in (1, 2, 3, 4)], rel=1e-4)


def refused(server: Rounds, item, sender: int | None = None) -> Code:
    with pytest.raises(Refusal) as caught:
        server.receive(item if isinstance(item, bytes) else item.to_bytes(), sender)
    return caught.value.code


def test_replies_are_refused_with_a_reason() -> None:
    server = Rounds(charter())
    current, (good, other) = answers(server, [[1.0, 2.0], [3.0, 4.0]])
    assert refused(server, replace(good, fleet=good.fleet ^ 1)) == Code.OTHER_FLEET
    assert refused(server, replace(good, round=3)) == Code.LATE
    assert refused(server, replace(good, begin=b"\xff" * 8)) == Code.OTHER_STATE
    assert refused(server, replace(good, device=9)) == Code.NOT_ASKED
    assert refused(server, good, sender=1) == Code.OTHER_DEVICE
    assert refused(server, answer(current.tasks[0], 0, [1.0])) == Code.NUMBERS
    assert refused(server, replace(good, rows=0)) == Code.MALFORMED
    assert refused(server, replace(good, loss=float("nan"))) == Code.MALFORMED
    server.receive(good.to_bytes(), 0)
    assert refused(server, good) == Code.TWICE
    before = server.state.hash
    outcome = server.close(0)
    assert outcome.before == before != outcome.after
    assert refused(server, other) == Code.LATE


def test_a_late_reply_to_a_round_that_looks_open_is_refused_by_its_hash() -> None:
    """The server restarted the round from another state: the clock and the number would not tell."""
    server = Rounds(charter())
    _, (late, _) = answers(server, [[1.0, 2.0], [3.0, 4.0]])
    again = Rounds(charter(), charter().state())
    again.state.vector = again.state.vector + 1
    again.state._digest = None
    again.begin(range(2))
    assert refused(again, late) == Code.OTHER_STATE


def test_rounds_overlap_and_the_older_one_is_applied_to_the_newer_state() -> None:
    server = Rounds(charter(open_rounds=2))
    (first, from_first), (second, from_second) = (
        answers(server, [drawn(2, n), drawn(2, n + 9)]) for n in (0, 1)
    )
    with fails("2 at most"):
        server.begin([0])
    assert first.begin == second.begin
    for item in (*from_second, *from_first):
        server.receive(item)
    follower = charter(open_rounds=2).state()
    for number in (1, 0):
        follower.apply(server.close(number))
    assert follower.digest() == server.state.digest()


def test_a_round_without_replies_changes_only_the_count() -> None:
    server = Rounds(charter())
    server.begin([0])
    outcome = server.close(0)
    assert outcome.groups == ()
    assert outcome.before == outcome.after
    assert server.state.round == 1


def test_agreements_that_contradict_themselves_are_refused() -> None:
    for settings in (
        {"seeds": "own", "combine": "median"},
        {"noise_multiplier": 1.0},
        {"open_rounds": 2, "momentum": 0.9},
    ):
        with pytest.raises(ConfigError):
            Agreement(**settings)


@hypothesis_settings(max_examples=part_of(1000), deadline=None)
@given(st.data())
def test_a_malformed_reply_is_refused_with_a_reason_and_changes_nothing(
    data: st.DataObject,
) -> None:
    """One thing is wrong in each of a thousand answers, or it is noise."""
    server = Rounds(charter())
    tasks = server.begin([3, 4]).tasks
    server.receive(answer(tasks[3], 3, drawn(2)))
    whole = answer(tasks[4], 4, drawn(2))
    good = whole.to_bytes()
    wrong = data.draw(st.sampled_from(["cut", "long", "noise", "fleet", "round", "begin", "device", "count", "version",
                                       "rows", "loss", "exponent", "mantissa"]))  # fmt: skip
    other = data.draw(st.integers(0, 2**32 - 1))
    if wrong == "cut":
        sent = good[: data.draw(st.integers(0, len(good) - 1))]
    elif wrong == "long":
        sent = good + data.draw(st.binary(min_size=1, max_size=99))
    elif wrong == "noise":
        sent = data.draw(st.binary(max_size=200))
    elif wrong in ("fleet", "round"):
        assume(other != getattr(whole, wrong))
        sent = replace(whole, **{wrong: other}).to_bytes()
    elif wrong == "begin":
        begin = data.draw(st.binary(min_size=8, max_size=8))
        assume(begin != whole.begin)
        sent = replace(whole, begin=begin).to_bytes()
    elif wrong == "device":
        assume(other != 4)
        sent = replace(whole, device=other).to_bytes()
    elif wrong == "count":
        count = data.draw(st.integers(0, 60).filter(lambda count: count != 2))
        sent = replace(whole, numbers=Numbers((1,) * count, 0)).to_bytes()
    elif wrong == "version":
        sent = (
            good[:1]
            + bytes([data.draw(st.integers(0, 255).filter(lambda version: version != 1))])
            + good[2:]
        )
    elif wrong == "rows":
        sent = replace(whole, rows=0).to_bytes()
    elif wrong == "loss":
        sent = replace(
            whole, loss=data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        ).to_bytes()
    elif wrong == "exponent":
        sent = replace(
            whole, numbers=Numbers((1, 2), data.draw(st.sampled_from([-128, -127, 127])))
        ).to_bytes()
    else:
        sent = good[:-2] + b"\x00\x80"  # -32768, which no number is
    with pytest.raises(FleetError) as refused:
        server.receive(sent, 4)
    assert len(refused.value.message) > 10
    assert list(server.open[0].answers) == [3]
    server.receive(good, 4)
