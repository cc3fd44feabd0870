"""A job's memory: how much its processes take, and a cgroup of its own where this daemon may make one.

With cgroup v2 and a delegated subtree (the unit of `ondevice serve install` asks for it) the kernel keeps the
limit. Elsewhere the supervisor looks at the processes' own memory several times a second and ends the job.
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_DAEMON = "daemon"


def own_bytes(pid: int) -> int:
    """Memory of a process and its descendants that nobody else has: anonymous, shared memory and what is swapped out.

    Pages of files, such as libraries, can be dropped and do not count, as in the plan. Where the system does not
    tell them apart it is the resident memory. 0 when the process is gone.
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
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")))


class Cgroup:
    """A cgroup for one job at a time, or nothing where it cannot be made.

    Args:
        root: where cgroup v2 is mounted.
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
        """Who keeps the memory limit: for the log and for GET /v1/system."""
        return "cgroup" if self._home is not None else "watch"

    def place(self, pid: int, job: str, limit_bytes: int) -> bool:
        """Put a process under `limit_bytes`; False where the watch has to do."""
        if self._home is None:
            return False
        try:
            self.folder = self._home / job
            self.folder.mkdir(exist_ok=True)
            (self.folder / "memory.max").write_text(str(limit_bytes))
            if (self.folder / "memory.swap.max").is_file():
                (self.folder / "memory.swap.max").write_text("0")
            (self.folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            self.remove()
            return False
        return True

    def killed(self) -> bool:
        """Whether the kernel ended a process of the job for its memory."""
        try:
            lines = (self.folder / "memory.events").read_text().splitlines() if self.folder else []
        except OSError:
            return False
        return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in lines)

    def remove(self) -> None:
        """Forget the job's cgroup, once its processes are gone."""
        folder, self.folder = self.folder, None
        try:
            if folder is not None:
                folder.rmdir()
        except OSError:
            pass

    def _delegated(self, home: Path) -> Path | None:
        """This daemon's cgroup with the memory controller handed down, itself moved to a leaf."""
        controllers = (home / "cgroup.controllers").read_text().split()
        if "memory" not in controllers or not os.access(home / "cgroup.subtree_control", os.W_OK):
            return None
        leaf = home / _DAEMON
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        (home / "cgroup.subtree_control").write_text("+memory")
        return home
