"""The supervisor turn by turn, with workers that are shell scripts: what fails, what breaks a limit, what is asked."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import StorageError
from ondevice.server import supervisor as module
from ondevice.server import worker_process
from ondevice.server.daemon import HUNG_S, sweep
from ondevice.server.events import follow
from ondevice.server.helper import Helper
from ondevice.server.queue import Job, Queue
from ondevice.server.service import Cgroup
from ondevice.server.store import Store
from ondevice.server.supervisor import Supervisor
from tests.server.running import rows, wait_for

WAITS = "trap 'exit 130' TERM; touch ready; while :; do sleep 0.02; done"


class Turns:
    """A supervisor that goes round when it is told to."""

    def __init__(self, store: Store) -> None:
        self.store, self.now = store, time.time()
        self.queue = Queue(store, clock=lambda: self.now, elapsed=lambda: self.now)
        self.supervisor = Supervisor(store, self.queue, python=str(store.root / "worker"))
        self.supervisor.cgroup = Cgroup(own="")
        folder = store.path("datasets", "data-1")
        folder.mkdir()
        rows(folder / "rows.jsonl")
        store.connection.execute(
            "INSERT INTO datasets VALUES ('data-1', '', 'rows.jsonl', 1, '', '', 12, '[]', 0)"
        )

    def worker(self, script: str) -> None:
        """Say what workers do from now on; $3 is the job's folder."""
        path = Path(self.supervisor.python)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)

    def create(self, **spec: Any) -> str:
        return self.queue.create({"model": "tiny:llama", "dataset": "data-1"} | spec).id

    def wait_until_ready(self, job: str) -> None:
        """Wait for the worker's trap: a signal before it would end the worker in another way."""
        wait_for((self.store.path("jobs", job) / "ready").exists, "the worker's trap")

    def turn(self) -> None:
        """One turn; what it raises is tried again, as in the thread."""
        try:
            self.supervisor._tick()
        except StorageError:
            pass

    def until(self, condition: Callable[[Job], Any], job: str) -> Job:
        def holds() -> Job | None:
            self.turn()
            current = self.queue.get(job)
            return current if condition(current) else None

        return wait_for(holds, "turn by turn")


@pytest.fixture
def turns(store: Store) -> Iterator[Turns]:
    opened = Turns(store)
    yield opened
    if (running := opened.supervisor.running) is not None:
        running.kill()
        running.process.wait()


def failing(times: int, error: Exception, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises so many times before it does what it should."""
    left = [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return otherwise(*args, **kwargs)

    return call


def test_an_end_that_cannot_be_written_is_written_later(turns: Turns, monkeypatch) -> None:
    turns.worker("exit 130")
    job = turns.create()
    monkeypatch.setattr(turns.queue, "ended", failing(2, StorageError("full"), turns.queue.ended))
    current = turns.until(lambda current: current.state == "queued" and current.attempt == 1, job)
    assert current.ran_s > 0 and turns.supervisor.running is None
    turns.turn()
    assert turns.queue.get(job).attempt == 2  # the queue goes on


def test_an_end_that_was_written_is_not_written_twice(turns: Turns, monkeypatch) -> None:
    turns.worker("exit 130")
    job = turns.create()
    turns.queue.changed = lambda name: None
    turns.turn()
    turns.queue.changed = failing(1, StorageError("after the transaction"), lambda name: None)
    wait_for(lambda: (turns.turn(), turns.queue.get(job).state == "queued")[1], "it has ended")
    turns.turn()
    assert turns.supervisor.running is None and turns.queue.get(job).state == "queued"


def test_an_adapter_that_cannot_be_copied_is_tried_again(turns: Turns, monkeypatch) -> None:
    turns.worker("exit 0")
    job = turns.create()
    monkeypatch.setattr(
        module, "register_outcome", failing(1, OSError(5, "Input/output error"), lambda *_: print)
    )
    current = turns.until(lambda current: current.crashes == 1, job)
    assert current.state == "queued" and "Input/output error" in current.reason
    turns.now += 60
    assert turns.until(lambda current: current.state == "done", job).attempt == 2


@pytest.mark.parametrize(
    "error", [StorageError("no space left"), OSError(28, "No space left on device")]
)
def test_a_start_that_finds_no_room_is_tried_again(
    turns: Turns, monkeypatch, error: Exception
) -> None:
    turns.worker("exit 0")
    job = turns.create()
    monkeypatch.setattr(
        worker_process, "atomic_write", failing(1, error, worker_process.atomic_write)
    )
    turns.turn()
    current = turns.queue.get(job)
    assert (current.state, current.crashes) == ("queued", 1) and "o space left" in current.reason
    turns.now += 60
    assert turns.until(lambda current: current.state == "done", job).attempt == 2


def test_an_active_job_without_a_worker_has_crashed(turns: Turns) -> None:
    turns.worker("exit 0")
    job = turns.create()
    assert turns.queue.claim() is not None
    turns.turn()
    current = turns.queue.get(job)
    assert (current.state, current.crashes, current.reason) == (
        "queued",
        1,
        "the job has no worker",
    )


def test_what_is_asked_holds_where_events_cannot_be_read(turns: Turns, monkeypatch) -> None:
    turns.worker("trap '' TERM; touch ready; while :; do sleep 0.02; done")
    job = turns.create()
    turns.turn()
    turns.wait_until_ready(job)
    running = turns.supervisor.running
    assert running is not None
    monkeypatch.setattr(module, "follow", failing(10**6, StorageError("full"), follow))
    monkeypatch.setattr(module, "CANCEL_GRACE_S", 0.1)
    turns.queue.ask(job, "cancel")
    wait_for(lambda: (turns.turn(), running.process.poll() is not None)[1], "it is killed")
    monkeypatch.setattr(module, "follow", follow)
    assert turns.until(lambda actual: actual.state == "cancelled", job).error is None


def test_a_window_that_closes_stops_the_job_until_it_opens(turns: Turns) -> None:
    day = time.localtime(1_000_000_000)

    def at(hour: int) -> float:
        return time.mktime((day.tm_year, day.tm_mon, day.tm_mday, hour, 0, 0, 0, 0, -1))

    turns.worker(WAITS)
    turns.now = at(21)
    job = turns.create(window={"start": "22:00", "end": "23:00"})
    turns.turn()
    assert turns.queue.get(job).state == "queued"
    turns.now = at(22)
    turns.turn()
    turns.turn()
    assert turns.queue.get(job).state == "running"
    turns.wait_until_ready(job)
    turns.now = at(23)
    current = turns.until(lambda current: current.state == "queued", job)
    assert current.reason == "its window has closed" and current.crashes == 0
    turns.turn()
    assert turns.supervisor.running is None and turns.queue.get(job).attempt == 1


def test_a_job_over_its_memory_is_killed_and_fails(turns: Turns) -> None:
    turns.worker(
        f"exec {shlex.quote(sys.executable)} -c 'import time; held = bytearray(b\"x\") * (96 << 20); time.sleep(60)'"
    )
    job = turns.create(limits={"memory_bytes": 64 << 20})
    current = turns.until(lambda current: current.state == "failed", job)
    assert (
        current.error is not None
        and current.error["error"] == "DoesNotFitError"
        and current.attempt == 1
    )
    assert current.error["expected"] == "at most 64 MiB"


def test_a_job_that_ends_although_its_time_is_over_is_done(turns: Turns, monkeypatch) -> None:
    turns.worker("trap 'exit 0' TERM; touch ready; while :; do sleep 0.02; done")
    kept: list[str] = []
    monkeypatch.setattr(
        module, "register_outcome", lambda store, job, folder: lambda row: kept.append(row.id)
    )
    job = turns.create()
    turns.turn()
    turns.wait_until_ready(job)
    turns.queue.change(job, spec=turns.queue.get(job).spec | {"limits": {"time_s": 0.01}})
    current = turns.until(lambda current: current.state in ("done", "failed"), job)
    assert current.state == "done" and current.error is None and kept == [job]


def test_the_time_that_a_killed_daemon_saw_counts(turns: Turns) -> None:
    turns.worker(
        'mkdir -p run; echo \'{"event": "step", "step": 0}\' > run/events.jsonl; '
        'echo \'{"attempt": 1, "offset": 0}\' > attempt.json; ' + WAITS
    )
    job = turns.create()
    current = turns.until(lambda current: current.ran_s > 0, job)
    assert current.state == "running"
    assert turns.queue.recover()[0].ran_s == current.ran_s  # as the next daemon finds it


def fake_cgroup(tmp_path: Path) -> tuple[Cgroup, Path]:
    """The files that cgroup v2 has."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    (home / "cgroup.controllers").write_text("memory\n")
    (home / "cgroup.subtree_control").write_text("")
    return Cgroup(tmp_path, "0::/home\n"), home


def test_each_attempt_has_a_cgroup_and_a_changed_limit_reaches_it(turns: Turns, tmp_path) -> None:
    turns.supervisor.cgroup, home = fake_cgroup(tmp_path)
    turns.worker(WAITS)
    job = turns.create(limits={"memory_bytes": 1 << 30})
    turns.turn()
    group = home / f"{job}-1"
    assert (group / "memory.max").read_text() == str(1 << 30)
    for limits, text in (({"memory_bytes": 2 << 30}, str(2 << 30)), ({}, "max")):
        turns.queue.change(job, spec=turns.queue.get(job).spec | {"limits": limits})
        turns.turn()
        assert (group / "memory.max").read_text() == text
    (group / "memory.events").write_text(
        "oom_kill 1\n"
    )  # of the machine: there is no limit any more
    assert turns.supervisor.running is not None
    os.kill(turns.supervisor.running.process.pid, 9)
    current = turns.until(lambda current: current.state == "queued", job)
    assert current.crashes == 1 and group.is_dir()  # it could not be removed
    turns.queue.change(job, spec=current.spec | {"limits": {"memory_bytes": 1 << 30}})
    turns.now += 60
    turns.worker("exit 0")
    assert turns.until(lambda current: current.state in ("done", "failed"), job).state == "done"


def test_a_start_that_hashes_for_long_is_not_taken_for_hung(turns: Turns, monkeypatch) -> None:
    turns.worker("exit 0")
    turns.create()
    beats: list[float] = []

    def slow(*args: Any) -> Any:
        beats.append(turns.supervisor.beat - time.monotonic())
        raise StorageError("enough")

    monkeypatch.setattr(module, "resolve", slow)
    turns.turn()
    assert beats and beats[0] > 10 * HUNG_S


def test_a_deleted_job_that_a_kill_left_is_not_put_aside(turns: Turns, monkeypatch) -> None:
    job = turns.create()
    turns.store.path("jobs", job).mkdir()
    turns.queue.ask(job, "cancel")
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        module.remove_job(turns.store, turns.queue, job)
    sweep(turns.store)
    assert (
        not list((turns.store.root / "jobs").iterdir()) and not (turns.store.root / "lost").exists()
    )


def test_a_job_that_starts_has_the_memory_of_the_model_that_was_asked(turns: Turns) -> None:
    model = Helper("model")
    turns.supervisor.make_room = lambda: model.end_if_idle(0.0)
    process = model._started()
    model.end_if_idle()  # not idle for long enough
    assert process.poll() is None
    turns.worker(WAITS)
    turns.until(lambda job: job.state == "running", turns.create())
    assert process.wait(120) == -signal.SIGKILL and model._process is None
