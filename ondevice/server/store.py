"""The daemon's data, in one folder: SQLite (WAL) for jobs, events and tokens, files for everything
large.

    STORE/
        ondevice.db      jobs, events, data sets, uploads, adapters, activations, thumbs,
                         conversions, tokens
        serve.lock       held by the daemon that serves this store
        reserve          room on the disk that deletes may use
        datasets/ID/     rows.jsonl (or .csv, .txt), as uploaded
        models/NAME/     models that were uploaded or put there by hand
        artifacts/NAME/  exported programs, likewise
        templates/       prompt templates of one's own, NAME.yaml
        jobs/ID/         job.json, run/ (the run's folder), worker.log
        adapters/ID/     adapters of finished jobs and uploaded ones, in PEFT's layout
        active           a link to the active adapter
        uploads/ID/      what has arrived of an upload
        exits/ID/        an adapter converted for another program, for a day
        logs/            the daemon's own log, rotated
        lost/            folders that the database does not know, for thirty days

Paths in the database are relative, so a store can be copied while nothing writes, and served
elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ondevice.core.errors import ConfigError, StorageError
from ondevice.core.process import expanded
from ondevice.server.clock import StoreClock
from ondevice.server.reserve import NAME as RESERVE
from ondevice.server.reserve import RESERVE_BYTES, Reserve

FOLDERS = (
    *("datasets", "models", "artifacts", "jobs", "adapters", "uploads", "exits", "logs"),
    "templates",
)
ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Ids and names of everything in a store; none can form a path."""

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        state TEXT NOT NULL,
        priority INTEGER NOT NULL,
        spec TEXT NOT NULL,
        progress TEXT NOT NULL DEFAULT '{}',
        reason TEXT NOT NULL DEFAULT '',
        error TEXT,
        created_s REAL NOT NULL,
        started_s REAL,
        ended_s REAL,
        ran_s REAL NOT NULL DEFAULT 0,
        not_before_s REAL NOT NULL DEFAULT 0,
        crashes INTEGER NOT NULL DEFAULT 0,
        crashed_at_step INTEGER NOT NULL DEFAULT -1,
        attempt INTEGER NOT NULL DEFAULT 0,
        followed INTEGER NOT NULL DEFAULT 0,
        offset INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX jobs_by_state ON jobs (state, priority DESC, number);
    CREATE TABLE events (
        job TEXT NOT NULL,
        id INTEGER NOT NULL,
        kind TEXT NOT NULL,
        data TEXT NOT NULL,
        PRIMARY KEY (job, id)
    ) WITHOUT ROWID;
    CREATE TABLE datasets (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, file TEXT NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL,
        format TEXT NOT NULL, rows INTEGER NOT NULL, problems TEXT NOT NULL, created_s REAL NOT NULL
    );
    CREATE TABLE uploads (
        id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, file TEXT NOT NULL, bytes INTEGER NOT NULL,
        sha256 TEXT, options TEXT NOT NULL, created_s REAL NOT NULL
    );
    CREATE TABLE adapters (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, job TEXT, base_model TEXT NOT NULL, rank INTEGER NOT NULL,
        bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, created_s REAL NOT NULL
    );
    CREATE TABLE activations (number INTEGER PRIMARY KEY AUTOINCREMENT, adapter TEXT, time_s REAL NOT NULL);
    CREATE TABLE tokens (
        id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, sha256 TEXT NOT NULL, created_s REAL NOT NULL,
        expires_s REAL, parent TEXT
    );
    """,
    """
    CREATE TABLE thumbs (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, prompt TEXT NOT NULL, answer TEXT NOT NULL,
        liked INTEGER NOT NULL, model TEXT NOT NULL, adapter TEXT, created_s REAL NOT NULL
    );
    CREATE TABLE conversions (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, adapter TEXT NOT NULL, form TEXT NOT NULL,
        model TEXT, dtype TEXT, state TEXT NOT NULL, stage TEXT NOT NULL DEFAULT '', error TEXT, report TEXT, file TEXT,
        bytes INTEGER, created_s REAL NOT NULL
    );
    """,
    """
    CREATE TABLE keys (key TEXT PRIMARY KEY, digest TEXT NOT NULL, job TEXT NOT NULL, created_s REAL NOT NULL);
    """,
    """
    CREATE TABLE clock (boot TEXT NOT NULL, uptime_s REAL NOT NULL, seconds REAL NOT NULL);
    CREATE TABLE ages (name TEXT PRIMARY KEY, since_s REAL NOT NULL);
    UPDATE jobs SET not_before_s = 0;
    UPDATE keys SET created_s = 0;
    DELETE FROM tokens WHERE kind = 'session';
    """,
)
"""One script per schema version; `PRAGMA user_version` counts those that have run. No statement
contains a `;`.

Since the fourth, `jobs.not_before_s`, `keys.created_s` and `tokens.expires_s` are in the store's
time (`clock`).
"""


def default_store() -> Path:
    """Return `$ONDEVICE_STORE`, systemd's state directory, or ~/.local/share/ondevice."""
    for name in ("ONDEVICE_STORE", "STATE_DIRECTORY"):
        if folders := os.environ.get(name):
            return expanded(folders.split(":")[0])
    base = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share")
    return expanded(base, hint="set HOME, or name a folder with --store") / "ondevice"


class MissingError(ConfigError):
    """The store has nothing with this name."""


def not_listed(after: str) -> MissingError:
    """Build the error for a page that begins after an id that the list does not have."""
    return MissingError(
        f"{after} is not in this list",
        expected="the last id of the page before",
        received=after,
        hint="it may have been deleted: begin without `after`",
    )


class Store:
    """A store's folder, created if necessary. Safe to share between threads: each has a connection.

    Raises:
        StorageError: the folder cannot be written, the database is damaged, or a newer version
            wrote it.
    """

    rewards: frozenset[str] = frozenset()
    """Functions and programs that a job may name as its reward or its score."""

    def __init__(self, root: str | Path) -> None:
        self.root = expanded(root).absolute()
        self._local = threading.local()
        self._connections: dict[threading.Thread, sqlite3.Connection] = {}
        self._connecting = threading.Lock()
        self.reserve = Reserve(self.root / RESERVE)
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self.reserve.given_up():  # SQLite makes files when it opens a database
                for name in FOLDERS:
                    (self.root / name).mkdir(exist_ok=True, mode=0o700)
                self._migrate()
                self.clock = StoreClock(self)
        except (OSError, sqlite3.Error) as error:
            hint = "choose another --store, or restore this one from a copy"
            if self.root.is_dir() and shutil.disk_usage(self.root).free < RESERVE_BYTES:
                hint = f"the disk is full: free {RESERVE_BYTES >> 20} MiB of it, and start again"
            raise StorageError(
                f"{self.root}: the store cannot be opened: {error}", hint=hint
            ) from None

    def discard(self, kind: str, name: str) -> None:
        """Delete the folder of a thing that the database no longer knows.

        It gets a hidden name first: after a kill the next start deletes it, and does not move it to
        `lost`.
        """
        folder = self.path(kind, name)
        hidden = folder.with_name(f".{name}.deleted")
        try:
            os.rename(folder, hidden)
        except OSError:
            hidden = folder
        shutil.rmtree(hidden, ignore_errors=True)

    def path(self, kind: str, name: str) -> Path:
        """Return the folder of a thing: `path("jobs", id)`.

        Raises:
            MissingError: `name` is invalid.
        """
        if kind not in FOLDERS or not ID.fullmatch(name) or ".." in name:
            raise MissingError(
                "no such name",
                expected="small letters, digits, '.', '_' and '-'",
                received=repr(name),
            )
        return self.root / kind / name

    @property
    def connection(self) -> sqlite3.Connection:
        """This thread's connection. A new connection closes those of threads that have ended."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            # isolation_level=None: `transaction` decides when a transaction begins, not sqlite3.
            connection = sqlite3.connect(
                self.root / "ondevice.db", timeout=30, isolation_level=None, check_same_thread=False
            )
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA foreign_keys=ON")
            self._local.connection = connection
            # Web frameworks start and end threads as they like: each would leave an open file
            # behind.
            with self._connecting:
                for thread in [thread for thread in self._connections if not thread.is_alive()]:
                    self._connections.pop(thread).close()
                self._connections[threading.current_thread()] = connection
        return connection

    @contextmanager
    def transaction(
        self, *, durable: bool = True, frees: bool = False
    ) -> Iterator[sqlite3.Connection]:
        """Run a block as a transaction, in which nobody else writes. A nested block joins the outer
        one.

        Args:
            frees: the block deletes something, and may use the reserve of a full disk.
            durable: the data is on the disk when the block ends. Otherwise a power cut may undo the
                last blocks (each completely); the next durable block makes them durable too.
        """
        connection = self.connection
        if connection.in_transaction:
            yield connection
            return
        if frees:
            with self.reserve.given_up(), self.transaction(durable=durable):
                yield connection
            return
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute(
            "BEGIN IMMEDIATE"
        )  # the write lock at once: taken at the first write, it could fail halfway
        try:
            yield connection
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._roll_back(connection)
            raise StorageError(
                f"{self.root}: the store cannot be written: {error}", hint="free some space"
            ) from None
        except BaseException:
            self._roll_back(connection)
            raise

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Return all rows of a SELECT."""
        return self.connection.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a SELECT; None without one."""
        return self.connection.execute(query, values).fetchone()

    def page(
        self,
        table: str,
        order: str,
        limit: int | None,
        after: str | None = None,
        *,
        where: str = "1",
        values: Sequence[Any] = (),
        columns: str = "*",
    ) -> tuple[list[sqlite3.Row], bool]:
        """Return a page of a list, and whether there are more. SQLite sorts; Python only gets the
        page.

        Args:
            table: with a column `id`.
            order: SQL expressions; the last differs from row to row.
            limit: rows of the page; None for all.
            after: id of the row before the page; None for the first page.
            where: an SQL condition with placeholders for `values`.

        Raises:
            ConfigError: `after` is not in the list.
        """
        behind = ""
        begin = []
        if after is not None:
            if self.row(f"SELECT 1 FROM {table} WHERE id = ? AND {where}", after, *values) is None:
                raise not_listed(after)
            behind = f"AND ({order}) > (SELECT {order} FROM {table} WHERE id = ?)"
            begin = [after]
        # The ids first, from an index if there is one: the rows' texts are only read for the page.
        chosen = f"SELECT rowid FROM {table} WHERE {where} {behind} ORDER BY {order} LIMIT ?"
        query = f"SELECT {columns} FROM {table} WHERE rowid IN ({chosen}) ORDER BY {order}"
        rows = self.rows(query, *values, *begin, -1 if limit is None else limit + 1)
        return rows[:limit], limit is not None and len(rows) > limit

    def add_events(self, job: str, events: Iterable[dict[str, Any]]) -> int:
        """Append events to a job's stream inside a transaction; return the newest id (from 1)."""
        last = self.last_event(job)
        for event in events:
            last += 1
            text = json.dumps(event, separators=(",", ":"), allow_nan=False)
            self.connection.execute(
                "INSERT INTO events VALUES (?, ?, ?, ?)", (job, last, event["event"], text)
            )
        return last

    def events(self, job: str, after: int = 0, limit: int = 500) -> list[tuple[int, str, str]]:
        """Read (id, kind, JSON) of a job's events with ids above `after`, in order."""
        query = "SELECT id, kind, data FROM events WHERE job = ? AND id > ? ORDER BY id LIMIT ?"
        return [tuple(row) for row in self.rows(query, job, after, limit)]

    def last_event(self, job: str) -> int:
        """Return the newest event's id; 0 before the first."""
        row = self.row("SELECT MAX(id) FROM events WHERE job = ?", job)
        return (row[0] if row else None) or 0

    def close(self) -> None:
        """Close every thread's connection."""
        with self._connecting:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
        self._local = threading.local()

    def _migrate(self) -> None:
        """Update the schema, completely or not at all; other processes wait."""
        folder = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # SQLite does not wait for a lock to change the journal's mode, and refuses the second
            # of two.
            fcntl.flock(folder, fcntl.LOCK_EX)
            # Readers do not wait for a writer. It is kept in the file.
            self.connection.execute("PRAGMA journal_mode=WAL")
        finally:
            os.close(folder)
        os.chmod(self.root / "ondevice.db", 0o600)
        if self._version() == len(MIGRATIONS):
            return
        with self.transaction() as db:
            version = self._version()
            if version > len(MIGRATIONS):
                raise StorageError(
                    f"{self.root}: a newer version of ondevice wrote this store",
                    expected=f"schema {len(MIGRATIONS)} or older",
                    received=f"schema {version}",
                    hint="update ondevice, or choose another --store",
                )
            # One statement at a time: `executescript` would commit the transaction first.
            for script in MIGRATIONS[version:]:
                for statement in script.split(";"):
                    db.execute(statement)
            db.execute(f"PRAGMA user_version={len(MIGRATIONS)}")

    def _version(self) -> int:
        return self.connection.execute("PRAGMA user_version").fetchone()[0]

    @staticmethod
    def _roll_back(connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def new_id(prefix: str) -> str:
    """Make an id that cannot be guessed."""
    return f"{prefix}-{secrets.token_hex(6)}"
