"""The queue's state machine. It uses only the store: no process, no own clock, no file.

    queued -> running -> done
       |  ^      |  \\-> failed -> queued (resume)
       |  |      |-> pausing -> paused -> queued (resume)
       v  +------+   (window closed, daemon stopped, crash: the job goes on from its last checkpoint)
    cancelled <- cancelling <- running, pausing

A transition is one transaction, which also writes a `job` event to the job's stream.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ondevice.core.errors import BusyError, ConfigError
from ondevice.server.store import MissingError, Store, new_id

State = Literal[
    "queued", "running", "pausing", "paused", "cancelling", "cancelled", "failed", "done"
]
Outcome = Literal["finished", "interrupted", "crashed", "refused"]
"""How a worker ended: all steps done; stopped with its state saved; died; failed for good."""

ENDED = ("cancelled", "failed", "done")
ACTIVE = ("running", "pausing", "cancelling")
ASKED: dict[str, dict[str, State]] = {
    "pause": {"queued": "paused", "running": "pausing", "pausing": "pausing", "paused": "paused"},
    "resume": {"paused": "queued", "failed": "queued", "queued": "queued", "running": "running"},
    "cancel": {
        "queued": "cancelled",
        "paused": "cancelled",
        "failed": "cancelled",
        "running": "cancelling",
        "pausing": "cancelling",
        "cancelling": "cancelling",
        "cancelled": "cancelled",
    },
}
AFTER: dict[Outcome, dict[str, State]] = {
    "finished": {"running": "done", "pausing": "done", "cancelling": "cancelled"},
    "interrupted": {"running": "queued", "pausing": "paused", "cancelling": "cancelled"},
    "crashed": {"running": "queued", "pausing": "paused", "cancelling": "cancelled"},
    "refused": {"running": "failed", "pausing": "failed", "cancelling": "cancelled"},
}
_COLUMNS = "jobs.*, COALESCE((SELECT MAX(id) FROM events WHERE job = jobs.id), 0) AS last_event"
_JOBS = f"SELECT {_COLUMNS} FROM jobs"
_ORDER = (
    "state IN ('cancelled', 'failed', 'done'), state NOT IN ('running', 'pausing', 'cancelling'), "
    "CASE WHEN state IN ('cancelled', 'failed', 'done') THEN -number ELSE -priority END, number"
)
"""Running and waiting jobs first, in the order they will run; then the newest."""
RETRIES = 3
KEY_S = 24 * 3600.0
"""Seconds for which a request's key is remembered."""
LONGEST_PAUSE_S = 300.0
DELETED_AT_ONCE = 2000
"""Events that are deleted in one transaction."""


@dataclass(frozen=True)
class Job:
    """One row of the queue.

    Attributes:
        spec: the request (`jobs.JobSpec`), as JSON values.
        progress: the newest figures of the run, from its events.
        reason: the reason of its state, for people.
        error: of a failed job, as `--json` prints it.
        ran_s: total seconds that its workers have run.
        not_before_s: it does not start before this time of the store's clock.
        crashes: in a row, without a new checkpoint between them.
        attempt: how many workers were started.
        followed, offset: the attempt whose events were read, and up to which byte of the run's log.
        last_event: id of the newest event of its stream, read with the row: a reader that goes on
            after it misses nothing.
    """

    number: int
    id: str
    state: State
    priority: int
    spec: dict[str, Any] = field(repr=False)
    progress: dict[str, Any] = field(repr=False)
    reason: str
    error: dict[str, Any] | None
    created_s: float
    started_s: float | None
    ended_s: float | None
    ran_s: float
    not_before_s: float
    crashes: int
    crashed_at_step: int
    attempt: int
    followed: int
    offset: int
    last_event: int

    @classmethod
    def of(cls, row: sqlite3.Row) -> Job:
        """Build a job from its row."""
        values = dict(row)
        for name in ("spec", "progress", "error"):
            values[name] = json.loads(values[name]) if values[name] else None
        return cls(**values)


class Queue:
    """All transitions of all jobs.

    Args:
        changed: called after the transaction with each job that has a new event.
        clock: seconds since the epoch, for labels and daily windows.
        elapsed: seconds of the store's clock, for waiting jobs and remembered keys.
    """

    def __init__(
        self,
        store: Store,
        changed: Callable[[str], None] = lambda job: None,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        self.store = store
        self.changed = changed
        self.clock = clock
        self.elapsed = elapsed or store.clock.now

    def create(
        self, spec: dict[str, Any], priority: int = 0, key: tuple[str, str] | None = None
    ) -> Job:
        """Create a job, last among the jobs of its priority.

        Args:
            key: a request's key and the hash of its job; a key that has made a job returns that
                job.

        Raises:
            ConfigError: the key has made another job.
        """
        name = new_id("job")
        now = self.clock()
        with self.store.transaction() as db:
            if key is not None:
                if (made := self.made(*key)) is not None:
                    return made
                elapsed = self.elapsed()
                db.execute(
                    "DELETE FROM keys WHERE created_s < ? OR key = ?", (elapsed - KEY_S, key[0])
                )
                db.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", (*key, name, elapsed))
            db.execute(
                "INSERT INTO jobs (id, state, priority, spec, created_s) VALUES (?, 'queued', ?, ?, ?)",
                (name, priority, json.dumps(spec), now),
            )
            self._say(name, "queued", "created", now)
        self.changed(name)
        return self.get(name)

    def made(self, key: str, digest: str) -> Job | None:
        """Return the job that a request with this key has made; None if it does not exist (any
        more).

        Raises:
            ConfigError: the key has made another job.
        """
        row = self.store.row("SELECT * FROM keys WHERE key = ?", key)
        job = None
        if row is not None:
            job = self.store.row(f"{_JOBS} WHERE id = ?", row["job"])
        if row is None or job is None:
            return None
        if row["digest"] != digest:
            raise ConfigError("the Idempotency-Key was used for another job", expected="a new key for each job",
                              received=key, hint=f"it made {row['job']}")  # fmt: skip
        return Job.of(job)

    def get(self, job: str) -> Job:
        """Return one job.

        Raises:
            MissingError: the id is unknown.
        """
        row = self.store.row(f"{_JOBS} WHERE id = ?", job)
        if row is None:
            raise MissingError(f"no such job: {job}", hint="GET /v1/jobs lists them")
        return Job.of(row)

    def list(self, *states: str) -> list[Job]:
        """Return all jobs, or those in `states`, in the order of `page` (for long lists)."""
        return self.page(states, limit=None)[0]

    def page(
        self, states: Sequence[str], limit: int | None, after: str | None = None
    ) -> tuple[list[Job], bool]:
        """Return up to `limit` jobs after `after`, of all or of those in `states`, and whether
        there are more.

        Running and waiting jobs come first, in the order they will run; then the newest.

        Raises:
            ConfigError: `after` is not in this list.
        """
        where = "1"
        if states:
            where = f"state IN ({','.join('?' * len(states))})"
        rows, more = self.store.page(
            "jobs", _ORDER, limit, after, where=where, values=states, columns=_COLUMNS
        )
        return [Job.of(row) for row in rows], more

    def counts(self) -> dict[str, int]:
        """Count the jobs in each state."""
        counts: dict[str, int] = dict.fromkeys(
            ("queued", "running", "pausing", "paused", "cancelling", *ENDED), 0
        )
        return counts | dict(self.store.rows("SELECT state, COUNT(*) FROM jobs GROUP BY state"))  # type: ignore[arg-type]

    def needing(self, kind: str, name: str) -> str | None:
        """Return the id of an unfinished job that uses a thing: `needing("dataset", "data-1")`."""
        row = self.store.row(
            "SELECT id FROM jobs WHERE state NOT IN ('cancelled', 'failed', 'done') "
            "AND json_extract(spec, ?) = ? ORDER BY number LIMIT 1",
            f"$.{kind}", name,
        )  # fmt: skip
        if row:
            return row["id"]
        return None

    def next(self) -> Job | None:
        """Choose the job to run now, if any may start: the highest priority, then the oldest."""
        now = self.clock()
        elapsed = self.elapsed()
        if self.store.row("SELECT 1 FROM jobs WHERE state IN (?, ?, ?)", *ACTIVE):
            return None
        # Only the windows are read until a job may start: a thousand jobs may wait for the night.
        waiting = self.store.connection.execute(
            "SELECT id, json_extract(spec, '$.window') FROM jobs WHERE state = 'queued' AND not_before_s <= ? "
            "ORDER BY priority DESC, number", (elapsed,),
        )  # fmt: skip
        try:
            for job, window in waiting:
                if in_window({"window": json.loads(window)} if window else {}, now):
                    return self.get(job)
        finally:
            waiting.close()
        return None

    def waits_s(self, job: Job) -> float:
        """Return seconds until a job that crashed is tried again; 0 means at once."""
        return max(0.0, job.not_before_s - self.elapsed())

    def claim(self) -> Job | None:
        """Take the next job to run it: it is `running` when this returns."""
        with (
            self.store.transaction() as db
        ):  # chosen and marked in one transaction, so that two never take the same
            job = self.next()
            if job is None:
                return None
            now = self.clock()
            db.execute(
                "UPDATE jobs SET state = 'running', attempt = attempt + 1, started_s = COALESCE(started_s, ?), "
                "reason = '', error = NULL WHERE id = ?",
                (now, job.id),
            )
            self._say(job.id, "running", "", now)
        self.changed(job.id)
        return self.get(job.id)

    def ask(self, job: str, verb: Literal["pause", "resume", "cancel"]) -> Job:
        """Pause, resume or cancel a job. Repeating a request changes nothing.

        Raises:
            BusyError: the job's state does not allow it.
        """
        with self.store.transaction() as db:
            row = self.get(job)
            state = ASKED[verb].get(row.state)
            if state is None:
                raise BusyError(
                    f"a job that is {row.state} cannot {verb}",
                    expected=" or ".join(ASKED[verb]),
                    received=row.state,
                    hint="wait for it to end" if row.state in ACTIVE else "create another job",
                )
            if state == row.state:
                return row
            now = self.clock()
            ended = None
            if state in ENDED:
                ended = now
            db.execute(
                "UPDATE jobs SET state = ?, reason = ?, ended_s = ?, crashes = 0, not_before_s = 0, "
                "error = CASE WHEN ? = 'queued' THEN NULL ELSE error END WHERE id = ?",
                (state, _PAST[verb], ended, state, job),
            )
            self._say(job, state, _PAST[verb], now)
        self.changed(job)
        return self.get(job)

    def change(
        self, job: str, *, priority: int | None = None, spec: dict[str, Any] | None = None
    ) -> Job:
        """Change the priority, or the window and limits in `spec`.

        Raises:
            BusyError: the job has ended.
        """
        with self.store.transaction() as db:
            row = self.get(job)
            if row.state in ("cancelled", "done"):
                raise BusyError(
                    f"the job is {row.state}",
                    expected="a job that has not ended",
                    received=row.state,
                )
            db.execute(
                "UPDATE jobs SET priority = ?, spec = ? WHERE id = ?",
                (row.priority if priority is None else priority, json.dumps(spec or row.spec), job),
            )
        self.changed(job)
        return self.get(job)

    def ended(
        self, job: str, outcome: Outcome, *, reason: str = "", error: dict[str, Any] | None = None, ran_s: float = 0.0,
        and_then: Callable[[Job], None] | None = None,
    ) -> Job:  # fmt: skip
        """Record how the worker of an active job ended.

        Args:
            and_then: more to write in the same transaction.
        """
        with self.store.transaction() as db:
            row = self.get(job)
            now = self.clock()
            state = AFTER[outcome].get(row.state)
            if state is None:
                raise BusyError(
                    f"the job is {row.state}", expected=" or ".join(ACTIVE), received=row.state
                )
            crashes = row.crashes
            crashed_at = row.crashed_at_step
            wait_s = 0.0
            if outcome == "crashed":
                # A new checkpoint is progress: only crashes without one between them use up the
                # retries.
                saved = int(row.progress.get("checkpoint_step", 0))
                crashes = 1 if saved > crashed_at else crashes + 1
                crashed_at = saved
                wait_s = min(LONGEST_PAUSE_S, 2.0 ** (crashes - 1))
                retries = row.spec.get("limits", {}).get("retries", RETRIES)
                if state == "queued" and crashes > retries:
                    state = "failed"
            db.execute(
                "UPDATE jobs SET state = ?, reason = ?, error = ?, ran_s = ran_s + ?, crashes = ?, "
                "crashed_at_step = ?, not_before_s = ?, ended_s = ? WHERE id = ?",
                (
                    state,
                    reason,
                    json.dumps(error) if error and state in ("queued", "failed") else None,
                    ran_s,
                    crashes,
                    crashed_at,
                    self.elapsed() + wait_s if state == "queued" and wait_s else 0.0,
                    now if state in ENDED else None,
                    job,
                ),
            )
            if and_then is not None:
                and_then(self.get(job))
            self._say(job, state, reason, now, error if state == "failed" else None)
        self.changed(job)
        return self.get(job)

    def recover(self) -> list[Job]:
        """Mark active jobs as interrupted at the daemon's start: their workers have died."""
        return [
            self.ended(job.id, "interrupted", reason="the daemon was restarted")
            for job in self.list(*ACTIVE)
        ]

    def delete(self, job: str) -> None:
        """Delete a job that has ended; the caller removes its folder.

        Raises:
            BusyError: it has not ended.
        """
        with self.store.reserve.given_up():
            with self.store.transaction() as db:
                row = self.get(job)
                if row.state not in ENDED:
                    raise BusyError(
                        f"the job is {row.state}", expected="an ended job", hint="cancel it first"
                    )
                db.execute("DELETE FROM jobs WHERE id = ?", (job,))
            self._delete_events(job)

    def delete_lost_events(self) -> None:
        """Delete events without a job, which a kill during a delete leaves."""
        # From one job's first event to the next job's: all jobs may have millions of events.
        lost = self.store.rows(
            "WITH RECURSIVE seen(job) AS (SELECT MIN(job) FROM events UNION ALL "
            "SELECT (SELECT MIN(job) FROM events WHERE job > seen.job) FROM seen WHERE seen.job IS NOT NULL) "
            "SELECT job FROM seen WHERE job IS NOT NULL AND job NOT IN (SELECT id FROM jobs)"
        )
        for row in lost:
            self._delete_events(row["job"])

    def _delete_events(self, job: str) -> None:
        """Delete in parts: SQLite first writes as much as it deletes, and the disk may be full."""
        while (first := self.store.row("SELECT MIN(id) FROM events WHERE job = ?", job)) and first[
            0
        ] is not None:
            with self.store.transaction(frees=True) as db:
                db.execute(
                    "DELETE FROM events WHERE job = ? AND id < ?", (job, first[0] + DELETED_AT_ONCE)
                )

    def _say(
        self, job: str, state: str, reason: str, now: float, error: dict[str, Any] | None = None
    ) -> None:
        event = {"event": "job", "time_s": now, "state": state, "reason": reason}
        self.store.add_events(job, [event | ({"error": error} if error else {})])


_PAST = {
    "pause": "paused by the user",
    "resume": "resumed by the user",
    "cancel": "cancelled by the user",
}


def in_window(spec: dict[str, Any], now_s: float) -> bool:
    """Return True if a job may run now: always, or from `start` to `end` in local time."""
    window = spec.get("window")
    if not window:
        return True
    local = time.localtime(now_s)
    minute = 60 * local.tm_hour + local.tm_min
    start, end = (60 * int(text[:2]) + int(text[3:]) for text in (window["start"], window["end"]))
    if start < end:
        return start <= minute < end
    return minute >= start or minute < end
