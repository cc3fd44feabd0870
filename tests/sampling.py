"""What a run of every change leaves out, and `ONDEVICE_TESTS_ALL=1`, as the nightly job has it, does
not: most of the combinations of a test's parameters, and most of the examples that Hypothesis draws.

Every value of every parameter stays; which combinations do is the same in every run. The marker
`nightly` is for single combinations that take long, such as each form of weights of each kind of
block, where a change is held to each form of one kind and to each kind in one form.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import combinations

import pytest

ALL = bool(os.environ.get("ONDEVICE_TESTS_ALL"))


def part_of(count: int) -> int:
    """Return how many of `count` examples Hypothesis draws."""
    return count if ALL else max(5, count // 4)


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items that the markers `nightly` and `sampled` leave out.

    `nightly` leaves out the item or the whole function. `sampled` alone asks for each value of each
    parameter once, `sampled(2)` for each pair of values of two parameters, and `sampled(every=4)`
    for each fourth item.
    """
    if ALL:
        return []
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    spare = [item for group in functions.values() for item in _spare(group)]
    return spare + [item for item in items if item.get_closest_marker("nightly")]


def _spare(items: list[pytest.Item]) -> list[pytest.Item]:
    marker = items[0].get_closest_marker("sampled")
    assert marker is not None
    if every := marker.kwargs.get("every"):
        return [item for place, item in enumerate(items) if place % every]
    strength = marker.args[0] if marker.args else 1
    covers = {
        item: set(
            combinations(
                [(name, repr(value)) for name, value in item.callspec.params.items()], strength
            )  # type: ignore[attr-defined]
        )
        for item in items
    }
    open_ = set[object]().union(*covers.values())
    spare, used = list(items), Counter[object]()
    while open_:  # of those that cover most the first whose values have been taken least
        best = max(
            spare,
            key=lambda item: (len(covers[item] & open_), -sum(used[one] for one in covers[item])),
        )
        spare.remove(best)
        open_ -= covers[best]
        used.update(covers[best])
    return spare
