"""End the wait for ranks on accelerators: a kernel that waits for a lost rank would wait for
ever."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from ondevice.core.errors import TrainingError
from ondevice.offload.guard import GONE, HINT, Guard
from ondevice.offload.worker import Patience, Watch

if TYPE_CHECKING:
    from ondevice.offload.device import Event
    from ondevice.offload.units import Ranks

LOOK_S = 0.1
ABORT_S = 10.0
"""Aborting a communicator takes no time, or for ever."""


class Overdue:
    """Watches what the ranks have begun together, in order.

    If the first of it is not done in time, or another rank is gone, the watch fails with its name,
    and the communicator is aborted, so that nothing waits for it any more. If the process cannot
    even do that, its guard ends it."""

    def __init__(self, watch: Watch, ranks: Ranks) -> None:
        self.watch = watch
        self.ranks = ranks
        self.begun: deque[tuple[str, Event]] = deque()
        self.changing = threading.Lock()
        self.closing = False
        self.guard = Guard()
        self.thread = threading.Thread(target=self._run, name="ondevice-overdue", daemon=True)
        self.thread.start()

    def expect(self, name: str, event: Event) -> None:
        """Watch over the transfer of a unit, which is done at `event`.

        The guard hears of it at once: querying `event` later may block with Python's lock held."""
        with self.changing:
            self.begun.append((name, event))
            if len(self.begun) == 1:
                self._tell()

    def close(self) -> None:
        """End once nothing is under way; transfers without the other ranks are aborted."""
        self.closing = True
        self.thread.join()
        self.guard.close()

    def _tell(self) -> str:
        """Tell the guard what this process waits for; return it."""
        doing = ""
        if self.begun:
            doing = f"transfer of {self.begun[0][0]}"
        self.guard.expect(self.watch.timeout_s, doing)
        return doing

    def _run(self) -> None:
        patience = Patience()
        while self.begun or not self.closing:
            time.sleep(LOOK_S)
            while self.begun and self.begun[0][1].done():
                patience = Patience()
                with self.changing:
                    self.begun.popleft()
                    self._tell()
            with self.changing:
                doing = self._tell()
            if not doing:
                patience = Patience()
                continue
            lost = self.ranks.lost
            waited_s = patience.spent()
            if lost is None and waited_s < self.watch.timeout_s:
                continue
            error = TrainingError(
                GONE,
                received=str(lost).split(". ")[0][:300]
                if lost
                else f"no reply for {waited_s:.1f} s",
                hint=HINT,
            )
            self.watch.fail(doing, error)
            self.guard.expect(ABORT_S, doing)
            self.ranks.abort()
            self.guard.expect(0.0, "")
            return
