"""Combine a round's answers: a pure function of their set, the same in every order.

Sums are rounded once (`math.fsum`), so the order of the answers does not matter, nor does the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ondevice.fleet.messages import LARGEST_UNIT, UNIT, Answer, Group
from ondevice.fleet.numbers import pack

if TYPE_CHECKING:
    from ondevice.fleet.charter import Agreement

Rule = Literal["mean", "trimmed_mean", "median"]


def clip(values: Sequence[float], norm: float | None) -> list[float]:
    """Shorten a device's numbers to a Euclidean norm of at most `norm`; None leaves them."""
    if norm is None:
        return list(values)
    length = math.sqrt(math.fsum(value * value for value in values))
    return [value * (norm / length) for value in values] if length > norm else list(values)


def weight(rows: int, most: int) -> int:
    """Return a device's weight in a mean: its rows, but not more than `most`, whatever it claims."""
    return min(rows, most)


def mean(columns: Sequence[Sequence[float]], weights: Sequence[int]) -> list[float]:
    """Return each column's mean, weighted."""
    total = sum(weights)
    return [math.fsum(value * w for value, w in zip(column, weights, strict=True)) / total for column in columns]


def trimmed_mean(columns: Sequence[Sequence[float]], share: float) -> list[float]:
    """Return each column's mean without the `share` lowest and the `share` highest values."""
    count = len(columns[0])
    drop = min(math.floor(share * count), (count - 1) // 2)
    return [math.fsum(sorted(column)[drop : count - drop]) / (count - 2 * drop) for column in columns]


def median(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return each column's median: of an even count the mean of the two in the middle."""
    count = len(columns[0])
    middle = ((count - 1) // 2, count // 2)
    ordered = [sorted(column) for column in columns]
    return [math.fsum((column[middle[0]], column[middle[1]])) / 2 for column in ordered]


def shortened(answer: Answer, config: Agreement) -> list[float]:
    """Return an answer's numbers, shortened where no honest device's would be longer; a secure sum cannot be."""
    values = answer.numbers.values()
    return values if config.secure else clip(values, config.longest(len(values)))


def combined(answers: Sequence[Answer], config: Agreement) -> list[float]:
    """Return one number for each of the directions that all devices share."""
    given = [shortened(answer, config) for answer in answers]
    columns = list(zip(*given, strict=True))
    if config.combine == "trimmed_mean":
        return trimmed_mean(columns, config.trim)
    if config.combine == "median":
        return median(columns)
    return mean(columns, [weight(answer.rows, config.most_rows) for answer in answers])


def shared_group(first_step: int, values: Sequence[float], factor: float) -> Group:
    """Return the group of directions that all devices share, of their combined numbers."""
    return Group(first_step, pack([factor * value for value in values], UNIT, LARGEST_UNIT))


def coefficients_of(answers: Sequence[tuple[int, Answer]], config: Agreement, factor: float) -> tuple[Group, ...]:
    """Return a round's groups: shared directions in one, own directions in one for each device.

    Args:
        answers: (first step, answer) of every device that answered, in any order.
        factor: `Charter.factor` of the round; coefficients are it times a number.
    """
    if not answers:
        return ()
    ordered = sorted(answers, key=lambda pair: (pair[0], pair[1].device))
    if config.seeds == "shared":
        values = combined([answer for _, answer in ordered], config)
        return (shared_group(ordered[0][0], values, factor),)
    # Directions of one device alone have nothing to be compared with: clipping is what bounds them.
    weights = [weight(answer.rows, config.most_rows) for _, answer in ordered]
    total = sum(weights)
    groups = []
    for (first_step, answer), rows in zip(ordered, weights, strict=True):
        values = shortened(answer, config)
        scaled = [factor * value * rows / total for value in values]
        groups.append(Group(first_step, pack(scaled, UNIT, LARGEST_UNIT)))
    return tuple(groups)
