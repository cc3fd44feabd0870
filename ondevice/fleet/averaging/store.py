"""A first-order fleet in one SQLite file: the charter, the adapter, the server's moments, and a
line for each round.

A round is one transaction, so a server that is killed at any point goes on from the last complete
round. It has no log to replay: one adapter is as large as all messages of a zeroth-order fleet."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Self

from ondevice.fleet.averaging.arrays import from_bytes, to_bytes
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.averaging.rules import Arrays
from ondevice.fleet.file import FleetFile, storage_error

FILE_NAME = "adapters.db"
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, loss REAL, answers INTEGER NOT NULL, refused INTEGER NOT NULL, bytes INTEGER NOT NULL,
    time_s REAL NOT NULL
);
CREATE TABLE tensors (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
"""


class AdapterStore(FleetFile):
    """A first-order fleet's file; a context manager. Use `create` or `open`."""

    file_name = FILE_NAME
    schema = SCHEMA
    version = SCHEMA_VERSION
    charter_type = AdapterCharter
    none_here = "no first-order fleet"
    charter: AdapterCharter

    @classmethod
    def create(cls, folder: Path, charter: AdapterCharter, first: Arrays | None = None) -> Self:
        """Open the fleet of this charter in `folder`, or begin it with the adapter `first`.

        Raises:
            FleetError: another fleet is there.
        """
        return cls._create(
            folder, charter, ("INSERT INTO tensors VALUES ('adapter', ?)", (to_bytes(first or {}),))
        )

    def add(
        self, number: int, arrays: Arrays, moments: tuple[Arrays, Arrays], *, loss: float | None, answers: int,
        refused: int, sent_bytes: int, time_s: float,
    ) -> None:  # fmt: skip
        """Add a round and the adapter that it gave, in one transaction."""
        try:
            with self.connection:
                self.connection.execute("BEGIN IMMEDIATE")
                self.connection.execute(
                    "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?, ?)",
                    (number, loss, answers, refused, sent_bytes, time_s),
                )
                for name, values in (
                    ("adapter", arrays),
                    ("first", moments[0]),
                    ("second", moments[1]),
                ):
                    if values:
                        self.connection.execute(
                            "INSERT OR REPLACE INTO tensors VALUES (?, ?)", (name, to_bytes(values))
                        )
        except sqlite3.Error as error:
            raise storage_error(self.folder, error) from None

    def keep(self, arrays: Arrays) -> None:
        """Store an adapter that came from a server; tensors that it does not name stay."""
        with self.connection:
            row = ("adapter", to_bytes(self.tensors() | arrays))
            self.connection.execute("INSERT OR REPLACE INTO tensors VALUES (?, ?)", row)

    def count(self) -> int:
        """Return how many rounds there are."""
        return self.connection.execute("SELECT COALESCE(MAX(round) + 1, 0) FROM rounds").fetchone()[
            0
        ]

    def tensors(self, name: str = "adapter") -> Arrays:
        """Return the adapter, or the `first` or `second` moments, which may be empty."""
        row = self.connection.execute("SELECT data FROM tensors WHERE name = ?", (name,)).fetchone()
        if row is None:
            return {}
        return from_bytes(row[0])

    def moments(self) -> tuple[Arrays, Arrays]:
        """Return the server's moments."""
        return self.tensors("first"), self.tensors("second")

    def table(self) -> list[dict[str, Any]]:
        """Return for each round its number, loss, replies, refused replies and bytes."""
        return self._table("rounds", "round")
