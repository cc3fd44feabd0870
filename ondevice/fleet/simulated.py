"""A simulated fleet of any kind: its folder, its progress, its evaluations and its result."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ondevice.core.errors import FleetError


@dataclass(frozen=True)
class Round:
    """The result of a round, for progress."""

    number: int
    rounds: int
    loss: float | None
    answers: int
    refused: int


@dataclass(frozen=True)
class Simulated:
    """A simulated fleet's result.

    Attributes:
        hashes_equal: every device that followed the log has the server's hash.
        final_hash: SHA-256 of the state, 64 hexadecimal digits.
        bytes_per_device_round: mean bytes of a task, a reply and an outcome, for a device that
            replied.
        rounds: that were done.
        loss_first, loss_last: of the adapter before the first and after the last round, on the rows
            to evaluate, nats a token.
        accuracy_first, accuracy_last: the same; None if the rows have no candidates.
        refused: replies by the code of their refusal (`codes.Code`).
        log: the file of all rounds in the folder.
        interrupted: stopped by a signal; it can be resumed.
        curve: `round`, `loss`, `accuracy`, and `bytes` to and from a device until then, at each
            evaluation.
    """

    hashes_equal: bool
    final_hash: str
    bytes_per_device_round: float
    rounds: int
    loss_first: float
    loss_last: float
    accuracy_first: float | None
    accuracy_last: float | None
    devices: int
    rows_by_device: tuple[int, int]
    refused: dict[str, int]
    log: str
    adapter: str | None
    interrupted: bool = False
    curve: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Curve:
    """Evaluations by round and by bytes, stored in a fleet's folder.

    Args:
        store: with `fact`, `set_fact` and `table`.
        every: rounds between two evaluations; None for only the first and the last.
    """

    def __init__(self, store: Any, every: int | None) -> None:
        self.store = store
        self.every = every
        self.points: list[dict[str, Any]] = json.loads(store.fact("curve") or "[]")

    def due(self, done: int, rounds: int) -> bool:
        """Return True if a round other than the first and the last is to be evaluated."""
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


def make_room(out: Path, name: str, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that has a fleet in file `name`, unless it is resumed or replaced.

    Raises:
        FleetError: it has one, and neither flag is set.
    """
    if not (out / name).exists() or resume:
        return
    if not overwrite:
        raise FleetError(
            f"{out} already has a fleet",
            hint="--resume continues it, --overwrite replaces it; or choose another --out",
        )
    for file in (name, f"{name}-wal", f"{name}-shm"):
        (out / file).unlink(missing_ok=True)
