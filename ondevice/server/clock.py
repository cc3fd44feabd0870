"""The store's clock: seconds that never jump, for everything that waits, expires or is deleted.

A board without a battery starts in 1970 and jumps by decades once it has a network. The wall clock
therefore only labels things (`created_s`) and decides when a daily window is open. Everything else
is measured by the machine's time since boot, which also counts while it sleeps. The store's clock
continues across restarts of the daemon and reboots; time while the machine is off does not count.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

KEEP_S = 300.0
"""Seconds between two saves of the time, and the most that a power cut loses."""
_UNKNOWN_BOOT = str(uuid.uuid4())


def uptime_s() -> float:
    """Return seconds since the machine started, with sleep; only differences have a meaning."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return an id of the machine's boot, or of this process if the system has no such id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _UNKNOWN_BOOT


class Tables(Protocol):
    """What the clock uses of a `Store`."""

    root: Path

    def row(self, query: str, *values: Any) -> sqlite3.Row | None: ...

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]: ...

    def transaction(
        self, *, durable: bool = True
    ) -> AbstractContextManager[sqlite3.Connection]: ...


class StoreClock:
    """Seconds of a store's time, and the ages of the things in it.

    An age counts from `renew`, or from the first call of `age_s`. The date of a file does not
    matter.
    """

    def __init__(self, store: Tables) -> None:
        self.store = store
        self._kept_s = 0.0
        row = store.row("SELECT * FROM clock")
        now = uptime_s()
        counted = 0.0
        if row is not None:
            counted = float(row["seconds"])
        if row is not None and row["boot"] == boot_id() and now >= row["uptime_s"]:
            counted += now - row["uptime_s"]
        self._base = counted - now

    def now(self) -> float:
        """Return the store's time, in seconds."""
        return self._base + uptime_s()

    def keep(self, *, at_once: bool = False) -> None:
        """Save the time for the next start. Only the daemon does so, now and then and at the
        end."""
        now = self.now()
        if not at_once and now - self._kept_s < KEEP_S:
            return
        with self.store.transaction(durable=False) as db:
            db.execute("DELETE FROM clock")
            db.execute("INSERT INTO clock VALUES (?, ?, ?)", (boot_id(), now - self._base, now))
        self._kept_s = now

    def renew(self, name: str) -> None:
        """Start counting the age of a thing, or start over; `name` is its path in the store."""
        with self.store.transaction(durable=False) as db:
            db.execute("INSERT OR REPLACE INTO ages VALUES (?, ?)", (name, self.now()))

    def age_s(self, name: str) -> float:
        """Return the age of a thing, in seconds."""
        row = self.store.row("SELECT since_s FROM ages WHERE name = ?", name)
        if row is None:
            self.renew(name)
            return 0.0
        return self.now() - float(row["since_s"])

    def forget_missing(self) -> None:
        """Delete the ages of things that no longer exist."""
        gone = [row["name"] for row in self.store.rows("SELECT name FROM ages")]
        gone = [name for name in gone if not (self.store.root / name).exists()]
        if gone:
            with self.store.transaction(durable=False) as db:
                db.executemany("DELETE FROM ages WHERE name = ?", [(name,) for name in gone])
