"""A process beside each of several ranks, which ends it when it can no longer say anything itself.

A GPU's kernel that waits for a rank that is gone can block a call to the driver, which a thread may make while it holds
Python's lock: then no thread of the process runs. And NCCL gives up a communicator only once every rank of the host
does (NVIDIA/nccl issue 863), which a stopped one never will. So the last word comes from outside.

    python -I -S guard.py PID     lines on stdin: seconds until the next one, and what the process waits for
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GONE = "another rank has ended or does not answer"
HINT = "its own message says why; the last checkpoint is intact, resume from it"


MOST_S = 1.0
"""Longest time between two looks that counts: those who wait look several times a second."""


class Patience:
    """Time that a wait has taken while this process ran.

    If the machine sleeps, or the process is stopped (a paused container, Ctrl-Z), what is waited for stands still, too.
    """

    def __init__(self) -> None:
        self.seconds, self.looked = 0.0, time.monotonic()

    def spent(self) -> float:
        """Return the seconds since the start; call it several times a second."""
        now = time.monotonic()
        self.seconds += min(MOST_S, now - self.looked)
        self.looked = now
        return self.seconds


class Guard:
    """The process beside this one; without effect where a pipe cannot be waited for with a limit (Windows)."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        if os.name == "posix":
            command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid())]
            end, self.pipe = os.pipe()
            os.set_blocking(self.pipe, False)  # a guard that is stopped holds nobody up
            # A session of its own: Ctrl-C is for the rank, which may still write a checkpoint.
            self.process = subprocess.Popen(command, stdin=end, start_new_session=True)
            os.close(end)

    def expect(self, limit_s: float, waits_for: str) -> None:
        """Let this process be ended unless the next call comes within `limit_s`; never, if it waits for nothing."""
        if self.process is not None:
            with suppress(OSError):  # it was ended by someone; the run does not need it
                os.write(self.pipe, f"{limit_s} {waits_for}\n".encode())

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            os.close(self.pipe)
            self.process = None


def watch(process: int) -> None:
    """Read lines until the process ends, or end it."""
    left, limit_s, waits_for, patience = b"", 0.0, "", Patience()
    while os.getppid() == process:
        if select.select([0], [], [], 0.5)[0]:
            if not (read := os.read(0, 65536)):
                return
            *lines, left = (left + read).split(b"\n")
            if lines:
                seconds, _, waits_for = lines[-1].decode().partition(" ")
                limit_s, patience = float(seconds), Patience()
        elif patience.spent() > limit_s and waits_for:
            message = f"error: {waits_for}: {GONE}\n"
            message += (
                f"  received: this rank's process could do nothing for {patience.seconds:.1f} s\n"
            )
            print(f"{message}  try: {HINT}", file=sys.stderr, flush=True)
            os.kill(process, signal.SIGKILL)
            return


if __name__ == "__main__":
    watch(int(sys.argv[1]))
