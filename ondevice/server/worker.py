"""One job in a separate process: `python -m ondevice.server.worker JOB_FOLDER DAEMON_PID`.

It runs the same functions as the command line. Its events are in the run's events.jsonl;
`attempt.json` names the byte at which this attempt began to write, because a resume cuts the log
back to its checkpoint. It ends with the exit codes of the command line: 130 if it was stopped and
its state is saved.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ondevice.api import resolve
from ondevice.api.runfile import RunConfig
from ondevice.api.train import run_artifact
from ondevice.artifact.files import atomic_write
from ondevice.core.errors import (
    INTERRUPTED_EXIT_CODE,
    OndeviceError,
    refused_memory,
    was_refused,
)
from ondevice.core.registry import name_methods
from ondevice.training.events import FILE_NAME, Event, plain

JOB = "job.json"
ATTEMPT = "attempt.json"
RESULT = "result.json"
ERROR = "error.json"
AGAIN = "again"
"""Key of an error in `ERROR` that may be gone the next time."""
RUN = "run"
_PR_SET_PDEATHSIG = 1


def child_environment() -> dict[str, str]:
    """Build the environment of every process that the daemon starts.

    It is the daemon's own without systemd's notifications and without its secret."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "ONDEVICE_TOKEN")
    }


def quiet_frameworks() -> None:
    """Turn off progress bars and advice of the Hugging Face libraries, before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def die_with(parent: int) -> None:
    """End at once when the parent process is gone; only on systems with prctl."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:  # it ended before the call above, which then sends no signal
        os._exit(INTERRUPTED_EXIT_CODE)


def first_offset(folder: Path, attempt: int) -> Callable[[Event], None]:
    """Return a sink that records, once, the byte of the log at which this attempt's first event
    begins.

    It is only known then: a resume first cuts the log back to its checkpoint.
    """
    noted = False

    def sink(event: Event) -> None:
        nonlocal noted
        if not noted:
            noted = True
            begin = (folder / RUN / FILE_NAME).stat().st_size - len(event.to_line())
            atomic_write(folder / ATTEMPT, json.dumps({"attempt": attempt, "offset": begin}))

    return sink


def run(folder: Path) -> int:
    """Train the job of `job.json`; return the exit status."""
    job = json.loads((folder / JOB).read_text())
    config = RunConfig.parse(job["config"], "job")
    adapter = None
    if job["adapter"]:
        adapter = Path(job["adapter"])
    sinks = [first_offset(folder, job["attempt"])]
    if job["artifact"]:
        trained = run_artifact(
            Path(job["artifact"]), config, resume=True, adapter=adapter, sinks=sinks
        )
    else:
        config.check_data()
        options = resolve.options_of(adapter, sinks, resume=True)
        trained = resolve.run(config, options, job["force"])
    if trained.result.interrupted:
        return INTERRUPTED_EXIT_CODE

    atomic_write(folder / RESULT, json.dumps(plain(trained.to_dict())))
    return 0


def main(arguments: list[str]) -> int:
    """Run the process; an OndeviceError is written to `error.json`, for the daemon to report."""
    folder = Path(arguments[0])
    die_with(int(arguments[1]))
    quiet_frameworks()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    # The import of torchao warns of its own enums.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    (folder / ERROR).unlink(missing_ok=True)
    try:
        return run(folder)
    except OndeviceError as error:
        name_methods(error)
        return _report(folder, error)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except Exception as raised:
        if not was_refused(raised):
            raise
        return _report(folder, refused_memory(raised), {AGAIN: True})


def _report(folder: Path, error: OndeviceError, more: dict[str, Any] | None = None) -> int:
    """Write an error where the daemon and the job's log have it; return the exit status."""
    atomic_write(folder / ERROR, json.dumps({**error.to_dict(), **(more or {})}))
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is on the disk; shutting down the frameworks takes seconds
