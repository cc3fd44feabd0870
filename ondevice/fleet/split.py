"""Split rows over many devices: evenly, or by label with a Dirichlet distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ondevice.core.errors import DataError

if TYPE_CHECKING:
    from ondevice.data import Dataset


def split(dataset: Dataset, devices: int, dirichlet: float | None, seed: int) -> list[Dataset]:
    """Return each device's rows; every row goes to one device, and every device has one at least.

    Args:
        dirichlet: concentration of each label's fractions over the devices (Hsu, Qi and Brown,
            2019); None deals evenly.
        seed: of the order and of the fractions.

    Raises:
        DataError: fewer rows than devices, or rows without a label.
    """
    count = len(dataset.items)
    if count < devices:
        raise DataError(
            "fewer rows than devices",
            expected=f"{devices} rows or more",
            received=f"{count} rows",
        )
    draw = np.random.default_rng([seed, 2])
    order = draw.permutation(count)
    if dirichlet is None:
        places = [order[device::devices] for device in range(devices)]
    else:
        places = _by_label([item.gold for item in dataset.items], order, devices, dirichlet, draw)
    return [
        replace(
            dataset, items=[dataset.items[place] for place in sorted(own)], problems=[], notes=()
        )
        for own in places
    ]


def _by_label(
    labels: list[int | None],
    order: np.ndarray,
    devices: int,
    concentration: float,
    draw: np.random.Generator,
) -> list[list[int]]:
    if any(label is None for label in labels):
        raise DataError(
            "rows without a label cannot be split by it",
            expected="a classification, such as --task sst2",
            hint="leave out simulation.dirichlet, which deals the rows out evenly",
        )
    places: list[list[int]] = [[] for _ in range(devices)]
    for label in sorted({label for label in labels if label is not None}):
        own = [int(place) for place in order if labels[place] == label]
        edges = np.floor(
            np.cumsum(draw.dirichlet([concentration] * devices)) * len(own) + 0.5
        ).astype(int)
        edges[-1] = len(own)
        for device, (low, high) in enumerate(zip([0, *edges[:-1]], edges)):
            places[device] += own[low:high]
    for place in places:
        if not place:
            place.append(max(places, key=len).pop())
    return places
