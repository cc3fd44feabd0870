"""The thread that runs jobs: one worker process at a time, watched until it ends.

Only the supervisor starts and stops workers; the rest of the daemon changes the queue and wakes it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import BusyError, OndeviceError, StorageError, TrainingError
from ondevice.server import worker
from ondevice.server.adapters import register_outcome
from ondevice.server.events import follow
from ondevice.server.jobs import JobSpec, adapter_folder, artifact_folder, resolve
from ondevice.server.queue import ACTIVE, Job, Outcome, Queue, in_window
from ondevice.server.service import Cgroup, own_bytes, trim
from ondevice.server.store import Store
from ondevice.server.words import error_for_api
from ondevice.server.worker_process import (
    Running,
    judge,
    over_memory,
    reported_error,
    start_process,
)

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig

_log = logging.getLogger(__name__)
POLL_S = 0.1
IDLE_S = 1.0
SAVE_GRACE_S = 120.0
"""Seconds for a worker to end its step and save, before it is killed."""
CANCEL_GRACE_S = 5.0
BUSY_WAIT_S = 0.5
LONG_TURN_S = 1800.0
"""Seconds for a turn that starts or ends a job: it hashes an artifact or copies an adapter."""


class Supervisor(threading.Thread):
    """Runs the queue until `stop`.

    Args:
        python: the interpreter of the workers.
        make_room: called before a worker starts.
    """

    def __init__(
        self,
        store: Store,
        queue: Queue,
        python: str = sys.executable,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.store = store
        self.queue = queue
        self.python = python
        self.make_room = make_room
        self.running: Running | None = None
        self.cgroup = Cgroup()
        self.beat = time.monotonic()
        """Time of the last turn, or the latest end of a long one, for the watchdog."""
        self._wake = threading.Event()
        self._ending = threading.Event()

    def wake(self) -> None:
        """Check the queue at once, because it has changed."""
        self._wake.set()

    def stop(self, timeout_s: float = SAVE_GRACE_S + 10) -> None:
        """Stop: the worker saves its state, and its job is queued again."""
        self._ending.set()
        self.wake()
        self.join(timeout_s)

    def recover(self) -> None:
        """Clean up the queue after the previous daemon; call this before `start`."""
        for job in self.queue.list("running", "pausing", "cancelling"):
            follow(self.store, self.queue, job.id)
        for job in self.queue.recover():
            _log.info("job %s: %s after a restart", job.id, job.state)

    def run(self) -> None:
        """Start, watch and end workers until `stop`."""
        while not (self._ending.is_set() and self.running is None):
            self.beat = time.monotonic()
            try:
                self._tick()
            except (
                Exception
            ):  # a full disk, for example: a dead supervisor would leave its worker unwatched
                _log.exception("an error in the supervisor, which goes on")
                if self._leaves_end_to_next_start():
                    return
                time.sleep(1.0)
            self._wake.wait(POLL_S if self.running else IDLE_S)
            self._wake.clear()

    def _leaves_end_to_next_start(self) -> bool:
        """Return True if the daemon stops and only the end of a job could not be recorded.

        `recover` records it; the disk may stay full for longer than a service may take to stop.
        """
        is_over = self.running is not None and self.running.ended is not None
        return self._ending.is_set() and is_over

    def _tick(self) -> None:
        if self.running is not None:
            self._watch(self.running)
        elif not self._ending.is_set():
            for lost in self.queue.list(*ACTIVE):  # its start failed, and could not be recorded
                self.queue.ended(lost.id, "crashed", reason="the job has no worker")
            if (job := self.queue.claim()) is not None:
                self._start(job)

    def _start(self, job: Job) -> None:
        folder = self.store.path("jobs", job.id)
        self.beat = time.monotonic() + LONG_TURN_S
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            spec = JobSpec.parse(job.spec, "job")
            config = resolve(spec, self.store, folder / worker.RUN)
            values = job_values(job, spec, config, self.store)
            self.make_room()
            process = start_process(self.python, folder, values)
        except (OndeviceError, OSError) as error:
            problem = _as_error(error, "the worker cannot be started")
            outcome: Outcome = "crashed" if isinstance(problem, StorageError) else "refused"
            self.queue.ended(
                job.id, outcome, reason=problem.message, error=error_for_api(problem.to_dict())
            )
            return
        limits = job.spec.get("limits", {})
        self.running = running = Running(job.id, process, limits, ran_before_s=job.ran_s)
        if limit := limits.get("memory_bytes"):
            # One for each attempt, so that the kernel's count of kills starts at zero.
            running.in_cgroup = self.cgroup.place(process.pid, f"{job.id}-{job.attempt}", limit)
            running.placed_bytes = limit
        _log.info("job %s: started, process %d, attempt %d", job.id, process.pid, job.attempt)

    def _watch(self, running: Running) -> None:
        code = running.process.poll()
        if code is not None:
            self._ended(running, code)
            return
        self._enforce(running)
        trim(self.store.path("jobs", running.job) / "worker.log")
        follow(
            self.store, self.queue, running.job, running.ran_s
        )  # last: a full disk may stop this, but not the limits

    def _enforce(self, running: Running) -> None:
        """Enforce the worker's limits, and apply requests for its job."""
        job = self.queue.get(running.job)
        running.limits = job.spec.get("limits", {})
        running.memory_bytes = own_bytes(running.process.pid)
        running.peak_bytes = max(running.peak_bytes, running.memory_bytes)
        memory = running.limits.get("memory_bytes")
        seconds = running.limits.get("time_s")
        if running.in_cgroup and memory != running.placed_bytes:
            self._move_limit(running, memory)
        if memory and running.memory_bytes > memory and running.over is None:
            running.over = over_memory(memory, running.memory_bytes)
            running.kill()
        elif seconds and running.ran_s > seconds and not running.asked:
            running.over = TrainingError(
                "the job reached its time limit; its state is saved",
                expected=f"at most {seconds:g} s of running",
                received=f"{running.ran_s:.0f} s",
                hint="raise limits.time_s and resume",
            )
            running.ask("time limit", SAVE_GRACE_S)
        elif job.state == "cancelling" and running.asked != "cancelled":
            running.ask("cancelled", CANCEL_GRACE_S)
        elif not running.asked:
            if job.state == "pausing":
                running.ask("paused", SAVE_GRACE_S)
            elif self._ending.is_set():
                running.ask("the daemon was stopped", SAVE_GRACE_S)
            elif not in_window(job.spec, self.queue.clock()):
                running.ask("its window has closed", SAVE_GRACE_S)
        if running.kill_at and time.monotonic() > running.kill_at:
            running.kill()

    def _move_limit(self, running: Running, limit: int | None) -> None:
        """Pass a memory limit that changed while the job runs to the kernel."""
        running.placed_bytes = limit
        try:
            if self.cgroup.folder is not None:
                (self.cgroup.folder / "memory.max").write_text(str(limit or "max"))
        except OSError as error:
            _log.warning(
                "job %s: the memory limit applies from its next start: %s", running.job, error
            )

    def _ended(self, running: Running, code: int) -> None:
        """Record how a worker ended; if that fails, as on a full disk, the next turn tries
        again."""
        if running.ended is None:
            running.ended = time.monotonic()
            running.kill_group()
            if running.in_cgroup and running.placed_bytes and self.cgroup.killed():
                running.over = over_memory(running.placed_bytes, None)
            self.cgroup.remove()
        if any(job.id == running.job for job in self.queue.list(*ACTIVE)):
            self._write_end(running, code)
        self.running = None

    def _write_end(self, running: Running, code: int) -> None:
        self.beat = time.monotonic() + LONG_TURN_S
        # The log first: its progress shows whether a crashed worker had saved a new checkpoint.
        follow(self.store, self.queue, running.job, running.ran_s)
        folder = self.store.path("jobs", running.job)
        outcome, error = judge(code, running, reported_error(folder))
        reason = ""
        if outcome != "finished":
            reason = running.asked or str((error or {}).get("message", ""))
        try:
            done = None
            if outcome == "finished":
                done = register_outcome(self.store, running.job, folder)
        except (OndeviceError, OSError) as failure:
            problem = _as_error(failure, "cannot store the adapter")
            outcome = "crashed"
            error = problem.to_dict()
            reason = problem.message
            done = None
        if error is not None:
            error = error_for_api(error)
        rest_s = max(0.0, running.ran_s - self.queue.get(running.job).ran_s)
        job = self.queue.ended(
            running.job, outcome, reason=reason, error=error, ran_s=rest_s, and_then=done
        )
        # The previous worker still holds the folder: try again soon.
        if error and error.get("error") == BusyError.__name__:
            with self.store.transaction() as db:
                again_s = self.queue.elapsed() + BUSY_WAIT_S
                db.execute(
                    "UPDATE jobs SET crashes = 0, not_before_s = ? WHERE id = ?", (again_s, job.id)
                )
        _log.info("job %s: ended with %d, now %s %s", job.id, code, job.state, reason)


def remove_job(store: Store, queue: Queue, job: str) -> None:
    """Delete an ended job and its folder; its adapters stay."""
    queue.delete(
        job
    )  # first: after a kill the next start removes a folder, but a row without one would fail
    store.discard("jobs", job)


def _as_error(error: OndeviceError | OSError, message: str) -> OndeviceError:
    if isinstance(error, OndeviceError):
        return error
    return StorageError(f"{message}: {error.strerror or error}")


def job_values(job: Job, spec: JobSpec, config: RunConfig, store: Store) -> dict[str, Any]:
    """Return what a job's worker reads (`worker.JOB`).

    The run file has only the settings that the job names: the run decides the others, once.
    """
    artifact = None
    if spec.artifact:
        artifact = str(artifact_folder(store, spec.artifact))
    adapter = None
    if spec.adapter:
        adapter = str(adapter_folder(store, spec.adapter))
    return {
        "attempt": job.attempt,
        "config": config.model_dump(mode="json", exclude_unset=True),
        "artifact": artifact,
        "adapter": adapter,
        "force": spec.force,
    }
