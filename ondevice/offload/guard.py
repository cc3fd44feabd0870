"""A helper process next to each rank, which ends the rank if it can no longer report anything.

A GPU's kernel that waits for a rank that is gone can block a call to the driver, which a thread may
make while it holds Python's lock: then no thread of the process runs. And NCCL gives up a
communicator only once every rank of the host does (NVIDIA/nccl issue 863), which a stopped one
never will. So another process decides.

    python -I -S guard.py PID     lines on stdin: seconds until the next one, and the pending work
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

GONE = "another rank has ended or does not respond"
HINT = "its own message says why; the last checkpoint is intact, resume from it"
LOOK_S = 0.5


class Guard:
    """The helper process; does nothing on Windows, where a pipe cannot be polled."""

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
        """End this process unless the next call comes within `limit_s`; never, if `waits_for` is
        empty."""
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
    left = b""
    limit_s = 0.0
    waits_for = ""
    waited_s = 0.0
    while os.getppid() == process:
        if select.select([0], [], [], LOOK_S)[0]:
            if not (read := os.read(0, 65536)):
                return
            *lines, left = (left + read).split(b"\n")
            if lines:
                seconds, _, waits_for = lines[-1].decode().partition(" ")
                limit_s = float(seconds)
                waited_s = 0.0
            continue
        waited_s += (
            LOOK_S  # time in which the machine slept or this process was stopped does not count
        )
        if waited_s > limit_s and waits_for:
            message = f"error: {waits_for}: {GONE}\n"
            message += f"  received: this rank's process could do nothing for {waited_s:.1f} s\n"
            print(f"{message}  try: {HINT}", file=sys.stderr, flush=True)
            os.kill(process, signal.SIGKILL)
            return


if __name__ == "__main__":
    watch(int(sys.argv[1]))
