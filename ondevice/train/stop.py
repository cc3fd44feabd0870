"""Asked to stop: a signal lets the running step end and its state be saved; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class StopRequest:
    """Whether the run was asked to stop, by a signal or by `request`. A context manager.

    Signals are taken only in the main thread, only while open, and not those that the process was started to
    ignore (`nohup`). The second signal raises KeyboardInterrupt where the program is.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._before: dict[int, Any] = {}

    def request(self, reason: str = "request") -> None:
        """Stop after the running step; another thread may call this."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __call__(self) -> bool:
        """Whether to stop, as a callback."""
        return bool(self.reason)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.reason:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
