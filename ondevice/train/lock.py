"""One run a folder: a lock that the kernel releases when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ondevice.errors import BusyError, StorageError

FILE_NAME = "run.lock"


class RunLock:
    """Holds `folder` while open; creates the folder. A context manager.

    The file that a dead process leaves behind locks nothing: the lock is `flock`'s, and the number in the
    file only says who holds it.

    Raises:
        BusyError: if another process, or another run of this process, holds the folder; it names the process.
        StorageError: if the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._file = -1

    def __enter__(self) -> RunLock:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(
                f"{self.path.parent}: the run's folder cannot be written: {error.strerror}",
                hint="choose another `train.out`",
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            os.close(self._file)
            self._file = -1
            raise BusyError(
                f"{self.path.parent}: another run holds this folder (process {holder})",
                hint=f"wait for it, stop it with `kill {holder}`, or choose another `train.out`",
            ) from None
        except OSError as error:
            os.close(self._file)
            self._file = -1
            raise StorageError(
                f"{self.path.parent}: this file system cannot lock files: {error.strerror}",
                hint="choose a `train.out` on a local disk",
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = -1

    def _holder(self) -> str:
        """The number in the file; the holder may be between taking the lock and writing it."""
        for _ in range(20):
            number = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            if number:
                return number
            time.sleep(0.01)
        return "unknown"
