"""A full disk can be emptied through the API, and a daemon starts on it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import StorageError
from ondevice.server import reserve, security, thumbs
from ondevice.server.client import Client, RefusedError
from ondevice.server.queue import DELETED_AT_ONCE, Queue
from ondevice.server.reserve import RESERVE_BYTES, Reserve
from ondevice.server.store import Store
from ondevice.server.supervisor import SAVE_GRACE_S
from tests.server.running import DaemonProcess, refused, rows, settings, wait_for, workers

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of 64 MiB, or of as many as a test asks for."""
    size = getattr(request, "param", 64)
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Write until there is no byte left."""
    with open(disk / f"filler-{os.urandom(4).hex()}", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    assert shutil.disk_usage(disk).free == 0


def things(root: Path) -> None:
    """A store with one of everything that can be deleted, 1 MiB each, and a job of many events."""
    store = Store(root)
    queue = Queue(store)
    job = queue.create({"dataset": "data-1"}).id
    queue.ask(job, "cancel")
    event = {"event": "step", "text": "x" * 100}
    with store.transaction() as db:
        store.add_events(job, (event for _ in range(20_000)))
        db.execute("UPDATE jobs SET id = 'job-1'")
        db.execute("UPDATE events SET job = 'job-1'")
        db.execute(
            "INSERT INTO datasets VALUES ('data-1', 'a', 'rows.txt', 1, '', 'text', 1, '[]', 1.0)"
        )
        db.execute("INSERT INTO adapters VALUES ('adapter-1', 'a', NULL, 'm', 1, 1, '', 1.0)")
        values = ("up-1", "dataset", "a.txt", "content", 9, None, "{}", 1.0)
        db.execute("INSERT INTO uploads VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        query = "INSERT INTO conversions (id, adapter, form, state, file, created_s) VALUES (?, 'a', 'f', ?, 'x', 9e9)"
        db.execute(query, ("exit-1", "done"))
    thumbs.judge(store, "q", "a", True, "m", None)
    for folder, file in (("jobs/job-1", "worker.log"), ("datasets/data-1", "rows.txt"), ("adapters/adapter-1", "w"),
                         ("uploads/up-1", "content"), ("exits/exit-1", "x"), ("models/m", "config.json"),
                         ("artifacts/a", "manifest.json")):  # fmt: skip
        (root / folder).mkdir()
        (root / folder / file).write_bytes(b"{}" + bytes(MIB))
    store.close()


def paths(client: Client) -> list[str]:
    thumb = client.ask("GET", "/v1/thumbs")[0]["id"]
    return [
        f"thumbs/{thumb}", "jobs/job-1", "datasets/data-1", "adapters/adapter-1", "uploads/up-1", "conversions/exit-1",
        "models/m", "artifacts/a",
    ]  # fmt: skip


def test_everything_can_be_deleted_on_a_full_disk_also_after_a_start_on_it(disk: Path) -> None:
    things(disk / "store")
    daemon = DaemonProcess(disk / "store").start()
    daemon.errors = disk.parent / "stderr"
    fill(disk)
    with refused(507):
        for number in range(300):  # its log has some room
            thumb = {"prompt": f"{number}" * 20_000, "answer": "b", "liked": True, "model": "m"}
            daemon.client.ask("POST", "/v1/thumbs", thumb)
    daemon.kill()
    fill(disk)
    with daemon:
        client = daemon.client
        assert client.ask("GET", "/v1/health")["status"] == "ok"
        for path in paths(client):
            fill(disk)
            assert client.ask("DELETE", f"/v1/{path}") == {"ok": True}
            with pytest.raises(RefusedError):
                client.ask("DELETE", f"/v1/{path}")
        left = [path for path in (disk / "store").glob("*/*") if path.parent.name != "logs"]
        assert left == [], "what was deleted has left the disk"
        for filler in disk.glob("filler-*"):
            filler.unlink()
    store = Store(disk / "store")
    assert store.rows("SELECT 1 FROM events") == []
    assert (disk / "store" / reserve.NAME).stat().st_size == RESERVE_BYTES
    store.close()


@pytest.mark.parametrize("disk", [300], indirect=True)
def test_a_daemon_stops_on_a_full_disk_and_its_job_goes_on_after_the_next_start(
    disk: Path, warm: Any
) -> None:
    with DaemonProcess(disk / "store", python=warm.python) as daemon:
        daemon.errors = disk.parent / "stderr"
        client = daemon.client
        dataset = client.upload("dataset", rows(disk / "rows.jsonl"))["id"]
        spec = {"model": "tiny:llama", "dataset": dataset, "config": settings(steps=1_000_000)}
        job = client.create_job(**spec)["id"]
        wait_for(lambda: client.job(job)["progress"].get("step", 0) > 3, "a step")
        fill(disk)
        assert daemon.process is not None
        daemon.process.terminate()
        daemon.process.wait(SAVE_GRACE_S / 2)
    assert not workers(disk / "store")
    for filler in disk.glob("filler-*"):
        filler.unlink()
    with DaemonProcess(disk / "store", python=warm.python) as daemon:
        client = daemon.client
        wait_for(lambda: client.job(job)["attempt"] == 2, "the next attempt")
        reasons = [event.get("reason") for event in client.events(job, follow=False)]
        assert "the daemon was restarted" in reasons
        client.cancel(job)


def test_a_store_without_a_reserve_says_what_to_free(disk: Path) -> None:
    Store(disk / "store").close()
    (disk / "store" / reserve.NAME).unlink()
    fill(disk)
    with pytest.raises(StorageError) as caught:
        Store(disk / "store")
    assert caught.value.hint == "the disk is full: free 8 MiB of it, and start again"


def test_the_reserve_takes_what_there_is_and_the_rest_later(disk: Path) -> None:
    kept = Reserve(disk / "reserve")
    kept.fill()
    assert shutil.disk_usage(disk).free == 56 * MIB, "it is room, not a promise"
    with kept.given_up(), kept.given_up():
        assert shutil.disk_usage(disk).free == 64 * MIB
        (disk / "a").write_bytes(bytes(61 * MIB))
    assert kept.path.stat().st_size == 3 * MIB
    (disk / "a").unlink()
    kept.fill()
    assert kept.path.stat().st_size == RESERVE_BYTES


def test_a_reserve_is_kept_while_one_of_two_deletes_goes_on(tmp_path: Path) -> None:
    kept = Reserve(tmp_path / "reserve", 1 * MIB)
    kept.fill()
    with kept.given_up():
        with kept.given_up():
            pass
        kept.fill()
        assert not kept.path.exists()
    assert kept.path.stat().st_size == MIB


def test_events_of_a_job_are_deleted_in_parts_and_a_kill_between_leaves_none(
    store: Store, monkeypatch
) -> None:
    queue = Queue(store)
    job, other = queue.create({}).id, queue.create({}).id
    queue.ask(job, "cancel")
    with store.transaction():
        store.add_events(
            job, ({"event": "step", "text": json.dumps(n)} for n in range(3 * DELETED_AT_ONCE))
        )
    kept = store.last_event(other)
    parts = []
    with monkeypatch.context() as patch:
        whole = store.transaction

        def dies_after_two(**options):
            if options.get("frees"):
                parts.append(options)
                if len(parts) > 2:
                    raise KeyboardInterrupt
            return whole(**options)

        patch.setattr(store, "transaction", dies_after_two)
        with pytest.raises(KeyboardInterrupt):
            queue.delete(job)
    rest = store.row("SELECT COUNT(*) FROM events WHERE job = ?", job)
    assert rest is not None and DELETED_AT_ONCE <= rest[0] < 2 * DELETED_AT_ONCE
    queue.delete_lost_events()
    assert store.last_event(job) == 0 and store.last_event(other) == kept


def test_a_token_is_revoked_and_a_session_ends_on_a_full_disk(disk: Path) -> None:
    store = Store(disk / "store")
    secret, other = security.create_token(store), security.create_token(store)
    token = security.check(store, secret)
    session = "".join(security.create_session(store, str(security.check(store, other))))
    assert token is not None and security.check(store, session, "session")
    fill(disk)
    with pytest.raises(StorageError):
        while True:  # the database's log has some room
            thumbs.judge(store, "q" * 20_000, "a", True, "m", None)
    security.revoke(store, token)
    security.end_session(store, session)
    assert security.check(store, secret) is None
    assert security.check(store, session, "session") is None
    store.close()
