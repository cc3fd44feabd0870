"""Combine a round's replies: a pure function of their set, the same in every order.

Sums are rounded once (`math.fsum`), so neither the order of the replies nor the machine matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

from ondevice.fleet.agreement import Agreement
from ondevice.fleet.messages import LARGEST_UNIT, UNIT, Group, TaskReply
from ondevice.fleet.numbers import pack

LEAST = 3
"""Replies that can be compared with each other."""


def length_of(values: Sequence[float]) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(math.fsum(value * value for value in values))


def clip(values: Sequence[float], norm: float | None) -> list[float]:
    """Shorten a device's numbers to a Euclidean norm of at most `norm`; None leaves them."""
    if norm is None:
        return list(values)
    length = length_of(values)
    if length > norm:
        return [value * (norm / length) for value in values]
    return list(values)


def weights_of(rows: Sequence[int], most: int | None = None) -> list[int]:
    """Return each reply's weight in a mean: its rows, but at most `most` and at most the median of
    all.

    Rows are what a device claims. With the median, one that lies counts no more than an honest
    device, as long as most are honest."""
    middle = median_low(rows)
    most = middle if most is None else min(most, middle)
    return [min(each, most) for each in rows]


def longest_of(lengths: Sequence[float]) -> float:
    """Return the length that one reply of a mean may have, in view of the others.

    It is the longest one without the longest quarter, one reply at least: so if a quarter of the
    devices lie, none of them moves the mean further than an honest device does. Fewer than three
    replies cannot be compared."""
    count = len(lengths)
    if count >= LEAST:
        return sorted(lengths)[count - 1 - max(1, count // 4)]
    return math.inf


def mean(columns: Sequence[Sequence[float]], weights: Sequence[int]) -> list[float]:
    """Return each column's mean, weighted."""
    total = sum(weights)
    return [
        math.fsum(value * w for value, w in zip(column, weights, strict=True)) / total
        for column in columns
    ]


def trimmed_mean(columns: Sequence[Sequence[float]], share: float) -> list[float]:
    """Return each column's mean without the `share` lowest and the `share` highest values."""
    count = len(columns[0])
    drop = min(math.floor(share * count), (count - 1) // 2)
    return [
        math.fsum(sorted(column)[drop : count - drop]) / (count - 2 * drop) for column in columns
    ]


def median(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return each column's median: of an even count the mean of the two in the middle."""
    count = len(columns[0])
    middle = ((count - 1) // 2, count // 2)
    ordered = [sorted(column) for column in columns]
    return [math.fsum((column[middle[0]], column[middle[1]])) / 2 for column in ordered]


def shortened(answers: Sequence[TaskReply], config: Agreement) -> list[list[float]]:
    """Return the replies' numbers, shortened to the length of honest devices'.

    Those of a secure fleet are not shortened: nobody sees a single one of them.
    """
    given = [answer.numbers.values() for answer in answers]
    if config.secure:
        return given
    given = [clip(values, config.longest(len(values))) for values in given]
    if config.combine == "median":
        return given  # ignores lengths; a trimmed mean of few replies trims none
    most = longest_of([length_of(values) for values in given])
    return [clip(values, most) for values in given]


def weighted(answers: Sequence[TaskReply], config: Agreement) -> list[int]:
    """Return the replies' weights; of a secure fleet those that its devices multiply by."""
    rows = [answer.rows for answer in answers]
    if config.secure:
        return [min(each, config.most_rows) for each in rows]
    return weights_of(rows, config.most_rows)


def combined(answers: Sequence[TaskReply], config: Agreement) -> list[float]:
    """Return one number for each of the directions that all devices share."""
    columns = list(zip(*shortened(answers, config), strict=True))
    if config.combine == "trimmed_mean":
        return trimmed_mean(columns, config.trim)
    if config.combine == "median":
        return median(columns)
    return mean(columns, weighted(answers, config))


def shared_group(first_step: int, values: Sequence[float], factor: float) -> Group:
    """Return the group of directions that all devices share, of their combined numbers."""
    return Group(first_step, pack([factor * value for value in values], UNIT, LARGEST_UNIT))


def coefficients_of(
    answers: Sequence[tuple[int, TaskReply]], config: Agreement, factor: float
) -> tuple[Group, ...]:
    """Return a round's groups: shared directions in one, own directions in one for each device.

    Args:
        answers: (first step, reply) of every device that replied, in any order.
        factor: `Charter.factor` of the round; coefficients are it times a number.
    """
    if not answers:
        return ()
    ordered = sorted(answers, key=lambda pair: (pair[0], pair[1].device))
    if config.seeds == "shared":
        values = combined([answer for _, answer in ordered], config)
        return (shared_group(ordered[0][0], values, factor),)
    # A device's own directions can be compared only by the length of its numbers.
    given = [answer for _, answer in ordered]
    weights = weighted(given, config)
    total = sum(weights)
    groups = []
    for (first_step, _), values, rows in zip(
        ordered, shortened(given, config), weights, strict=True
    ):
        scaled = [factor * value * rows / total for value in values]
        groups.append(Group(first_step, pack(scaled, UNIT, LARGEST_UNIT)))
    return tuple(groups)
