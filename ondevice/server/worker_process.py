"""A worker, as the daemon sees it: start, stop, kill, and read its end."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import (
    INTERRUPTED_EXIT_CODE,
    BusyError,
    DoesNotFitError,
    OndeviceError,
    StorageError,
    TrainingError,
)
from ondevice.core.process import python_command
from ondevice.server import worker
from ondevice.server.queue import Outcome
from ondevice.server.service import trim

_log = logging.getLogger(__name__)


@dataclass
class Running:
    """The running worker."""

    job: str
    process: subprocess.Popen[bytes]
    limits: dict[str, Any]
    started: float = field(default_factory=time.monotonic)
    ran_before_s: float = 0.0
    asked: str = ""
    """Reason of the request to stop; empty while it may go on."""
    kill_at: float = 0.0
    over: OndeviceError | None = None
    """The limit that it exceeded."""
    in_cgroup: bool = False
    placed_bytes: int | None = None
    """The limit that the cgroup enforces."""
    memory_bytes: int = 0
    peak_bytes: int = 0
    ended: float | None = None
    """Time at which its end was noticed."""

    @property
    def ran_s(self) -> float:
        """Total seconds that the job's workers have run."""
        return self.ran_before_s + (self.ended or time.monotonic()) - self.started

    def ask(self, why: str, grace_s: float) -> None:
        """Ask the worker to end its step and save; the supervisor kills it after `grace_s`."""
        _log.info("job %s: asked to stop: %s", self.job, why)
        self.asked = why
        self.kill_at = time.monotonic() + grace_s
        self.process.terminate()

    def kill(self) -> None:
        """Kill the worker and all its processes; the last checkpoint counts."""
        self.asked = self.asked or "killed"
        self.kill_group()

    def kill_group(self) -> None:
        """Kill the worker's session: the worker and all processes that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def start_process(python: str, folder: Path, values: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a worker on the job of `folder`.

    Args:
        python: the interpreter.
        values: of `job.json`.

    Raises:
        OSError: the folder cannot be written, or the process cannot be started.
    """
    atomic_write(folder / worker.JOB, json.dumps(values))
    (folder / worker.ERROR).unlink(missing_ok=True)
    trim(folder / "worker.log")
    with open(folder / "worker.log", "ab") as log:
        # A process, not a thread: a framework's crash must not end the daemon, and its end frees
        # all memory. A separate session, so that all its processes can be killed with it.
        return subprocess.Popen(
            python_command(
                "-m", "ondevice.server.worker", str(folder), str(os.getpid()), python=python
            ),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=worker.child_environment(),
        )


def reported_error(folder: Path) -> dict[str, Any] | None:
    """Read the error that a worker wrote into its folder; return None without a readable one."""
    try:
        values = json.loads((folder / worker.ERROR).read_text())
    except (OSError, ValueError):
        return None
    if isinstance(values, dict):
        return values
    return None


def judge(
    code: int, running: Running, reported: dict[str, Any] | None
) -> tuple[Outcome, dict[str, Any] | None]:
    """Interpret an exit status: return how the worker ended, and the error to show.

    Args:
        code: negative for a signal.
        reported: `error.json` of the worker, if it wrote one.
    """
    if code == 0:  # all steps are done, whatever was requested meanwhile
        return "finished", None
    if running.over is not None:
        return "refused", running.over.to_dict()
    if code == INTERRUPTED_EXIT_CODE or (running.asked and code < 0):
        return "interrupted", None
    if reported is not None and reported.get("exit_code") == code:
        again = reported.pop(worker.AGAIN, False) or code in (
            BusyError.exit_code,
            StorageError.exit_code,
        )  # these may be gone the next time
        return ("crashed" if again else "refused"), reported
    name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    problem = TrainingError(
        f"the worker ended with {name}", hint="GET /v1/jobs/ID/log has its output"
    )
    return "crashed", problem.to_dict()


def over_memory(limit: int, taken: int | None) -> DoesNotFitError:
    """Build the error of a job that exceeded its memory limit, in bytes."""
    return DoesNotFitError(
        "the job took more memory than its limit",
        expected=f"at most {limit / 2**20:,.0f} MiB",
        received="more" if taken is None else f"{taken / 2**20:,.0f} MiB",
        hint="a smaller batch or shorter rows; a dry run gives the plan's table",
    )
