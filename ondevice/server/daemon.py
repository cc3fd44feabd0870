"""The daemon of one store: queue, supervisor, streams, helper processes, metrics."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ondevice.core.errors import BusyError, OndeviceError, StorageError
from ondevice.server import uploads
from ondevice.server.adapters import link_active
from ondevice.server.conversions import Conversions
from ondevice.server.engine.engine import Engine
from ondevice.server.events import Hub
from ondevice.server.fleets import Fleets, Progress
from ondevice.server.helper import Helper
from ondevice.server.metrics import Metrics
from ondevice.server.pools import Pools
from ondevice.server.queue import Queue
from ondevice.server.recent import Recent
from ondevice.server.store import MissingError, Store
from ondevice.server.supervisor import Supervisor
from ondevice.server.worker import JOB

_log = logging.getLogger(__name__)
LOCK = "serve.lock"
HOUSEKEEPING_S = 30.0
HUNG_S = 60.0
"""Longest turn of the supervisor, in seconds. It announces a turn that takes longer."""
LOST = "lost"
LOST_KEPT_S = 30 * 24 * 3600.0
"""The folder for folders that the database does not know, and seconds until their deletion."""


class Daemon:
    """A store that this process serves; no other process can serve it meanwhile.

    Args:
        root: the store's folder.
        fleet_progress: see `Fleets`.
        allows_unknown_fields: requests for completions may have fields that nobody knows.
        rewards: see `Store.rewards`.

    Raises:
        BusyError: another daemon serves this store.
    """

    def __init__(
        self,
        root: str | Path,
        fleet_progress: Progress = lambda folder: None,
        allows_unknown_fields: bool = False,
        rewards: Iterable[str] = (),
    ) -> None:
        self.store = Store(root)
        self.store.rewards = frozenset(rewards)
        self.allows_unknown_fields = allows_unknown_fields
        self._lock = _locked(self.store.root / LOCK)
        self.hub = Hub(self.store)
        self.queue = Queue(self.store, self._changed)
        self.data_helper = Helper("data")
        self.plan_helper = Helper(
            "plan"
        )  # a separate process: this one loads frameworks, and checking a large file takes minutes
        self.helpers = (self.data_helper, self.plan_helper)
        self.engine = Engine(lambda: running_job(self))
        self.recent = Recent()
        # A model that is still loaded must not take the memory of a job that starts.
        self.supervisor = Supervisor(self.store, self.queue, make_room=self.engine.end_if_idle)
        self.fleets = Fleets(
            self.store.root, lambda: self.supervisor.running is not None, fleet_progress
        )
        self.conversions = Conversions(self.store, lambda: running_job(self))
        self.metrics = Metrics(self.store.root, self.queue, self.supervisor, self.hub, self.engine)
        self.pools = Pools()
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="housekeeping", daemon=True)

    def start(self) -> None:
        """Clean up after the previous daemon, and run the queue."""
        # Rows and folders must agree before the first worker starts; a killed daemon leaves them
        # apart.
        with self.store.reserve.given_up():
            try:
                self.supervisor.recover()
                self.queue.delete_lost_events()
                self.store.clock.keep(at_once=True)
                sweep(self.store)
                link_active(self.store)
            except (
                OndeviceError,
                OSError,
            ) as error:  # a full disk: users can delete something only if the daemon runs
                _log.error("cannot clean up the store now: %s", error)
            self.conversions.start()
        self.supervisor.start()
        self.fleets.start()
        self._keeper.start()

    def stop(self) -> None:
        """Let the worker save its state, then close everything."""
        self._closing.set()
        self.fleets.stop()
        if self.supervisor.is_alive():
            self.supervisor.stop()
        self.conversions.stop()
        self.engine.close()
        for helper in self.helpers:
            helper.close()
        try:
            self.store.clock.keep(at_once=True)
        except StorageError as error:  # a full disk: the next start counts from the last saved time
            _log.warning("cannot save the store's time: %s", error)
        self.store.close()
        os.close(self._lock)

    @property
    def alive(self) -> bool:
        """True while the supervisor works; the watchdog and GET /v1/health report it."""
        return self.supervisor.is_alive() and time.monotonic() - self.supervisor.beat < HUNG_S

    def check(self, call: str, **arguments: Any) -> Any:
        """Check an upload in the helper process for its kind."""
        return (self.data_helper if call == "validate" else self.plan_helper)(call, **arguments)

    def _changed(self, job: str) -> None:
        self.supervisor.wake()
        self.hub.changed(job)

    def _keep(self) -> None:
        while not self._closing.wait(HOUSEKEEPING_S):
            for helper in self.helpers:
                helper.end_if_idle()
            self.engine.tidy()
            try:
                self.store.reserve.fill()
                uploads.expire(self.store)
                self.conversions.tidy()
                self.store.clock.keep()
            except Exception:
                _log.exception("housekeeping failed; trying again")


def running_job(daemon: Daemon) -> dict[str, Any] | None:
    """Return the running job: `id`, `config` and `artifact` to plan it by, and the bytes it takes.

    `memory_bytes` are of this machine's memory, `peak_device_bytes` of its device's.
    """
    running = daemon.supervisor.running
    if running is None:
        return None
    try:
        values = json.loads((daemon.store.path("jobs", running.job) / JOB).read_text())
        progress = daemon.queue.get(running.job).progress
    except (MissingError, OSError):  # it has ended, and was deleted
        return None
    return {
        "id": running.job,
        "config": values["config"],
        "artifact": values["artifact"],
        "memory_bytes": running.memory_bytes,
        "peak_device_bytes": progress.get("peak_device_bytes") or 0,
    }


def sweep(store: Store) -> None:
    """Move folders that the database does not know to `lost`, and delete those moved long ago.

    A killed daemon leaves a folder that has no row yet. If the database was lost, or is older than
    the
    folders, they are the only copy: so they are moved, not deleted.
    """
    uploads.recover(store)
    store.clock.forget_missing()
    for kind in ("datasets", "adapters", "jobs"):
        ids = {row["id"] for row in store.rows(f"SELECT id FROM {kind}")}
        lost = store.root / LOST / kind
        for folder in [*lost.iterdir()] if lost.is_dir() else []:
            if store.clock.age_s(f"{LOST}/{kind}/{folder.name}") > LOST_KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in [*(store.root / kind).iterdir()]:
            if folder.name.startswith("."):  # incomplete
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.name not in ids and not (lost / folder.name).exists():
                try:
                    lost.mkdir(parents=True, exist_ok=True, mode=0o700)
                    os.rename(folder, lost / folder.name)
                    store.clock.renew(f"{LOST}/{kind}/{folder.name}")  # its thirty days start now
                    _log.warning(
                        "%s/%s is not in the database: moved to %s", kind, folder.name, lost
                    )
                except OSError as error:
                    _log.warning(
                        "%s/%s is not in the database, and stays: %s", kind, folder.name, error
                    )


def _locked(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise BusyError(
            f"{path.parent}: another daemon serves this store",
            hint="stop it, or choose another --store",
        ) from None
    return file
