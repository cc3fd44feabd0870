"""A simulated fleet's evaluations: accuracy and loss by round and by bytes."""

from __future__ import annotations

import json
from typing import Any


class Curve:
    """Evaluations by round and by bytes, kept in a fleet's folder.

    Args:
        store: with `fact`, `set_fact` and `table`.
        every: rounds between two evaluations; None for the first and the last alone.
    """

    def __init__(self, store: Any, every: int | None) -> None:
        self.store, self.every = store, every
        self.points: list[dict[str, Any]] = json.loads(store.fact("curve") or "[]")

    def due(self, done: int, rounds: int) -> bool:
        """Return True if a round is still to be evaluated, beside the first and the last."""
        known = any(point["round"] == done for point in self.points)
        return bool(self.every) and done % (self.every or 1) == 0 and done < rounds and not known

    def add(self, done: int, found: Any) -> Any:
        """Add the evaluation after `done` rounds, and return it."""
        table = [row for row in self.store.table() if row["round"] < done]
        most = max((row["answers"] for row in table), default=1) or 1
        spent = sum(row["bytes"] / (row["answers"] or most) for row in table)
        point = {
            "round": done,
            "bytes": round(spent),
            "loss": found.loss,
            "accuracy": found.accuracy,
        }
        others = [known for known in self.points if known["round"] != done]
        self.points = sorted([*others, point], key=lambda known: known["round"])
        self.store.set_fact("curve", json.dumps(self.points))
        return found
