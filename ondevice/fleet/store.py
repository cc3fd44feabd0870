"""A server's or a device's fleet in one SQLite file: the charter, every event, the last answers, and a snapshot.

A round is one transaction, so a process that is killed at any point goes on from the last whole round.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ondevice.core.errors import BusyError, FleetError, StorageError
from ondevice.fleet.charter import Charter
from ondevice.fleet.log import FleetLog, checked
from ondevice.fleet.messages import Answer, Event, Task, read_event
from ondevice.fleet.state import State

FILE_NAME = "fleet.db"
SCHEMA_VERSION = 1
SNAPSHOT_EVERY = 50
"""Rounds between two copies of the whole state: what a restart applies again is less."""

SCHEMA = """
CREATE TABLE charter (json BLOB NOT NULL);
CREATE TABLE events (
    place INTEGER PRIMARY KEY, round INTEGER NOT NULL, event BLOB NOT NULL, loss REAL, answers INTEGER NOT NULL,
    refused INTEGER NOT NULL, bytes INTEGER NOT NULL, time_s REAL NOT NULL
);
CREATE TABLE answers (
    round INTEGER NOT NULL, device INTEGER NOT NULL, answer BLOB NOT NULL, PRIMARY KEY (round, device)
) WITHOUT ROWID;
CREATE TABLE asked (
    round INTEGER NOT NULL, device INTEGER NOT NULL, begin BLOB NOT NULL, task BLOB NOT NULL, place INTEGER NOT NULL,
    PRIMARY KEY (round, device)
) WITHOUT ROWID;
CREATE TABLE snapshot (
    id INTEGER PRIMARY KEY CHECK (id = 0), place INTEGER NOT NULL, round INTEGER NOT NULL,
    vector BLOB NOT NULL, velocity BLOB NOT NULL, frozen BLOB NOT NULL
);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class Store:
    """A fleet's file; a context manager. Use `create` or `open`."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, charter: Charter) -> None:
        self.folder, self.connection, self.charter = folder, connection, charter

    @classmethod
    def create(cls, folder: Path, charter: Charter) -> Self:
        """Open the fleet of this charter in `folder`, begun if there is none.

        Raises:
            FleetError: another fleet is there.
        """
        path = Path(folder) / FILE_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = connect(path)
            with connection:  # one transaction: a fleet is whole or not there, whenever the process is killed
                connection.execute("BEGIN IMMEDIATE")
                if not connection.execute("PRAGMA user_version").fetchone()[0]:
                    for statement in filter(str.strip, SCHEMA.split(";")):
                        connection.execute(statement)
                    connection.execute("INSERT INTO charter VALUES (?)", (charter.to_bytes(),))
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
    def open(cls, folder: Path, name: str = FILE_NAME) -> Self:
        """Open the fleet in `folder`.

        Raises:
            FleetError: there is none, or a newer version wrote it.
            StorageError: the file is damaged.
        """
        path = Path(folder) / name
        if not path.is_file():
            raise FleetError(f"{folder} holds no fleet", expected=f"a folder with {FILE_NAME}")
        try:
            connection = connect(path)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                connection.close()
                raise FleetError(
                    f"{path} is of another version", expected=f"version {SCHEMA_VERSION}", received=f"version {version}"
                )
            (head,) = connection.execute("SELECT json FROM charter").fetchone()
        except sqlite3.Error as error:
            raise storage_error(path, error) from None
        return cls(Path(folder), connection, Charter.from_bytes(head))

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def add(
        self,
        event: Event,
        state: State,
        *,
        answers: list[Answer] | None = None,
        refused: int = 0,
        loss: float | None = None,
        sent_bytes: int = 0,
        time_s: float = 0.0,
    ) -> None:
        """Add the event that gave `state`, with the answers it was made of, in one transaction."""
        given = answers or []
        try:
            with self.connection:
                self.connection.execute("BEGIN IMMEDIATE")
                place = self.count()
                self.connection.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (place, event.round, event.to_bytes(), loss, len(given), refused, sent_bytes, time_s),
                )
                self.connection.executemany(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)",
                    [(answer.round, _signed(answer.device), answer.to_bytes()) for answer in given],
                )
                self.connection.execute("DELETE FROM asked WHERE round = ?", (event.round,))
                if (place + 1) % SNAPSHOT_EVERY == 0:
                    self._snapshot(place + 1, state)
        except sqlite3.Error as error:
            raise storage_error(self.folder, error) from None

    def _snapshot(self, place: int, state: State) -> None:
        vector, velocity = (values.astype("<i8").tobytes() for values in (state.vector, state.velocity))
        self.connection.execute(
            "INSERT OR REPLACE INTO snapshot VALUES (0, ?, ?, ?, ?, ?)",
            (place, state.round, vector, velocity, state.frozen),
        )

    def count(self) -> int:
        """Return how many events there are."""
        return self.connection.execute("SELECT COALESCE(MAX(place) + 1, 0) FROM events").fetchone()[0]

    def events(self, first: int = 0) -> list[bytes]:
        """Return the events from place `first` on, encoded."""
        rows = self.connection.execute("SELECT event FROM events WHERE place >= ? ORDER BY place", (first,))
        return [event for (event,) in rows]

    def answers(self, number: int) -> list[Answer]:
        """Return the answers of a round, by device."""
        rows = self.connection.execute("SELECT answer FROM answers WHERE round = ? ORDER BY device", (number,))
        return [Answer.from_bytes(answer) for (answer,) in rows]

    def ask(self, begin: bytes, task: Task, device: int, place: int) -> None:
        """Keep a task of an open round that waits for a file.

        Args:
            place: how many events the device has with it.
        """
        row = (task.round, _signed(device), begin, task.to_bytes(), place)
        with self.connection:
            self.connection.execute("INSERT OR REPLACE INTO asked VALUES (?, ?, ?, ?, ?)", row)

    def asked(self) -> list[tuple[int, bytes, dict[int, Task]]]:
        """Return each open round that waits for files: its number, its beginning, its tasks by device."""
        rounds: dict[int, tuple[int, bytes, dict[int, Task]]] = {}
        for number, device, begin, task in self.connection.execute(
            "SELECT round, device, begin, task FROM asked ORDER BY round, device"
        ):
            tasks = rounds.setdefault(number, (number, begin, {}))[2]
            tasks[device % (1 << 64)] = Task.from_bytes(task)
        return list(rounds.values())

    def take(self, answer: Answer) -> None:
        """Keep an answer of an open round, and that its device has what came with the task."""
        key = (answer.round, _signed(answer.device))
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (*key, answer.to_bytes()))
            self.connection.execute(
                "INSERT OR REPLACE INTO facts SELECT ?, place FROM asked WHERE round = ? AND device = ?",
                (f"carried {answer.device}", *key),
            )

    def table(self) -> list[dict[str, Any]]:
        """Return for each round its number, loss, answers, refused answers and bytes."""
        rows = self.connection.execute(
            "SELECT round, loss, answers, refused, bytes, time_s FROM events ORDER BY place"
        ).fetchall()
        names = ("round", "loss", "answers", "refused", "bytes", "time_s")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def most_answers(self) -> int:
        """Return how many answers the device with the most has given."""
        query = "SELECT MAX(n) FROM (SELECT COUNT(*) AS n FROM answers GROUP BY device)"
        return self.connection.execute(query).fetchone()[0] or 0

    def log(self) -> FleetLog:
        """Return the whole log."""
        return FleetLog(self.charter, tuple(checked(read_event(event), self.charter) for event in self.events()))

    def state(self) -> State:
        """Return the state after the last event: the snapshot, and what came after it."""
        state, place = self.charter.state(), 0
        row = self.connection.execute("SELECT place, round, vector, velocity, frozen FROM snapshot").fetchone()
        if row is not None:
            place, state.round, vector, velocity, state.frozen = row
            state.vector = np.frombuffer(vector, "<i8").astype(np.int64)
            state.velocity = np.frombuffer(velocity, "<i8").astype(np.int64)
        rest = self.events(place)
        for number, event in enumerate(rest, 1):
            state.apply(read_event(event), check=number == len(rest))
        return state

    def set_fact(self, name: str, value: str) -> None:
        """Keep a value by name, such as a device's number."""
        with self.connection:
            self.connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def fact(self, name: str) -> str | None:
        """Return a value that was kept."""
        row = self.connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]


def _signed(number: int) -> int:
    """SQLite's integers are signed; a device's number is not."""
    return number - (1 << 64) if number >= 1 << 63 else number


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def storage_error(path: Path, error: Exception) -> Exception:
    if "locked" in str(error):
        return BusyError(f"{path}: another process is writing this fleet", hint="stop it first")
    return StorageError(f"{path}: the fleet's file cannot be used: {error}", hint="choose another folder with --out")
