"""The process's side of the pipe to the daemon: one JSON object a line in each direction."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from typing import Any

from ondevice.core.errors import DataError, OndeviceError, TrainingError
from ondevice.server.worker import quiet_frameworks


class Channel:
    """The pipe to the daemon, which is this process's standard output; the process ends with it.

    Args:
        parent: the daemon's process.
    """

    def __init__(self, parent: int) -> None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        quiet_frameworks()
        # Replies go to a copy of standard output, which itself becomes standard error: a library
        # that prints there would break the protocol.
        self._target = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def send(self, reply: dict[str, Any]) -> None:
        """Send an object."""
        self._target.write(json.dumps(reply).encode() + b"\n")
        self._target.flush()


def as_error(call: str, error: Exception) -> OndeviceError:
    """Return the error of a call; one that is not an OndeviceError is printed, or is about data."""
    if isinstance(error, OndeviceError):
        return error
    if isinstance(error, (ValueError, OSError, RecursionError)):
        return DataError(f"{call}: {type(error).__name__}: {error}")
    traceback.print_exception(error)
    return TrainingError(f"{call} failed: {type(error).__name__}: {error}")


def _end_with(parent: int) -> None:
    """End when the daemon is gone.

    It polls, because the kernel's PR_SET_PDEATHSIG fires when the thread that started it ends.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
