"""Everything that serves one store, put together: queue, supervisor, streams, helpers, metrics."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
from pathlib import Path

from ondevice.errors import BusyError
from ondevice.server import uploads
from ondevice.server.adapters import link_active
from ondevice.server.helper import Helper
from ondevice.server.hub import Hub
from ondevice.server.metrics import Metrics
from ondevice.server.queue import Queue
from ondevice.server.store import Store
from ondevice.server.supervisor import Supervisor

_log = logging.getLogger(__name__)
LOCK = "serve.lock"
HOUSEKEEPING_S = 30.0
HUNG_S = 60.0
"""Longest turn of the supervisor; hashing a large artifact before its job starts is the slowest."""


class Daemon:
    """A store that is served by this process, and by no other while it is.

    Raises:
        BusyError: another daemon serves this store.
    """

    def __init__(self, root: str | Path) -> None:
        self.store = Store(root)
        self._lock = _locked(self.store.root / LOCK)
        self.hub = Hub(self.store)
        self.queue = Queue(self.store, self._changed)
        self.supervisor = Supervisor(self.store, self.queue)
        self.rows = Helper("data")
        self.model = Helper("model")
        self.metrics = Metrics(self)
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="housekeeping", daemon=True)

    def start(self) -> None:
        """Put the queue in order after the daemon before, and run it."""
        self.supervisor.recover()
        sweep(self.store)
        link_active(self.store)
        self.supervisor.start()
        self._keeper.start()

    def stop(self) -> None:
        """The worker saves its state; then everything is closed."""
        self._closing.set()
        if self.supervisor.is_alive():
            self.supervisor.stop()
        for helper in (self.rows, self.model):
            helper.close()
        self.store.close()
        os.close(self._lock)

    @property
    def alive(self) -> bool:
        """Whether the queue is being worked on: what the watchdog is told."""
        return self.supervisor.is_alive() and time.monotonic() - self.supervisor.beat < HUNG_S

    def _changed(self, job: str) -> None:
        self.supervisor.wake()
        self.hub.changed(job)

    def _keep(self) -> None:
        while not self._closing.wait(HOUSEKEEPING_S):
            for helper in (self.rows, self.model):
                helper.end_if_idle()
            try:
                uploads.expire(self.store, time.time())
            except Exception:
                _log.exception("housekeeping failed, and is tried again")


def sweep(store: Store) -> None:
    """Remove folders that a killed daemon had put in place without writing them down."""
    uploads.expire(store, time.time())
    for kind in ("datasets", "adapters", "jobs"):
        known = {row["id"] for row in store.rows(f"SELECT id FROM {kind}")}
        for folder in (store.root / kind).iterdir():
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)


def _locked(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise BusyError(
            f"{path.parent}: another daemon serves this store", hint="stop it, or choose another --store"
        ) from None
    return file
