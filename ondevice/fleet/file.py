"""The SQLite file of a fleet of any kind: how it is begun, opened and closed, its charter, and
values by name."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from ondevice.artifact.files import private
from ondevice.core.errors import BusyError, FleetError, StorageError

COMMON = """
CREATE TABLE charter (json BLOB NOT NULL);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class FleetFile:
    """A fleet's file; a context manager. A kind of fleet defines the name, the tables, their
    version and the charter's type, a `create` and an `open`."""

    file_name: ClassVar[str]
    schema: ClassVar[str]
    """Tables in addition to the common ones."""
    version: ClassVar[int]
    charter_type: ClassVar[Any]
    none_here: ClassVar[str]
    """The description of a folder without the file: 'no fleet'."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, charter: Any) -> None:
        self.folder = folder
        self.connection = connection
        self.charter = charter

    @classmethod
    def _create(cls, folder: Path, charter: Any, *first: tuple[str, tuple[Any, ...]]) -> Self:
        """Open the fleet of this charter in `folder`, or begin it with the statements `first`.

        Raises:
            FleetError: another fleet is there.
        """
        path = Path(folder) / cls.file_name
        try:
            with private():
                path.parent.mkdir(parents=True, exist_ok=True)
                connection = connect(path)
            with (
                connection
            ):  # one transaction: a fleet is complete or absent, whenever the process is killed
                connection.execute("BEGIN IMMEDIATE")
                if not connection.execute("PRAGMA user_version").fetchone()[0]:
                    for statement in filter(str.strip, (COMMON + cls.schema).split(";")):
                        connection.execute(statement)
                    connection.execute("INSERT INTO charter VALUES (?)", (charter.to_bytes(),))
                    for statement, values in first:
                        connection.execute(statement, values)
                    connection.execute(f"PRAGMA user_version = {cls.version}")
            connection.close()
        except (OSError, sqlite3.Error) as error:
            raise storage_error(path, error) from None
        store = cls.open(folder)
        if store.charter != charter:
            store.close()
            ours = charter.model_dump(mode="json")
            theirs = store.charter.model_dump(mode="json")
            names = sorted(name for name in ours if ours[name] != theirs[name])
            raise FleetError(
                f"{folder} holds another fleet: {', '.join(names)}",
                expected={name: theirs[name] for name in names},
                received={name: ours[name] for name in names},
                hint="choose another folder with --out, or repeat the settings that it was begun with",
            )
        return store

    @classmethod
    def open(cls, folder: Path, name: str | None = None) -> Self:
        """Open the fleet in `folder`.

        Raises:
            FleetError: the folder has none, or a newer version wrote it.
            StorageError: the file is damaged.
        """
        path = Path(folder) / (name or cls.file_name)
        if not path.is_file():
            raise FleetError(
                f"{folder} holds {cls.none_here}", expected=f"a folder with {cls.file_name}"
            )
        try:
            if name is None and path.stat().st_mode & 0o077:  # written by an older version
                with suppress(PermissionError):
                    path.chmod(0o600)
            connection = connect(path)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != cls.version:
                connection.close()
                raise FleetError(
                    f"{path} is of another version",
                    expected=f"version {cls.version}",
                    received=f"version {version}",
                )
            (head,) = connection.execute("SELECT json FROM charter").fetchone()
        except (sqlite3.Error, TypeError) as error:
            raise storage_error(path, error) from None
        return cls(Path(folder), connection, cls.charter_type.from_bytes(head))

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set_fact(self, name: str, value: str) -> None:
        """Store a value by name, such as a device's number."""
        with self.connection:
            self.connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def fact(self, name: str) -> str | None:
        """Return a stored value."""
        row = self.connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        if row is None:
            return None
        return row[0]

    def facts(self, prefix: str) -> list[tuple[str, str]]:
        """Return the values whose names begin with `prefix`, with their names."""
        query = "SELECT name, value FROM facts WHERE substr(name, 1, ?) = ?"
        return self.connection.execute(query, (len(prefix), prefix)).fetchall()

    def _table(self, of: str, order: str) -> list[dict[str, Any]]:
        rows = self.connection.execute(
            f"SELECT round, loss, answers, refused, bytes, time_s FROM {of} ORDER BY {order}"
        ).fetchall()
        names = ("round", "loss", "answers", "refused", "bytes", "time_s")
        return [dict(zip(names, row, strict=True)) for row in rows]


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that several threads and processes may share, each commit on the disk."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def storage_error(path: Path, error: Exception) -> Exception:
    """Return the error that says what a failure of the database means for a user."""
    if "locked" in str(error):
        return BusyError(f"{path}: another process is writing this fleet", hint="stop it first")
    return StorageError(
        f"{path}: the fleet's file cannot be used: {error}", hint="choose another folder with --out"
    )
