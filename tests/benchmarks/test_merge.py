"""Rows of another run into a committed result."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.merge import merged


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": "a/b", "machine": {"name": "m"}, "columns": [], "rows": list(rows)}


@pytest.mark.parametrize("of", [len, list], ids=["number", "names"])
def test_of_two_rows_with_one_key_the_one_with_more_seeds_stays(of: Any) -> None:
    def row(seeds: int, mean: float, task: str = "x") -> dict[str, Any]:
        return {"task": task, "seeds": of(range(5 - seeds, 5)), "mean": mean}

    two, five, other = row(2, 0.5), row(5, 0.75), row(1, 0.25, "y")
    for old, new, stays in ((two, five, five), (five, two, five), (two, row(2, 0.625), row(2, 0.625))):
        assert merged(document(old), document(new, other), ("task",))["rows"] == [stays, other]
