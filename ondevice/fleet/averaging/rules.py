"""Rules that average adapters: FedAvg and FedOpt in numpy, bit for bit what Flower's strategies
give.

A simulation needs no Flower then. The order of the replies changes the last bits of a sum of
floats, so they are always taken in the order of the devices' numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from ondevice.core.config import StrictConfig
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.combine import longest_of, weights_of

Arrays = dict[str, np.ndarray]
Rule = Literal["fedavg", "fedadam", "fedyogi", "fedadagrad", "fedmedian", "fedtrimmedavg"]
ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
LARGEST = 1e15
"""Magnitude of an adapter's number. Its square, which the server's optimizers keep, is then a
float32 too."""


class Averaging(StrictConfig):
    """The rule that averages first-order devices' adapters, one of Flower's strategies."""

    strategy: Rule = "fedavg"
    """`fedavg`: the mean weighted by rows. `fedadam`, `fedyogi`, `fedadagrad`: a step of an
    optimizer along the mean change (FedOpt). `fedmedian`, `fedtrimmedavg`: against devices that
    lie; every device counts alike."""

    server_rate: float = Field(default=0.1, gt=0)
    """Learning rate of the server's optimizer, if the strategy has one."""

    beta_1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of its first moment (fedadam, fedyogi)."""

    beta_2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of its second moment (fedadam, fedyogi)."""

    tau: float = Field(default=1e-3, gt=0)
    """Added to the root of its second moment."""

    trim: float = Field(default=0.2, ge=0, lt=0.5)
    """Fraction of the devices that `fedtrimmedavg` drops at each end, for each number."""

    @property
    def first_beta(self) -> float:
        """Decay of the first moment; FedAdagrad has none."""
        if self.strategy == "fedadagrad":
            return 0.0
        return self.beta_1


class Combiner:
    """A rule and its moments.

    Args:
        config: of the charter.
        moments: first and second, as `moments` gave them; none before the first round.
    """

    def __init__(self, config: Averaging, moments: tuple[Arrays, Arrays] | None = None) -> None:
        self.config = config
        self.first, self.second = moments or ({}, {})

    @property
    def moments(self) -> tuple[Arrays, Arrays]:
        """The rule's state, which a resumed server needs; may be empty."""
        return self.first, self.second

    def combine(self, number: int, before: Arrays, answers: Sequence[tuple[Arrays, int]]) -> Arrays:
        """Return the adapter after a round.

        Args:
            number: of the round, from 1.
            before: the adapter that the devices began from, float32.
            answers: the adapter that each device ended with and its rows, in the order of their
                numbers; one at least.

        Raises:
            Refusal: the replies have other tensors than each other or than `before`.
        """
        for arrays, _ in answers:
            check_alike(arrays, before)
        config = self.config
        if config.strategy == "fedmedian":
            return {
                name: np.median(np.stack([a[name] for a, _ in answers]), axis=0) for name in before
            }
        if config.strategy == "fedtrimmedavg":
            return {
                name: _trimmed(np.stack([a[name] for a, _ in answers]), config.trim)
                for name in before
            }
        mean = _mean(answers)
        if config.strategy in ADAPTIVE:
            return self._adapted(number, before, mean)
        return mean

    def _adapted(self, number: int, before: Arrays, mean: Arrays) -> Arrays:
        """One step of the server's optimizer along the mean change (Reddi et al., 2021, Algorithm
        2)."""
        config = self.config
        change = {name: value - before[name] for name, value in mean.items()}
        first = self.first or {name: np.zeros_like(value) for name, value in mean.items()}
        second = self.second or {name: np.zeros_like(value) for name, value in mean.items()}
        beta = config.first_beta
        self.first = {
            name: beta * value + (1 - beta) * change[name] for name, value in first.items()
        }
        squares = {name: value**2 for name, value in change.items()}
        rate = config.server_rate
        if config.strategy == "fedadagrad":
            self.second = {name: value + squares[name] for name, value in second.items()}
        elif config.strategy == "fedyogi":
            self.second = {
                name: value - (1.0 - config.beta_2) * squares[name] * np.sign(value - squares[name])
                for name, value in second.items()
            }
        else:
            self.second = {
                name: config.beta_2 * value + (1 - config.beta_2) * squares[name]
                for name, value in second.items()
            }
            age = number + 1.0
            rate = rate * np.sqrt(1 - np.power(config.beta_2, age)) / (1 - np.power(beta, age))
        moved = {
            name: value + rate * self.first[name] / (np.sqrt(self.second[name]) + config.tau)
            for name, value in before.items()
        }
        return {name: value.astype(np.float32) for name, value in moved.items()}


def bounded(
    before: Arrays, answers: Sequence[tuple[Arrays, int]], rule: Rule
) -> list[tuple[Arrays, int]]:
    """Return replies of which none counts for more than an honest device's: rows by `weights_of`,
    changes by `longest_of` if the rule looks at their length: a trimmed mean of few replies trims
    none.

    Args:
        before: the adapter that the devices began from.
    """
    weights = weights_of([rows for _, rows in answers])
    given = [(arrays, weight) for (arrays, _), weight in zip(answers, weights, strict=True)]
    if rule == "fedmedian":
        return given
    lengths = [_change_length(before, arrays) for arrays, _ in given]
    most = longest_of(lengths)
    return [
        (_shortened(before, arrays, most / length) if length > most else arrays, weight)
        for (arrays, weight), length in zip(given, lengths, strict=True)
    ]


def _change_length(before: Arrays, arrays: Arrays) -> float:
    squares = (
        np.square(value.astype(np.float64) - before[name]).sum() for name, value in arrays.items()
    )
    return math.sqrt(math.fsum(map(float, squares)))


def _shortened(before: Arrays, arrays: Arrays, share: float) -> Arrays:
    return {
        name: (before[name] + share * (value.astype(np.float64) - before[name])).astype(np.float32)
        for name, value in arrays.items()
    }


def check_alike(arrays: Arrays, expected: Arrays) -> None:
    """Refuse arrays of other names, shapes or types, and such as are not finite.

    Raises:
        Refusal: with the first difference.
    """
    if arrays.keys() != expected.keys():
        odd = sorted(arrays.keys() ^ expected.keys())
        raise Refusal(
            Code.NUMBERS,
            "the reply has other tensors than the fleet",
            expected=len(expected),
            received=odd[:3],
        )
    for name, value in arrays.items():
        want = expected[name]
        if value.shape != want.shape or value.dtype != np.float32:
            raise Refusal(
                Code.NUMBERS,
                f"the reply's {name} has another shape or type",
                expected=f"float32 {list(want.shape)}",
                received=f"{value.dtype} {list(value.shape)}",
            )
        if not np.isfinite(value).all():
            raise Refusal(
                Code.NOT_FINITE, f"the reply's {name} is not finite", expected="finite numbers"
            )
        if np.abs(value).max(initial=0) > LARGEST:
            raise Refusal(
                Code.NUMBERS, f"the reply's {name} is too large", expected=f"at most {LARGEST:g}"
            )


def _mean(answers: Sequence[tuple[Arrays, int]]) -> Arrays:
    total = sum(rows for _, rows in answers)
    found: Arrays = {}
    for arrays, rows in answers:
        share = rows / total
        for name, value in arrays.items():
            if name in found:
                found[name] += value * share
            else:
                found[name] = value * share
    return found


def _trimmed(stacked: np.ndarray, share: float) -> np.ndarray:
    """The mean without the lowest and highest `share` of each element, by Flower's partition."""
    count = len(stacked)
    low = int(share * count)
    return np.mean(np.partition(stacked, (low, count - low - 1), 0)[low : count - low], axis=0)
