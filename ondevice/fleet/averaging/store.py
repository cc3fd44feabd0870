"""A first-order fleet in one SQLite file: the charter, the adapter, the server's moments, and a line for each round.

A round is one transaction, so a server that is killed at any point goes on from the last whole round. There is no log
to replay: an adapter is as large as all that a zeroth-order fleet ever sends.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.arrays import from_bytes, to_bytes
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.averaging.rules import Arrays
from ondevice.fleet.store import connect, storage_error

FILE_NAME = "adapters.db"
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE charter (json BLOB NOT NULL);
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, loss REAL, answers INTEGER NOT NULL, refused INTEGER NOT NULL, bytes INTEGER NOT NULL,
    time_s REAL NOT NULL
);
CREATE TABLE tensors (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class AdapterStore:
    """A first-order fleet's file; a context manager. Use `create` or `open`."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, charter: AdapterCharter) -> None:
        self.folder, self.connection, self.charter = folder, connection, charter

    @classmethod
    def create(cls, folder: Path, charter: AdapterCharter, first: Arrays | None = None) -> Self:
        """Open the fleet of this charter in `folder`, begun with the adapter `first` if there is none.

        Raises:
            FleetError: another fleet is there.
        """
        path = Path(folder) / FILE_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = connect(path)
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if not connection.execute("PRAGMA user_version").fetchone()[0]:
                    for statement in filter(str.strip, SCHEMA.split(";")):
                        connection.execute(statement)
                    connection.execute("INSERT INTO charter VALUES (?)", (charter.to_bytes(),))
                    connection.execute("INSERT INTO tensors VALUES ('adapter', ?)", (to_bytes(first or {}),))
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.close()
        except (OSError, sqlite3.Error) as error:
            raise storage_error(path, error) from None
        store = cls.open(folder)
        if store.charter != charter:
            store.close()
            ours, theirs = charter.model_dump(mode="json"), store.charter.model_dump(mode="json")
            names = sorted(name for name in ours if ours[name] != theirs[name])
            raise FleetError(
                f"{folder} holds another fleet: {', '.join(names)}",
                expected={name: theirs[name] for name in names},
                received={name: ours[name] for name in names},
                hint="choose another folder with --out, or repeat the settings that it was begun with",
            )
        return store

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the fleet in `folder`.

        Raises:
            FleetError: there is none.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise FleetError(f"{folder} holds no first-order fleet", expected=FILE_NAME)
        try:
            connection = connect(path)
            (charter,) = connection.execute("SELECT json FROM charter").fetchone()
        except (sqlite3.Error, TypeError) as error:
            raise storage_error(path, error) from None
        return cls(Path(folder), connection, AdapterCharter.from_bytes(charter))

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
                for name, values in (("adapter", arrays), ("first", moments[0]), ("second", moments[1])):
                    if values:
                        self.connection.execute(
                            "INSERT OR REPLACE INTO tensors VALUES (?, ?)", (name, to_bytes(values))
                        )
        except sqlite3.Error as error:
            raise storage_error(self.folder, error) from None

    def keep(self, arrays: Arrays) -> None:
        """Keep an adapter that came from a server; what it does not name stays."""
        with self.connection:
            row = ("adapter", to_bytes(self.tensors() | arrays))
            self.connection.execute("INSERT OR REPLACE INTO tensors VALUES (?, ?)", row)

    def count(self) -> int:
        """Return how many rounds there are."""
        return self.connection.execute("SELECT COALESCE(MAX(round) + 1, 0) FROM rounds").fetchone()[0]

    def tensors(self, name: str = "adapter") -> Arrays:
        """Return the adapter, or the `first` or `second` moments; empty where there are none."""
        row = self.connection.execute("SELECT data FROM tensors WHERE name = ?", (name,)).fetchone()
        return {} if row is None else from_bytes(row[0])

    def moments(self) -> tuple[Arrays, Arrays]:
        """Return the server's moments."""
        return self.tensors("first"), self.tensors("second")

    def table(self) -> list[dict[str, Any]]:
        """Return for each round its number, loss, answers, refused answers and bytes."""
        rows = self.connection.execute(
            "SELECT round, loss, answers, refused, bytes, time_s FROM rounds ORDER BY round"
        ).fetchall()
        names = ("round", "loss", "answers", "refused", "bytes", "time_s")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def set_fact(self, name: str, value: str) -> None:
        """Keep a value by name."""
        with self.connection:
            self.connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def fact(self, name: str) -> str | None:
        """Return a value that was kept."""
        row = self.connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]
