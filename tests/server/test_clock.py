"""A wall clock that jumps by decades deletes nothing and makes nothing wait: the store has its own time."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.server import clock, security, uploads
from ondevice.server.conversions import Conversions
from ondevice.server.daemon import sweep
from ondevice.server.queue import Queue
from ondevice.server.store import Store

YEAR_S = 365 * 24 * 3600.0
JUMPS = (-56 * YEAR_S, 12 * YEAR_S)
"""To 1970, where a board without a battery starts, and to 2038."""
WALL_CLOCK = {
    "adapters.py": 2,
    "conversions.py": 1,
    "metrics.py": 1,
    "openai_answers.py": 1,
    "placing.py": 1,
    "security.py": 1,
    "thumbs.py": 1,
    "uploads.py": 1,
}
"""Calls of `time.time` by file. Each labels a thing for people (`created_s`, `time_s`), and decides nothing."""


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Any:
    real = time.time

    def by(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return by


def test_only_labels_read_the_wall_clock(root: Path) -> None:
    calls = {}
    for path in (root / "ondevice" / "server").rglob("*.py"):
        if count := len(
            re.findall(
                r"\btime\.time\(\)|datetime\.now|datetime\.utcnow|st_mtime\b", path.read_text()
            )
        ):
            calls[path.name] = count
    assert calls == WALL_CLOCK


@pytest.mark.parametrize("wrong_s", JUMPS)
def test_a_job_that_failed_under_a_wrong_clock_is_tried_again_in_seconds(
    store: Store, jump, wrong_s: float
) -> None:
    queue = Queue(store)
    job = queue.create({"limits": {"retries": 5}}).id
    jump(wrong_s)
    assert queue.claim() is not None
    ended = queue.ended(job, "crashed")
    assert 0 < queue.waits_s(ended) <= 1.0
    jump(0.0)
    assert 0 < queue.waits_s(queue.get(job)) <= 1.0
    store.connection.execute(
        "UPDATE jobs SET not_before_s = not_before_s - 1.0"
    )  # the second has passed
    assert queue.claim() is not None


@pytest.mark.parametrize("wrong_s", JUMPS)
def test_a_session_of_a_wrong_clock_lasts_its_hours(
    store: Store, jump, monkeypatch, wrong_s: float
) -> None:
    jump(wrong_s)
    token = security.create_token(store)
    session = "".join(security.create_session(store, str(security.check(store, token))))
    jump(0.0)
    assert security.check(store, session, "session")
    began_s = clock.uptime_s()
    monkeypatch.setattr(clock, "uptime_s", lambda: began_s + security.SESSION_S + 1)
    assert security.check(store, session, "session") is None


@pytest.mark.parametrize("wrong_s", JUMPS)
def test_a_jump_deletes_no_upload_no_conversion_and_no_lost_folder(
    store: Store, jump, wrong_s: float
) -> None:
    jump(wrong_s)
    upload = uploads.create(
        store, uploads.UploadRequest(kind="dataset", name="rows.jsonl", bytes=2)
    )["id"]
    store.connection.execute(
        "INSERT INTO conversions (id, adapter, form, state, created_s) VALUES ('exit-1', 'a', 'peft', 'done', ?)",
        (time.time(),),
    )
    store.path("exits", "exit-1").mkdir()
    store.path("jobs", "job-1").mkdir()
    sweep(store)
    for seconds in (0.0, -wrong_s):
        jump(seconds)
        sweep(store)
        Conversions(store, lambda: None).tidy()
        assert uploads.get(store, upload)["received_bytes"] == 0
        assert (
            store.path("exits", "exit-1").is_dir()
            and (store.root / "lost" / "jobs" / "job-1").is_dir()
        )


def test_an_upload_lives_for_a_day_from_its_last_part(store: Store, monkeypatch) -> None:
    upload = uploads.create(
        store, uploads.UploadRequest(kind="dataset", name="rows.jsonl", bytes=9)
    )["id"]
    began_s, hour_s = clock.uptime_s(), 3600.0
    monkeypatch.setattr(clock, "uptime_s", lambda: began_s + 23 * hour_s)
    uploads.write(store, upload, 0, b"123")
    monkeypatch.setattr(clock, "uptime_s", lambda: began_s + 46 * hour_s)
    uploads.expire(store)
    assert uploads.get(store, upload)["received_bytes"] == 3
    monkeypatch.setattr(clock, "uptime_s", lambda: began_s + 48 * hour_s)
    uploads.expire(store)
    assert store.rows("SELECT * FROM uploads") == [] and not store.path("uploads", upload).exists()


def test_the_time_goes_on_across_restarts_and_reboots(tmp_path, monkeypatch) -> None:
    boot, uptime_s = "first", [1000.0]
    monkeypatch.setattr(clock, "boot_id", lambda: boot)
    monkeypatch.setattr(clock, "uptime_s", lambda: uptime_s[0])
    store = Store(tmp_path / "store")
    assert store.clock.now() == 0
    uptime_s[0] += 50
    store.clock.keep(at_once=True)
    store.close()
    uptime_s[0] += 7  # no daemon runs, and the machine is on
    store = Store(tmp_path / "store")
    assert store.clock.now() == 57
    store.clock.keep(at_once=True)
    store.close()
    boot, uptime_s[0] = "second", 3.0
    store = Store(tmp_path / "store")
    assert store.clock.now() == 57
    uptime_s[0] += 5
    assert store.clock.now() == 62
    store.close()
