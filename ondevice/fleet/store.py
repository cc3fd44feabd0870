"""A server's or a device's fleet in one SQLite file: the charter, every event, the last replies,
and a snapshot.

A round is one transaction, so a process that is killed at any point goes on from the last complete
round."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Self

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.store import FILE_NAME as ADAPTERS
from ondevice.fleet.charter import Charter
from ondevice.fleet.file import FleetFile, storage_error
from ondevice.fleet.frozen import Frozen
from ondevice.fleet.log import SUFFIX, FleetLog, checked, read_log
from ondevice.fleet.messages import Event, Refresh, Task, TaskReply, read_event
from ondevice.fleet.state import State

FILE_NAME = "fleet.db"
SCHEMA_VERSION = 1
SNAPSHOT_EVERY = 50
"""Rounds between two copies of the state: a restart applies fewer than these again."""

SCHEMA = """
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
CREATE TABLE frozen (digest BLOB PRIMARY KEY, file BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE snapshot (
    id INTEGER PRIMARY KEY CHECK (id = 0), place INTEGER NOT NULL, round INTEGER NOT NULL,
    vector BLOB NOT NULL, velocity BLOB NOT NULL, frozen BLOB NOT NULL
);
"""


class Store(FleetFile):
    """A fleet's file; a context manager. Use `create` or `open`."""

    file_name = FILE_NAME
    schema = SCHEMA
    version = SCHEMA_VERSION
    charter_type = Charter
    none_here = "no fleet"
    charter: Charter

    @classmethod
    def create(cls, folder: Path, charter: Charter) -> Self:
        """Open the fleet of this charter in `folder`, or begin it.

        Raises:
            FleetError: another fleet is there.
        """
        return cls._create(folder, charter)

    def add(
        self,
        event: Event,
        state: State,
        *,
        answers: list[TaskReply] | None = None,
        summed: int = 0,
        refused: int = 0,
        loss: float | None = None,
        sent_bytes: int = 0,
        time_s: float = 0.0,
        frozen: Frozen | None = None,
    ) -> None:
        """Add the event that led to `state`, with the replies it was made of, in one transaction.

        Args:
            summed: number of replies, if only their sum is known.
            frozen: the file that a refresh names.
        """
        given = answers or []
        try:
            with self.connection:
                self.connection.execute("BEGIN IMMEDIATE")
                place = self.count()
                self.connection.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        place,
                        event.round,
                        event.to_bytes(),
                        loss,
                        len(given) or summed,
                        refused,
                        sent_bytes,
                        time_s,
                    ),
                )
                self.connection.executemany(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)",
                    [(answer.round, _signed(answer.device), answer.to_bytes()) for answer in given],
                )
                if frozen is not None:
                    self.connection.execute(
                        "INSERT OR REPLACE INTO frozen VALUES (?, ?)",
                        (frozen.digest, frozen.to_bytes()),
                    )
                self.connection.execute("DELETE FROM asked WHERE round = ?", (event.round,))
                if (place + 1) % SNAPSHOT_EVERY == 0:
                    self._snapshot(place + 1, state)
        except sqlite3.Error as error:
            raise storage_error(self.folder, error) from None

    def _snapshot(self, place: int, state: State) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO snapshot VALUES (0, ?, ?, ?, ?, ?)",
            (place, state.round, state.vector.astype("<i8").tobytes(), state.slots(), state.frozen),
        )

    def count(self) -> int:
        """Return how many events there are."""
        return self.connection.execute("SELECT COALESCE(MAX(place) + 1, 0) FROM events").fetchone()[
            0
        ]

    def events(self, first: int = 0) -> list[bytes]:
        """Return the events from place `first` on, encoded."""
        rows = self.connection.execute(
            "SELECT event FROM events WHERE place >= ? ORDER BY place", (first,)
        )
        return [event for (event,) in rows]

    def answers(self, number: int) -> list[TaskReply]:
        """Return the replies of a round, by device."""
        rows = self.connection.execute(
            "SELECT answer FROM answers WHERE round = ? ORDER BY device", (number,)
        )
        return [TaskReply.from_bytes(answer) for (answer,) in rows]

    def ask(self, begin: bytes, tasks: dict[int, Task], place: int) -> None:
        """Keep tasks of an open round, by device, until it ends.

        Args:
            place: how many events a device has with its task.
        """
        rows = [
            (task.round, _signed(device), begin, task.to_bytes(), place)
            for device, task in tasks.items()
        ]
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.executemany("INSERT OR REPLACE INTO asked VALUES (?, ?, ?, ?, ?)", rows)

    def asked(self) -> list[tuple[int, bytes, dict[int, Task]]]:
        """Return each open round: its number, its beginning, its tasks by device."""
        rounds: dict[int, tuple[int, bytes, dict[int, Task]]] = {}
        for number, device, begin, task in self.connection.execute(
            "SELECT round, device, begin, task FROM asked ORDER BY round, device"
        ):
            tasks = rounds.setdefault(number, (number, begin, {}))[2]
            tasks[device % (1 << 64)] = Task.from_bytes(task)
        return list(rounds.values())

    def take(self, answer: TaskReply) -> None:
        """Store a reply of an open round, and that its device has the events of its task."""
        key = (answer.round, _signed(answer.device))
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (*key, answer.to_bytes())
            )
            self.connection.execute(
                "INSERT OR REPLACE INTO facts SELECT ?, place FROM asked WHERE round = ? AND device = ?",
                (f"carried {answer.device}", *key),
            )

    def table(self) -> list[dict[str, Any]]:
        """Return for each round its number, loss, replies, refused replies and bytes."""
        return self._table("events", "place")

    def most_answers(self) -> int:
        """Return the number of replies of the device with the most."""
        query = "SELECT MAX(n) FROM (SELECT COUNT(*) AS n FROM answers GROUP BY device)"
        return self.connection.execute(query).fetchone()[0] or 0

    def file_of(self, digest: bytes) -> Frozen:
        """Return the frozen tensors that a refresh names.

        Raises:
            FleetError: they are not here.
        """
        row = self.connection.execute(
            "SELECT file FROM frozen WHERE digest = ?", (digest,)
        ).fetchone()
        if row is None:
            raise FleetError("frozen tensors of this fleet are missing", expected=digest.hex())
        return Frozen.from_bytes(row[0])

    def refreshes(self, first: int = 0) -> list[Refresh]:
        """Return the refreshes from place `first` on."""
        events = ()
        if self.charter.subspace == "given":
            events = map(read_event, self.events(first))
        return [event for event in events if isinstance(event, Refresh)]

    def files(self, first: int = 0) -> list[Frozen]:
        """Return the files that refreshes from place `first` on name."""
        return [self.file_of(event.digest) for event in self.refreshes(first)]

    def log(self) -> FleetLog:
        """Return the whole log."""
        events = tuple(checked(read_event(event), self.charter) for event in self.events())
        return FleetLog(self.charter, events, frozen={file.digest: file for file in self.files()})

    def state(self) -> State:
        """Return the state after the last event: the snapshot, and what came after it."""
        state = self.charter.state()
        place = 0
        row = self.connection.execute(
            "SELECT place, round, vector, velocity, frozen FROM snapshot"
        ).fetchone()
        if row is not None:
            place, state.round, vector, slots, state.frozen = row
            state.restore(vector, slots)
            state.refreshed = max(
                (event.round for event in self.refreshes() if event.round <= state.round),
                default=-1,
            )
        rest = self.events(place)
        for number, event in enumerate(rest, 1):
            state.apply(read_event(event), check=number == len(rest))
        return state


def read_file(path: Path) -> FleetLog:
    """Read a log, or the log in a server's or device's store.

    Raises:
        FleetError: the path has none, or it is damaged.
    """
    path = Path(path)
    if path.is_dir():
        if (path / ADAPTERS).is_file():
            raise FleetError(
                f"{path} is of first-order devices, whose rounds are adapters: it has no log to replay",
                hint=f"`ondevice fleet status {path}` says its hash",
            )
        path = path / FILE_NAME
    if not path.is_file():
        raise FleetError(
            f"{path}: no log found",
            expected=f"a fleet's folder, its {FILE_NAME}, or a *{SUFFIX} file",
        )
    with open(path, "rb") as file:
        first = file.read(16)
    if first.startswith(b"SQLite format 3"):
        with Store.open(path.parent, path.name) as store:
            return store.log()
    return read_log(path.read_bytes(), str(path))


def _signed(number: int) -> int:
    """SQLite's integers are signed; a device's number is not."""
    if number >= 1 << 63:
        return number - (1 << 64)
    return number
