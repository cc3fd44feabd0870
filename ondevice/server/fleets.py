"""The fleets that this machine takes part in: a device for each, in its window, never during a job.

A seat is a file that the machine's owner writes with `ondevice serve fleet`,
`STORE/fleets/NAME.json`; nobody can add one over the network. Its device is a process, `ondevice
fleet device`, with its copy of the fleet in `STORE/fleets/NAME/`.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from ondevice.artifact.files import atomic_write, private
from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError, OndeviceError
from ondevice.core.process import python_command
from ondevice.core.untrusted import read_object
from ondevice.server.jobs import Window
from ondevice.server.queue import in_window
from ondevice.server.service import own_bytes
from ondevice.server.store import ID
from ondevice.server.worker import child_environment

_log = logging.getLogger(__name__)
FOLDER = "fleets"
POLL_S = 1.0
AGAIN_S = 30.0
"""Seconds after which a device that ended by itself is started again."""
STOP_S = 40.0
LOG_BYTES = 1 << 20
Progress = Callable[[Path], dict[str, Any] | None]
NO_PROGRESS = {"fleet": None, "model": None, "rounds": 0, "hash": None, "bytes": 0, "why": ""}
OVER = "the fleet is over"
"""Its server said so. A daemon that is started again asks anew."""


class Seat(StrictConfig):
    """The settings of a daemon as a device of a fleet."""

    data: str
    """Its rows, which stay on this machine."""

    host: str = "127.0.0.1"
    """The fleet's server."""

    port: int = 9092
    """Its port."""

    certificates: str | None = None
    """Folder with ca.crt."""

    key: str | None = None
    """This device's private key."""

    insecure: bool = False
    """No TLS: on one machine only."""

    model: str | None = None
    """The base model, by this machine's name for it."""

    batch_size: int = 4
    """Rows a step."""

    task: str | None = None
    """How its rows are read; the charter's task by default."""

    columns: dict[str, str] | None = None
    """The columns of its rows' fields."""

    epsilon: float | None = Field(default=None, ge=0)
    """Privacy budget at which it stops; 8 by default in a fleet with noise."""

    strict_columns: bool = False
    """Refuse rows with a column or key that nothing reads."""

    window: Window | None = None
    """Daily window in which it may train; None for always. A round goes on without it."""

    memory_bytes: int | None = None
    """Memory limit. A device that exceeds it is stopped, and starts again later."""

    def arguments(self, folder: Path) -> list[str]:
        """Return the flags of `ondevice fleet device`."""
        found = ["--data", self.data, "--out", str(folder), "--host", self.host, "--port", str(self.port),
                 "--batch-size", str(self.batch_size)]  # fmt: skip
        for name in ("certificates", "key", "model", "task"):
            value = getattr(self, name)
            found += [f"--{name}", value] if value is not None else []
        if self.epsilon is not None:
            found += ["--epsilon", str(self.epsilon)]
        for name, column in (self.columns or {}).items():
            found += ["--column", f"{name}={column}"]
        found += ["--strict-columns"] if self.strict_columns else []
        if self.insecure:
            return [*found, "--insecure"]
        return found


@dataclass
class Running:
    """A seat's device, or the reason why it does not run."""

    process: subprocess.Popen[bytes] | None = None
    why: str = "starts soon"
    not_before: float = 0.0
    stopping: float = field(default=0.0)


def write_seat(root: Path, name: str, seat: Seat | None) -> Path:
    """Write a seat, or remove it; the store's daemon notices within a second.

    Raises:
        ConfigError: the name is invalid, or the seat to remove does not exist.
    """
    path = root / FOLDER / f"{name}.json"
    if not ID.fullmatch(name) or ".." in name:
        raise ConfigError(
            "no such name", expected="small letters, digits, '.', '_' and '-'", received=name
        )
    if seat is not None:
        with private():  # it names this machine's rows and its key
            atomic_write(path, seat.model_dump_json(indent=1) + "\n")
    elif path.is_file():
        path.unlink()
    else:
        raise ConfigError(f"this machine does not take part in fleet {name}", expected=str(path))
    return path


class Fleets(threading.Thread):
    """Starts and stops the devices of a store's seats.

    Args:
        root: the store's folder.
        busy: returns True while a job runs: jobs come first.
        progress: returns how far the device in a folder is, None before its first message. The
            command line provides it: the daemon itself imports nothing of fleets.
        clock: local time, seconds.
    """

    def __init__(
        self,
        root: Path,
        busy: Callable[[], bool],
        progress: Progress = lambda folder: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name="fleets", daemon=True)
        self.folder = root / FOLDER
        self.busy = busy
        self.clock = clock
        self.progress = progress
        self.running: dict[str, Running] = {}
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.wait(POLL_S):
            try:
                self.turn()
            except Exception:
                _log.exception("fleets failed; trying again in %s s", POLL_S)

    def stop(self) -> None:
        """Stop every device; its results so far are in its file."""
        self._ending.set()
        if self.is_alive():
            self.join(STOP_S)
        for running in self.running.values():
            _end(running, time.monotonic(), wait=True)

    def seats(self) -> dict[str, Seat]:
        """Return the seats by name, without those that cannot be read, which are reported."""
        found = {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                found[path.stem] = Seat.parse(read_object(path, ConfigError), str(path))
            except (OSError, ValueError, OndeviceError) as error:
                self.running.setdefault(
                    path.stem, Running()
                ).why = f"the seat cannot be read: {error}"
        return found

    def turn(self) -> None:
        """Check every seat once: start the devices that may run, stop the others, note why."""
        seats = self.seats()
        now = time.monotonic()
        for name in [name for name in self.running if name not in seats]:
            if _end(self.running[name], now):
                del self.running[name]
        for name, seat in seats.items():
            running = self.running.setdefault(name, Running())
            process = running.process
            if process is not None and process.poll() is not None:
                if not running.stopping and process.returncode == 0:
                    running.not_before = math.inf
                    running.why = OVER
                elif not running.stopping:
                    running.not_before = now + AGAIN_S
                    running.why = (
                        self._last_line(name) or f"it ended with status {process.returncode}"
                    )
                running.process = None
                running.stopping = 0.0
            refusal = self._refusal(seat, running)
            if refusal:
                running.why = refusal
                _end(running, now)
            elif running.process is None and now >= running.not_before:
                self._start(name, seat, running)

    def _refusal(self, seat: Seat, running: Running) -> str:
        if not in_window(seat.model_dump(), self.clock()):
            return "outside its window"
        if self.busy():
            return "a job runs"
        if (
            running.process is not None
            and seat.memory_bytes
            and own_bytes(running.process.pid) > seat.memory_bytes
        ):
            running.not_before = time.monotonic() + AGAIN_S
            return "it used more memory than its limit"
        return ""

    def _start(self, name: str, seat: Seat, running: Running) -> None:
        own = self.folder / name
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = own / "device.log"
        with open(
            path, "ab" if path.is_file() and path.stat().st_size < LOG_BYTES else "wb"
        ) as log:
            running.process = subprocess.Popen(
                python_command("-m", "ondevice.server.fleet_child", str(os.getpid()), *seat.arguments(own)),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=child_environment(),
            )  # fmt: skip
        running.why = ""
        running.stopping = 0.0

    def _last_line(self, name: str) -> str:
        path = self.folder / name / "device.log"
        lines = []
        if path.is_file():
            lines = path.read_text(errors="replace").strip().splitlines()
        said = [line for line in lines if line.startswith("error: ")]
        return (said or lines or [""])[-1][:300]

    def table(self) -> list[dict[str, Any]]:
        """Return the response to GET /v1/fleets: one entry per seat."""
        seats = self.seats()
        rows = []
        for name in sorted({*seats, *self.running}):
            running = self.running.get(name, Running())
            seat = seats.get(name)
            rows.append({
                "name": name, "running": running.process is not None,
                "server": f"{seat.host}:{seat.port}" if seat else None,
                "window": seat.window.model_dump() if seat and seat.window else None,
                **self._progress(name, running),
            })  # fmt: skip
        return rows

    def _progress(self, name: str, running: Running) -> dict[str, Any]:
        """Return a device's progress, and why it does not run; or else why it has no server, or did
        not reply in its last round."""
        found = NO_PROGRESS | (self.progress(self.folder / name) or {})
        if running.process is None or running.why:
            found["why"] = running.why
        return found


def _end(running: Running, now: float, wait: bool = False) -> bool:
    """Ask a device to stop, and kill it if it does not; return True once it is gone."""
    process = running.process
    if process is None or process.poll() is not None:
        running.process = None
        return True
    try:
        if not running.stopping:
            running.stopping = now
            os.killpg(process.pid, signal.SIGTERM)
        elif now - running.stopping > STOP_S:
            os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if wait:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        running.process = None
        return True
    return False
