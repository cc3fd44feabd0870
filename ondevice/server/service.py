"""The daemon as a service of its machine: logs, systemd's notifications, and a job's memory.

Logs do not fill the disk, and contain no secret. Without systemd its notifications do nothing. A
job's memory is measured, and limited by a cgroup if the daemon may make one: with cgroup v2 and a
delegated subtree (the unit of `ondevice serve install` requests it) the kernel enforces the limit.
Elsewhere the supervisor measures the memory several times a second and ends the job.
"""

from __future__ import annotations

import errno
import logging
import logging.handlers
import os
import re
import shutil
import socket
import sqlite3
import sys
import time
from pathlib import Path

LOG_BYTES = 2 << 20
LOG_FILES = 5
WORKER_LOG_BYTES = 4 << 20
SILENT_S = 300.0
"""Seconds in which the same error of a full disk is written once."""
_SECRET = re.compile(
    r"odt_[A-Za-z0-9]+_[A-Za-z0-9_-]+|ods_[A-Za-z0-9]+_[A-Za-z0-9_-]+|(?i:bearer)\s+\S+"
)


class Redact(logging.Filter):
    """Removes everything that looks like a token from a record, as the last line of defence."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if _SECRET.search(text):
            record.msg = _SECRET.sub("[secret]", text)
            record.args = None
        return True


class CountFullDisk(logging.Filter):
    """Writes an error of a full disk in one line without a traceback, and the same one again only
    after a while, with the times that it was seen: threads that try again would fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        shown = getattr(record, "shown", None)  # by the handler before
        if shown is None:
            shown = self._is_shown(record)
            record.shown = shown
        return shown

    def _is_shown(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not is_full(error):
            return True
        key = (record.name, str(record.msg))
        since_s, count = self._seen.get(key, (-SILENT_S, 0))
        now = time.monotonic()
        if now - since_s < SILENT_S:
            self._seen[key] = (since_s, count + 1)
            return False
        self._seen[key] = (now, 0)
        again = f" ({count} times more since)" if count else ""
        first = str(error).splitlines()[0]
        record.msg = f"{record.getMessage()}: {first}{again}"
        record.args = None
        record.exc_info = None
        record.exc_text = None  # another handler may have formatted it
        return True


def is_full(error: BaseException) -> bool:
    """Return True for an error of a full disk, in Python or in SQLite, or one that it caused."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(cause, sqlite3.Error) and "full" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


class LogFile(logging.handlers.RotatingFileHandler):
    """The daemon's log. On a full disk lines are lost, and their number is written later."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = self.lost
        super().emit(record)
        if self.lost == before and before:
            self.lost = 0
            text = "%d lines are missing here: the disk was full"
            super().emit(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (before,), None))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is None or not is_full(error):
            super().handleError(record)
            return
        self.lost += 1


def start_log(folder: Path) -> logging.handlers.RotatingFileHandler:
    """Write the daemon's log to `folder`/ondevice.log, about ten megabytes, and to stderr."""
    layout = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = LogFile(folder / "ondevice.log")
    console = logging.StreamHandler()
    counted = CountFullDisk()
    root = logging.getLogger()
    for output in (handler, console):
        output.setFormatter(layout)
        output.addFilter(Redact())
        output.addFilter(counted)
        root.addHandler(output)
    root.setLevel(logging.INFO)
    return handler


def trim(path: Path, limit_bytes: int = WORKER_LOG_BYTES) -> None:
    """Trim a log that another process appends to below twice `limit_bytes`: copy the old part, then
    empty it.

    It cannot be renamed: the worker holds it open and would go on writing to the old file.
    """
    try:
        if path.stat().st_size > limit_bytes:
            shutil.copyfile(path, path.with_name(path.name + ".1"))
            os.truncate(path, 0)
    except OSError:
        return


def tail(path: Path, count_bytes: int) -> str:
    """Return the last lines of a log and its trimmed part, without secrets."""
    content = b""
    for source in (path, path.with_name(path.name + ".1")):
        try:
            with open(source, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - count_bytes))
                content = file.read() + content
        except FileNotFoundError:
            continue
    if len(content) > count_bytes:
        content = content[-count_bytes:]
        content = content[content.find(b"\n") + 1 :]
    return _SECRET.sub("[secret]", content.decode(errors="replace"))


def notify(*lines: str) -> bool:
    """Send state lines such as `READY=1` to the service manager; return False without one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # a name in Linux's abstract namespace
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(address)
            sender.sendall("\n".join(lines).encode())
    except OSError:
        return False
    return True


def watchdog_s() -> float | None:
    """Return seconds within which the service manager expects a sign of life, or None."""
    try:
        micros = int(os.environ.get("WATCHDOG_USEC", ""))
        watched = int(os.environ.get("WATCHDOG_PID", os.getpid()))
    except ValueError:
        return None
    if micros > 0 and watched == os.getpid():
        return micros / 1e6
    return None


_ROOT = Path("/sys/fs/cgroup")
_DAEMON = "daemon"


def own_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, in bytes: anonymous, shared and swapped
    pages.

    Pages of files, such as libraries, can be dropped and do not count, as in the plan. If the
    system does not separate them, return the resident memory; 0 if the process is gone.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in family:
        try:
            total += _own(member.pid) or member.memory_info().rss
        except psutil.Error:
            continue
    return total


def _own(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) << 10
        for line in lines
        if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:"))
    )


class Cgroup:
    """A cgroup for one job at a time, or nothing if it cannot be made.

    Args:
        root: mount point of cgroup v2.
        own: this process' line of /proc/self/cgroup.
    """

    def __init__(self, root: Path = _ROOT, own: str | None = None) -> None:
        self.folder: Path | None = None
        self._home: Path | None = None
        try:
            line = Path("/proc/self/cgroup").read_text() if own is None else own
            names = [text[3:].strip("/") for text in line.splitlines() if text.startswith("0::")]
            if names and (root / "cgroup.controllers").is_file():
                self._home = self._delegated(root / names[0])
        except OSError:
            self._home = None

    @property
    def how(self) -> str:
        """Name who enforces the memory limit, for the log and for GET /v1/system."""
        return "cgroup" if self._home is not None else "watch"

    def place(self, pid: int, job: str, limit_bytes: int) -> bool:
        """Limit a process to `limit_bytes`; return False if the supervisor has to watch it."""
        if self._home is None:
            return False
        try:
            self.folder = self._home / job
            self.folder.mkdir(exist_ok=True)
            (self.folder / "memory.max").write_text(str(limit_bytes))
            if (
                self.folder / "memory.swap.max"
            ).is_file():  # a job that swaps instead of failing would slow down everything else
                (self.folder / "memory.swap.max").write_text("0")
            (self.folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            self.remove()
            return False
        return True

    def killed(self) -> bool:
        """Return True if the kernel ended a process of the job for its memory."""
        try:
            lines = []
            if self.folder:
                lines = (self.folder / "memory.events").read_text().splitlines()
        except OSError:
            return False
        return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in lines)

    def remove(self) -> None:
        """Remove the job's cgroup, once its processes are gone."""
        folder = self.folder
        self.folder = None
        try:
            if folder is not None:
                folder.rmdir()
        except OSError:
            pass

    def _delegated(self, home: Path) -> Path | None:
        """Return this daemon's cgroup, with the memory controller delegated."""
        controllers = (home / "cgroup.controllers").read_text().split()
        if "memory" not in controllers or not os.access(home / "cgroup.subtree_control", os.W_OK):
            return None
        # Only a cgroup without processes may delegate controllers (a rule of cgroup v2).
        leaf = home / _DAEMON
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        (home / "cgroup.subtree_control").write_text("+memory")
        return home
