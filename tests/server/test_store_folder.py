"""The store's folder: one daemon, what a killed one left, names, connections, and a lost database."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ondevice.core.errors import (
    BusyError,
    StorageError,
)
from ondevice.server import clock
from ondevice.server.daemon import Daemon, sweep
from ondevice.server.store import MIGRATIONS, MissingError, Store
from tests.server.running import DaemonProcess


def test_one_daemon_a_store(tmp_path) -> None:
    first = Daemon(tmp_path / "store")
    with pytest.raises(BusyError):
        Daemon(tmp_path / "store")
    first.stop()
    Daemon(tmp_path / "store").stop()


def test_what_a_killed_daemon_left_is_swept_up(tmp_path) -> None:
    store = Store(tmp_path / "store")
    for kind in ("datasets", "adapters", "jobs"):
        (store.path(kind, "orphan") / "x").mkdir(parents=True)
    partial = store.path("adapters", "x").with_name(".x.partial-1")
    partial.mkdir()
    old = store.path("uploads", "up-old")
    old.mkdir()
    os.utime(old, (0, 0))
    store.close()
    with DaemonProcess(tmp_path / "store"):
        pass
    assert (
        not list((tmp_path / "store").glob("*/orphan"))
        and not old.exists()
        and not partial.exists()
    )


def test_without_its_database_a_store_loses_nothing(tmp_path, monkeypatch) -> None:
    store = Store(tmp_path / "store")
    store.connection.execute(
        "INSERT INTO datasets VALUES ('data-1', '', 'rows.jsonl', 1, '', '', 12, '[]', 0)"
    )
    for kind, name in (("datasets", "data-1"), ("adapters", "job-1"), ("jobs", "job-1")):
        store.path(kind, name).mkdir()
        (store.path(kind, name) / "content").write_text(name)
    sweep(store)
    assert (store.path("datasets", "data-1") / "content").is_file()
    store.close()
    for path in store.root.glob("ondevice.db*"):
        path.unlink()
    store = Store(tmp_path / "store")
    sweep(store)
    lost = store.root / "lost"
    for kind, name in (("datasets", "data-1"), ("adapters", "job-1"), ("jobs", "job-1")):
        assert (lost / kind / name / "content").read_text() == name and not store.path(
            kind, name
        ).exists()
    began_s = clock.uptime_s()
    monkeypatch.setattr(clock, "uptime_s", lambda: began_s + 29 * 24 * 3600)
    sweep(store)
    assert len(list(lost.glob("*/*"))) == 3
    monkeypatch.setattr(clock, "uptime_s", lambda: began_s + 31 * 24 * 3600)
    sweep(store)
    assert not list(lost.glob("*/*"))
    store.close()


def test_a_store_of_a_newer_version_is_left_alone(tmp_path) -> None:
    store = Store(tmp_path / "store")
    store.connection.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    store.close()
    with pytest.raises(StorageError) as newer:
        Store(tmp_path / "store")
    assert "newer version" in newer.value.message
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "ondevice.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with pytest.raises(StorageError):
        Store(tmp_path / "damaged")


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "/etc", "a\0", "A", "-x", "a..b", "x" * 65, ".hidden", "a\n"]
)
def test_names_of_a_store_are_no_paths(store: Store, name: str) -> None:
    with pytest.raises(MissingError):
        store.path("jobs", name)


def test_connections_of_threads_that_ended_are_closed(store: Store) -> None:
    def burst() -> int:
        """Thirty threads at once, as for requests; gives how many of its files are open after the next thread."""
        together = threading.Barrier(30)

        def ask() -> None:
            store.rows("SELECT 1")
            together.wait(120)
            store.rows("SELECT 1")

        for count in (30, 1):
            together = threading.Barrier(count)
            threads = [threading.Thread(target=ask) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        # The store's files alone: what earlier tests left open may be closed meanwhile.
        return sum(
            os.path.realpath(link).startswith(str(store.root))
            for link in Path("/proc/self/fd").iterdir()
        )

    first = burst()
    assert [burst() for _ in range(4)] == [first] * 4
    assert store.rows("SELECT 1")  # this thread's is open still
