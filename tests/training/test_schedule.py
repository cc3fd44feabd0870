"""Schedules at their corners."""

from __future__ import annotations

import math

import pytest

from ondevice.core.errors import ConfigError
from ondevice.training.schedule import WarmupDecay


def test_each_schedule_has_its_shape() -> None:
    linear = WarmupDecay("linear", 1.0, 11)
    assert [linear(step) for step in (0, 5, 10)] == [1.0, 0.5, 0.0]
    cosine = WarmupDecay("cosine", 2.0, 21, final_fraction=0.5)
    assert cosine(0) == 2.0 and math.isclose(cosine(10), 1.5) and math.isclose(cosine(20), 1.0)
    warm = WarmupDecay("constant", 0.3, 100, warmup_steps=2)
    assert [warm(step) for step in (0, 1, 2, 99)] == pytest.approx([0.1, 0.2, 0.3, 0.3])


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_never_above_the_peak_never_negative_and_the_same_when_asked_again(kind) -> None:
    schedule = WarmupDecay(kind, 0.7, 50, warmup_steps=7, final_fraction=0.1)
    rates = [schedule(step) for step in range(80)]  # past the end: an extended run
    assert max(rates) == schedule(7) == 0.7 and min(rates) > 0
    assert rates[:7] == sorted(rates[:7])
    assert rates == [schedule(step) for step in range(80)]


def test_one_step_runs() -> None:
    assert WarmupDecay("linear", 1.0, 1)(0) == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        ("exponential", 1.0, 10),
        ("linear", 0.0, 10),
        ("linear", math.nan, 10),
        ("linear", 1.0, 10, 10),
    ],
)
def test_wrong_numbers_are_refused(arguments) -> None:
    with pytest.raises(ConfigError):
        WarmupDecay(*arguments)


@pytest.mark.parametrize("steps", [2, 5, 30])
def test_a_linear_schedule_has_the_rates_of_one_step_fewer_in_transformers_and_then_zero(
    steps: int,
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps - 1)
    theirs = []
    for _ in range(steps - 1):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    ours = WarmupDecay("linear", 1.0, steps)
    assert [ours(step) for step in range(steps)] == pytest.approx([*theirs, 0.0])
