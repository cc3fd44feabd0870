"""The tasks that a device has replied to: each once, so that no repetition averages its noise away.

A device that is asked the same again sends the same bytes; to another task of the same round it
sends nothing. The record outlives the process, and is written before a reply leaves."""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from ondevice.artifact.files import private
from ondevice.core.errors import FleetError
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.file import connect, storage_error
from ondevice.fleet.privacy import DELTA, bound

FILE_NAME = "answered.db"
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS answered (
    fleet INTEGER NOT NULL, round INTEGER NOT NULL, stage TEXT NOT NULL, begin BLOB NOT NULL, request BLOB NOT NULL,
    cost REAL NOT NULL, answer BLOB, PRIMARY KEY (fleet, round, stage)
) WITHOUT ROWID
"""
KEEP_ROUNDS = 64
"""Rounds whose replies are stored as bytes: as many as a fleet may have open."""
BUDGET = 8.0
"""Epsilon at which a device stops, if its owner names none."""


class Ledger:
    """A device's record; a context manager.

    Args:
        folder: the device's.

    Raises:
        StorageError, FleetError: the file cannot be used, or a newer version wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / FILE_NAME
        try:
            with private():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.connection = connect(self.path)
            (version,) = self.connection.execute("PRAGMA user_version").fetchone()
            if not version:
                self.connection.execute(SCHEMA)
                self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise storage_error(self.path, error) from None
        if version > SCHEMA_VERSION:
            self.connection.close()
            raise FleetError(
                f"{self.path} is of a newer version",
                expected=f"version {SCHEMA_VERSION}",
                received=f"version {version}",
                hint="use the version of ondevice that wrote it",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def once(
        self, fleet: int, number: int, begin: bytes, stage: str, request: bytes, answer: Callable[[], bytes],
        cost: float = 0.0, budget: float | None = None, keep: int = KEEP_ROUNDS,
    ) -> bytes:  # fmt: skip
        """Return the reply to a request: the stored one, or else a new one, which is stored
        first.

        Args:
            number: of the round.
            begin: hash of the state that the round begins from.
            request: all inputs of the reply, as the server sent it.
            answer: makes a new one.
            cost: of it, if it has the device's numbers; see `cost_of`.
            budget: see `check_budget`.
            keep: rounds whose replies are stored as bytes.

        Raises:
            Refusal: the device has replied to another request of this round and stage, the bytes
                are no longer kept, or the budget is spent.
        """
        digest = hashlib.sha256(begin + request).digest()
        key = (fleet, number, stage)
        row = self.connection.execute(
            "SELECT begin, request, answer FROM answered WHERE (fleet, round, stage) = (?, ?, ?)",
            key,
        ).fetchone()
        if row is not None:
            if row[1] != digest:
                raise Refusal(
                    Code.OTHER_TASK,
                    f"the device has replied to another task of round {number} ({stage})",
                    expected=f"the task that began from {row[0].hex()}",
                    received=f"another one, from {begin.hex()}",
                )
            if row[2] is None:
                raise Refusal(
                    Code.ANSWERED,
                    f"the device has replied in round {number}, and no longer has the reply",
                )
            return row[2]
        if cost:
            self.check_budget(cost, budget)
        new = answer()
        try:
            with self.connection:
                self.connection.execute("BEGIN IMMEDIATE")
                self.connection.execute(
                    "INSERT INTO answered VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (*key, begin, digest, cost, new),
                )
                self.connection.execute(
                    "UPDATE answered SET answer = NULL WHERE fleet = ? AND round <= ?",
                    (fleet, number - keep),
                )
        except sqlite3.Error as error:
            raise storage_error(self.path, error) from None
        return new

    def check_budget(self, cost: float, budget: float | None) -> None:
        """Check that one more reply stays within a privacy budget, whatever fleets the others went
        to.

        Args:
            cost: of the reply.
            budget: epsilon at delta 1e-5. None: `BUDGET` in a fleet with noise, no limit in one
                without.

        Raises:
            Refusal: it does not.
        """
        if budget is None and math.isinf(cost):
            return
        (before,) = self.connection.execute("SELECT TOTAL(cost) FROM answered").fetchone()
        # Gaussian mechanisms of multipliers z compose to one of 1 / sqrt(sum of 1 / z^2).
        most = BUDGET if budget is None else budget
        spent = bound(1 / math.sqrt(before + cost), 1)
        if spent > most:
            raise Refusal(
                Code.BUDGET,
                "one more reply would exceed this device's privacy budget",
                expected=f"epsilon of at most {most:g} at delta {DELTA:g}",
                received=f"epsilon {spent:.3g}",
                hint="--epsilon sets this device's budget; more noise in the charter makes it last longer",
            )


def cost_of(noise_multiplier: float) -> float:
    """Return what a reply with a device's numbers costs: 1 / z^2, which adds up over replies."""
    if noise_multiplier:
        return 1 / noise_multiplier**2
    return math.inf
