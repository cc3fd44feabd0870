"""The queue as a state machine: whatever is asked in whatever order, it is what a simple model says."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from ondevice.core.errors import BusyError
from ondevice.server.queue import ACTIVE, ENDED, Job, Queue, in_window
from ondevice.server.routes.jobs import _answer
from ondevice.server.store import MissingError, Store
from tests.sampling import part_of

SPEC: dict[str, Any] = {
    "name": "",
    "dataset": "data-1",
    "model": "tiny:llama",
    "limits": {"retries": 2},
}


class QueueMachine(RuleBasedStateMachine):
    """Against a dictionary of states, written from the issue's words and not from the queue's tables."""

    jobs: Bundle[str] = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now = 1_000_000.0
        self._open()
        self.state: dict[str, str] = {}
        self.priority: dict[str, int] = {}
        self.order: list[str] = []
        self.crashes: dict[str, int] = {}
        self.ready_at: dict[str, float] = {}
        self.said: dict[str, list[str]] = {}

    def _open(self) -> None:
        self.store = Store(self.folder / "store")
        self.queue = Queue(self.store, clock=lambda: self.now, elapsed=lambda: self.now)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def _set(self, job: str, state: str) -> None:
        if self.state.get(job) != state:
            self.state[job] = state
            self.said[job].append(state)

    @rule(target=jobs, priority=st.integers(-2, 2))
    def create(self, priority: int) -> str:
        job = self.queue.create(SPEC, priority).id
        self.said[job], self.priority[job], self.crashes[job], self.ready_at[job] = (
            [],
            priority,
            0,
            0.0,
        )
        self.order.append(job)
        self._set(job, "queued")
        return job

    @rule()
    def claim(self) -> None:
        ready = [
            j for j in self.order if self.state[j] == "queued" and self.ready_at[j] <= self.now
        ]
        free = not any(state in ACTIVE for state in self.state.values())
        expected = (
            max(ready, key=lambda j: (self.priority[j], -self.order.index(j)))
            if ready and free
            else None
        )
        claimed = self.queue.claim()
        assert (claimed.id if claimed else None) == expected
        if expected:
            self._set(expected, "running")

    @rule(job=jobs)
    def pause(self, job: str) -> None:
        self._ask(
            job,
            "pause",
            {"queued": "paused", "running": "pausing", "pausing": "pausing", "paused": "paused"},
        )

    @rule(job=jobs)
    def resume(self, job: str) -> None:
        known = {"paused": "queued", "failed": "queued", "queued": "queued", "running": "running"}
        self._ask(job, "resume", known)

    @rule(job=jobs)
    def cancel(self, job: str) -> None:
        active = dict.fromkeys(("running", "pausing", "cancelling"), "cancelling")
        self._ask(
            job,
            "cancel",
            active | dict.fromkeys(("queued", "paused", "failed", "cancelled"), "cancelled"),
        )

    def _ask(self, job: str, verb: Any, allowed: dict[str, str]) -> None:
        before = self.state[job]
        if before not in allowed:
            with pytest.raises(BusyError):
                self.queue.ask(job, verb)
            return
        assert self.queue.ask(job, verb).state == allowed[before]
        if allowed[before] != before:
            self.crashes[job], self.ready_at[job] = 0, 0.0
            self._set(job, allowed[before])

    @rule(
        outcome=st.sampled_from(["finished", "interrupted", "crashed", "refused"]),
        ran_s=st.floats(0, 100),
    )
    def worker_ends(self, outcome: Any, ran_s: float) -> None:
        active = [job for job, state in self.state.items() if state in ACTIVE]
        if not active:
            return
        (job,) = active
        current = self.queue.ended(
            job, outcome, ran_s=ran_s, error={"error": "X", "message": "why"}
        )
        if self.state[job] == "cancelling":
            state = "cancelled"
        elif outcome == "finished":
            state = "done"
        elif outcome == "refused":
            state = "failed"
        elif self.state[job] == "pausing":
            state = "paused"
        else:
            state = "queued"
        self.ready_at[job] = 0.0
        if outcome == "crashed":
            self.crashes[job] += 1
            if state == "queued" and self.crashes[job] > 2:
                state = "failed"
            elif state == "queued":
                self.ready_at[job] = self.now + 2 ** (self.crashes[job] - 1)
        assert current.state == state
        self._set(job, state)

    @rule(job=jobs, priority=st.integers(-2, 2))
    def prioritise(self, job: str, priority: int) -> None:
        if self.state[job] in ("cancelled", "done"):
            with pytest.raises(BusyError):
                self.queue.change(job, priority=priority)
        else:
            assert self.queue.change(job, priority=priority).priority == priority
            self.priority[job] = priority

    @rule(target=jobs, job=consumes(jobs))
    def delete(self, job: str) -> Any:
        if self.state[job] not in ENDED:
            with pytest.raises(BusyError):
                self.queue.delete(job)
            return job
        self.queue.delete(job)
        for kept in (self.state, self.priority, self.crashes, self.ready_at, self.said):
            del kept[job]
        self.order.remove(job)
        with pytest.raises(MissingError):
            self.queue.get(job)
        return multiple()

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(copied=st.booleans())
    def daemon_dies_and_starts(self, copied: bool) -> None:
        """As after kill -9; or in a copy of the folder, as after a power cut."""
        if copied:
            target = self.folder / "copy"
            shutil.copytree(
                self.folder / "store", target
            )  # the connection is open: the WAL is part of it
            self.store.close()
            shutil.rmtree(self.folder / "store")
            target.rename(self.folder / "store")
        self._open()
        for job in self.queue.recover():
            was = self.state[job.id]
            self._set(
                job.id, {"running": "queued", "pausing": "paused", "cancelling": "cancelled"}[was]
            )
            self.ready_at[job.id] = 0.0

    @invariant()
    def is_what_the_model_says(self) -> None:
        by_name = {job.id: job for job in self.queue.list()}
        assert {name: job.state for name, job in by_name.items()} == self.state
        assert sum(state in ACTIVE for state in self.state.values()) <= 1
        for name, job in by_name.items():
            events = self.store.events(name, 0, 10_000)
            assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
            assert [json.loads(data)["state"] for _, _, data in events] == self.said[name]
            assert (job.ended_s is not None) == (job.state in ENDED)
            assert job.priority == self.priority[name]


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=part_of(25),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_checkpoint_between_two_crashes_begins_the_count_again(store: Store) -> None:
    queue = Queue(store, clock=lambda: 1e9, elapsed=lambda: 1e9)
    job = queue.create(SPEC)
    for step in range(1, 8):
        store.connection.execute("UPDATE jobs SET not_before_s = 0 WHERE id = ?", (job.id,))
        assert queue.claim() is not None
        progress = json.dumps({"checkpoint_step": step})
        store.connection.execute("UPDATE jobs SET progress = ? WHERE id = ?", (progress, job.id))
        ended = queue.ended(job.id, "crashed")
        assert (ended.state, ended.crashes, ended.not_before_s) == ("queued", 1, 1e9 + 1)
    for crashes, state in ((2, "queued"), (3, "failed")):
        store.connection.execute("UPDATE jobs SET not_before_s = 0 WHERE id = ?", (job.id,))
        assert queue.claim() is not None
        ended = queue.ended(job.id, "crashed", error={"message": "why"})
        assert (ended.state, ended.crashes, ended.error) == (state, crashes, {"message": "why"})


@pytest.mark.parametrize(
    ("start", "end", "inside", "outside"),
    [
        ("22:00", "06:00", ("22:00", "23:59", "00:00", "05:59"), ("06:00", "12:00", "21:59")),
        ("01:30", "02:00", ("01:30", "01:59"), ("01:29", "02:00", "13:45")),
    ],
)
def test_windows_of_the_night(start: str, end: str, inside: Any, outside: Any) -> None:
    spec = {"window": {"start": start, "end": end}}

    def at(clock: str) -> float:
        day = time.localtime(1_000_000_000)
        return time.mktime(
            (day.tm_year, day.tm_mon, day.tm_mday, int(clock[:2]), int(clock[3:]), 30, 0, 0, -1)
        )

    assert all(in_window(spec, at(clock)) for clock in inside)
    assert not any(in_window(spec, at(clock)) for clock in outside)
    assert in_window({"window": None}, at("12:00")) and in_window({}, at("12:00"))


def test_a_job_outside_its_window_waits_and_lets_others_pass(store: Store) -> None:
    local = time.localtime(1_000_000_000)
    minute = 60 * local.tm_hour + local.tm_min
    clock = (
        "{:02d}:{:02d}".format(*divmod((minute + 60) % 1440, 60)),
        "{:02d}:{:02d}".format(*divmod((minute + 120) % 1440, 60)),
    )
    now = [1_000_000_000.0]
    queue = Queue(store, clock=lambda: now[0])
    night = queue.create(SPEC | {"window": {"start": clock[0], "end": clock[1]}}, priority=5)
    day = queue.create(SPEC)
    claimed = queue.claim()
    assert isinstance(claimed, Job) and claimed.id == day.id
    queue.ended(day.id, "finished")
    assert queue.claim() is None
    now[0] += 3600 + 60
    claimed = queue.claim()
    assert claimed is not None and claimed.id == night.id


def test_the_newest_event_is_of_the_row_that_was_read(store: Store) -> None:
    """Who has the row and then reads the events behind it would miss what came between two readings."""
    queue = Queue(store)
    row = queue.create(SPEC | {"config": {}})
    assert queue.claim() is not None
    assert (row.last_event, queue.get(row.id).last_event, queue.list()[0].last_event) == (1, 2, 2)
    answer = _answer(SimpleNamespace(store=store, queue=queue), row)  # type: ignore[arg-type]
    assert (answer.state, answer.last_event) == ("queued", 1)
