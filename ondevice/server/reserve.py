"""Reserved disk space for deletes. On a full disk even a delete needs some: SQLite first writes its
changes.

A file holds the space. It is given up while something is deleted or the daemon starts, and taken
again afterwards. So a full disk can be emptied through the API.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "reserve"
RESERVE_BYTES = 8 << 20
"""SQLite's log has up to 4 MiB before it is written back; a part of a delete below 2 MiB."""
_STEP_BYTES = 1 << 20


class Reserve:
    """The file that holds the space; safe to share between threads."""

    def __init__(self, path: Path, size_bytes: int = RESERVE_BYTES) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._users = 0

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Let the block use the space; blocks may overlap."""
        with self._lock:
            self._users += 1
            self.path.unlink(missing_ok=True)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self.fill()

    def fill(self) -> None:
        """Take the missing space, or as much as there is."""
        with self._lock:
            if self._users:
                return
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:  # not even a file name fits
                return
            try:
                for place in range(os.fstat(file).st_size, self.size_bytes, _STEP_BYTES):
                    _allocate(file, place, _STEP_BYTES)
            except OSError:  # the disk is full: the rest is taken later
                pass
            finally:
                os.close(file)


def _allocate(file: int, place: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, place, size_bytes)
    else:  # macOS
        os.pwrite(file, bytes(size_bytes), place)
