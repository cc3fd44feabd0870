"""The signal that ends a generation in the helper process, not the process."""

from __future__ import annotations

import signal

STOP = signal.SIGUSR1
"""Sent by the daemon when nobody reads the response any more."""
stopped = False
"""True once the signal has come; the next generation resets it."""


def listen_for_stop() -> None:
    """Take `STOP` as the end of the present generation."""

    def stop(number: int, frame: object) -> None:
        global stopped
        stopped = True

    signal.signal(STOP, stop)
