"""The queue's state machine, over the store and nothing else: no process, no clock of its own, no file.

    queued -> running -> done
       |  ^      |  \\-> failed -> queued (resume)
       |  |      |-> pausing -> paused -> queued (resume)
       v  +------+   (window closed, daemon stopped, crash: the job goes on from its last checkpoint)
    cancelled <- cancelling <- running, pausing

A transition is one transaction, and writes a `job` event to the job's stream with it.
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
"""How a worker ended: all steps done; stopped with its state saved; died; an error that trying again cannot cure."""

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
"""What runs and waits first, in the order it will run; then the newest."""
RETRIES = 3
KEY_S = 24 * 3600.0
"""How long a request's key is remembered."""
LONGEST_PAUSE_S = 300.0
DELETED_AT_ONCE = 2000
"""Events that are deleted in one transaction."""


@dataclass(frozen=True)
class Job:
    """One row of the queue.

    Attributes:
        spec: what was asked for (`jobs.JobSpec`), as JSON values.
        progress: the newest figures of the run, as its events say them.
        reason: why it is in this state, for people.
        error: what `--json` prints of an error, for a failed job.
        ran_s: seconds that its workers have run, in all.
        not_before_s: it is not started before this moment of the store's time (`clock`).
        crashes: in a row, without a new checkpoint between them.
        attempt: how many workers were started.
        followed, offset: the attempt whose events are read, and up to which byte of the run's log.
        last_event: id of the newest event of its stream, read with the row: who goes on behind it misses nothing.
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
        changed: called with each job whose stream has something new, after the transaction.
        clock: seconds since the epoch: labels of what happened, and windows of the day.
        elapsed: the store's time, by which a job waits and a key is remembered; by default that of the store.
    """

    def __init__(
        self,
        store: Store,
        changed: Callable[[str], None] = lambda job: None,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        self.store, self.changed, self.clock, self.elapsed = (
            store,
            changed,
            clock,
            elapsed or store.clock.now,
        )

    def create(
        self, spec: dict[str, Any], priority: int = 0, key: tuple[str, str] | None = None
    ) -> Job:
        """Create a job at the end of the jobs of its priority.

        Args:
            key: a request's key, and the hash of what it asks for; one that has made a job gives that job.

        Raises:
            ConfigError: the key has made a job of something else.
        """
        name, now = new_id("job"), self.clock()
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
        """Return the job that a request of this key has made; None where there is none, or no longer.

        Raises:
            ConfigError: the key has made a job of something else.
        """
        row = self.store.row("SELECT * FROM keys WHERE key = ?", key)
        job = None if row is None else self.store.row(f"{_JOBS} WHERE id = ?", row["job"])
        if row is None or job is None:
            return None
        if row["digest"] != digest:
            raise ConfigError("the Idempotency-Key was used for another job", expected="a new key for each job",
                              received=key, hint=f"it made {row['job']}")  # fmt: skip
        return Job.of(job)

    def get(self, job: str) -> Job:
        """Return one job.

        Raises:
            MissingError: there is none of this id.
        """
        row = self.store.row(f"{_JOBS} WHERE id = ?", job)
        if row is None:
            raise MissingError(f"there is no job {job}", hint="GET /v1/jobs lists them")
        return Job.of(row)

    def list(self, *states: str) -> list[Job]:
        """Return all jobs, or those in `states`, in the order of `page`. There may be many: a list that is shown comes
        in pages."""
        return self.page(states, limit=None)[0]

    def page(
        self, states: Sequence[str], limit: int | None, after: str | None = None
    ) -> tuple[list[Job], bool]:
        """Return so many jobs behind the job `after`, of all or of those in `states`, and if there are more: what runs
        and waits first, in the order it will run; then the newest.

        Raises:
            ConfigError: `after` is not in this list.
        """
        where = f"state IN ({','.join('?' * len(states))})" if states else "1"
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
        """Return the id of a job that has not ended and names a thing: `needing("dataset", "data-1")`."""
        row = self.store.row(
            "SELECT id FROM jobs WHERE state NOT IN ('cancelled', 'failed', 'done') "
            "AND json_extract(spec, ?) = ? ORDER BY number LIMIT 1",
            f"$.{kind}", name,
        )  # fmt: skip
        return row["id"] if row else None

    def next(self) -> Job | None:
        """Choose the job to run now, if any: the highest priority, then the oldest, of those that may start."""
        now, elapsed = self.clock(), self.elapsed()
        if self.store.row("SELECT 1 FROM jobs WHERE state IN (?, ?, ?)", *ACTIVE):
            return None
        # Only the window of each is read until one may start: a thousand jobs may wait for the night.
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
        """Return the seconds until a job that crashed is tried again; 0 for at once."""
        return max(0.0, job.not_before_s - self.elapsed())

    def claim(self) -> Job | None:
        """Take the next job to run it: it is `running` when this returns."""
        with (
            self.store.transaction() as db
        ):  # chosen and marked in one, so that two never take the same
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
        """Pause, resume or cancel. Asking again for what is already so changes nothing.

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
            now, ended = self.clock(), None
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
        """Set another priority, or other settings of the queue (window, limits) in `spec`.

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
        and_then: Callable[[Job], None] = lambda job: None,
    ) -> Job:  # fmt: skip
        """Write down that the worker of an active job is gone, and how.

        Args:
            and_then: more to write in the same transaction.
        """
        with self.store.transaction() as db:
            row, now = self.get(job), self.clock()
            state = AFTER[outcome].get(row.state)
            if state is None:
                raise BusyError(
                    f"the job is {row.state}", expected=" or ".join(ACTIVE), received=row.state
                )
            crashes, crashed_at, wait_s = row.crashes, row.crashed_at_step, 0.0
            if outcome == "crashed":
                # A new checkpoint is progress: only crashes without one between them use up the retries.
                saved = int(row.progress.get("checkpoint_step", 0))
                crashes = 1 if saved > crashed_at else crashes + 1
                crashed_at, wait_s = saved, min(LONGEST_PAUSE_S, 2.0 ** (crashes - 1))
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
            and_then(self.get(job))
            self._say(job, state, reason, now, error if state == "failed" else None)
        self.changed(job)
        return self.get(job)

    def recover(self) -> list[Job]:
        """Mark the active jobs as interrupted when the daemon starts: their workers died with the one before."""
        return [
            self.ended(job.id, "interrupted", reason="the daemon was restarted")
            for job in self.list(*ACTIVE)
        ]

    def delete(self, job: str) -> None:
        """Forget a job that has ended; its folder is the caller's to remove.

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
        """Delete the events of jobs that are not there: of a job whose delete a kill cut short."""
        # From one job's first event to the next one's: the events of all jobs may be millions.
        lost = self.store.rows(
            "WITH RECURSIVE seen(job) AS (SELECT MIN(job) FROM events UNION ALL "
            "SELECT (SELECT MIN(job) FROM events WHERE job > seen.job) FROM seen WHERE seen.job IS NOT NULL) "
            "SELECT job FROM seen WHERE job IS NOT NULL AND job NOT IN (SELECT id FROM jobs)"
        )
        for row in lost:
            self._delete_events(row["job"])

    def _delete_events(self, job: str) -> None:
        """Delete in parts: all at once, SQLite would first write as much as they take, and the disk may be full."""
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
    """Return True if a job may run at this time: always, or from `start` to `end`, local time, also over midnight."""
    window = spec.get("window")
    if not window:
        return True
    local = time.localtime(now_s)
    minute = 60 * local.tm_hour + local.tm_min
    start, end = (60 * int(text[:2]) + int(text[3:]) for text in (window["start"], window["end"]))
    return start <= minute < end if start < end else minute >= start or minute < end
