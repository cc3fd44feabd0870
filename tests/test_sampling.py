"""What a run of every change leaves out: no value of a parameter, and the same in every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import pytest

from tests import sampling

VALUES: dict[str, list[Any]] = {"a": [1, 2, 3], "b": [{}, {"x": 1}], "c": [None, 4, 5, "d"]}


@dataclass(eq=False)
class Item:
    """As much of pytest's item as is asked for."""

    params: dict[str, Any]
    marker: Any
    nodeid: str = "tests/test_x.py::test_y[1]"
    nightly: Any = None

    @property
    def callspec(self) -> Item:
        return self

    def get_closest_marker(self, name: str) -> Any:
        return {"sampled": self.marker, "nightly": self.nightly}[name]


@dataclass
class Marker:
    args: tuple[int, ...] = ()
    kwargs: dict[str, int] = field(default_factory=dict)


def items(marker: Marker | None) -> list[Any]:
    return [
        Item(dict(zip(VALUES, values, strict=True)), marker) for values in product(*VALUES.values())
    ]


def seen(chosen: list[Any], strength: int) -> set[Any]:
    return {
        part
        for item in chosen
        for part in combinations(
            [(key, repr(value)) for key, value in item.params.items()], strength
        )
    }


@pytest.fixture(autouse=True)
def a_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ALL", False)


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 13)])
def test_every_value_and_for_two_every_pair_of_values_runs(strength: int, most: int) -> None:
    every = items(Marker((strength,)))
    left = sampling.left_out(every)
    chosen = [item for item in every if item not in left]
    assert seen(chosen, strength) == seen(every, strength) and len(chosen) <= most
    again = items(Marker((strength,)))
    spare = sampling.left_out(again)
    assert [again.index(item) for item in spare] == [every.index(item) for item in left]


def test_each_fourth_runs_and_what_has_no_marker_runs_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = items(Marker(kwargs={"every": 4}))
    assert [item for item in every if item not in sampling.left_out(every)] == every[::4]
    assert sampling.left_out(items(None)) == []
    monkeypatch.setattr(sampling, "ALL", True)
    assert sampling.left_out(every) == [] and sampling.part_of(40) == 40


def test_what_is_marked_nightly_runs_only_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    every = items(None)
    every[3].nightly = every[5].nightly = Marker()
    assert sampling.left_out(every) == [every[3], every[5]]
    monkeypatch.setattr(sampling, "ALL", True)
    assert sampling.left_out(every) == []
