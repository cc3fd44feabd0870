"""The store's database: first starts at the same moment, and upgrades that are whole or absent."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import StorageError
from ondevice.server import store as module
from ondevice.server.store import MIGRATIONS, Store

STARTS, TIMES = 4, 25


def open_together(root: Path, count: int = STARTS) -> list[str]:
    """Open a store from several threads at one moment; return what went wrong."""
    problems: list[str] = []
    moment = threading.Barrier(count)

    def start() -> None:
        moment.wait()
        try:
            Store(root).close()
        except StorageError as error:
            problems.append(error.message)

    threads = [threading.Thread(target=start) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def test_first_starts_at_one_moment_all_succeed(tmp_path) -> None:
    problems = [text for number in range(TIMES) for text in open_together(tmp_path / str(number))]
    assert problems == []


def first_version(root: Path) -> Path:
    """A store as the first version of the schema left it."""
    root.mkdir()
    with sqlite3.connect(root / "ondevice.db") as db:
        db.executescript(f"{MIGRATIONS[0]}; PRAGMA user_version=1")
    return root


def test_upgrades_at_one_moment_all_succeed(tmp_path) -> None:
    problems = [
        text for number in range(5) for text in open_together(first_version(tmp_path / str(number)))
    ]
    assert problems == []


def test_an_upgrade_that_fails_leaves_the_old_schema(tmp_path, monkeypatch) -> None:
    root = first_version(tmp_path / "store")
    broken = (*MIGRATIONS[:2], "CREATE TABLE half (id TEXT); CREATE TABLE jobs (id TEXT)")
    monkeypatch.setattr(module, "MIGRATIONS", broken)
    with pytest.raises(StorageError):
        Store(root)
    with sqlite3.connect(root / "ondevice.db") as db:
        tables = {
            row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        assert db.execute("PRAGMA user_version").fetchone()[0] == 1
    assert "jobs" in tables and not tables & {"half", "thumbs"}
