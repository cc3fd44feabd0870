"""Ways between host memory and the drive: aligned buffers, and files past the page cache."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ondevice.core.errors import StorageError
from ondevice.offload.device import BLOCK_BYTES

Backend = Literal["auto", "direct", "buffered"]
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would pass the size limit of this process or file system",
    errno.EIO: "the disk reports an I/O error",
}


def reason(error: OSError) -> str:
    """Return the system's reason in words that a user knows."""
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


def checksum(chunk: torch.Tensor) -> bytes:
    """Return 16 bytes from the sums (modulo 2^64) of a chunk's 4096-byte rows and of its 512
    columns of 8-byte words.

    Runs at memory speed. Finds for certain (but for a collision of BLAKE2b) every change inside one
    4096-byte block, every change inside one column, and blocks that changed places unless their
    sums are equal. What escapes changes at least four words, in two blocks and two columns at once,
    such that every sum stays. No defence against somebody who forges.

    Args:
        chunk: uint8 on the CPU, contiguous, a multiple of 4096 bytes.
    """
    table = chunk.numpy().view(np.int64).reshape(-1, BLOCK_BYTES // 8)
    digest = hashlib.blake2b(digest_size=16)
    for axis in (1, 0):
        digest.update(table.sum(axis).data)
    return digest.digest()


@dataclass
class Meter:
    """Bytes moved, and the seconds during which at least one transfer of the kind was under way."""

    moved: int = 0
    seconds: float = 0.0
    running: int = 0
    since: float = 0.0

    def run(self, change: int) -> None:
        now = time.perf_counter()
        self.seconds += now - self.since if self.running else 0.0
        self.since = now
        self.running = self.running + change


def reserve(path: Path, size_bytes: int) -> None:
    """Make a file of zeros with all of its blocks allocated, in place of one that is there.

    Raises:
        StorageError: the disk has no room, or the folder cannot be written. No partial file is
            left.
    """
    free = None
    created = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < size_bytes:  # rather than fill the disk to find out
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        created = True
        try:
            os.truncate(file, size_bytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size_bytes)
        finally:
            os.close(file)
    except OSError as error:
        if created:
            path.unlink(missing_ok=True)
        raise StorageError(
            f"{path}: the offload file cannot be made: {reason(error)}",
            expected=f"room for {size_bytes} bytes ({size_bytes / 2**30:.2f} GiB)",
            received=None if free is None else f"{free} bytes free ({free / 2**30:.2f} GiB)",
            hint="free some space, choose a folder on another disk, or offload less",
        ) from error


class Drive:
    """An open file, moved to and from tensors in whole blocks. Its methods may be called from
    several threads.

    Attributes:
        backend: "direct" (past the page cache), or "buffered" (the file system refused that, or it
            was asked for).

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, backend: Backend) -> None:
        try:
            self._file, self.backend = _open(path, direct=backend != "buffered")
        except OSError as error:
            raise StorageError(
                f"{path}: the offload file cannot be opened: {reason(error)}"
            ) from error

    def move(self, chunk: torch.Tensor, offset: int, *, write: bool) -> int:
        """Move `chunk` (uint8, contiguous, whole blocks) to or from byte `offset`, without a copy
        in Python.

        Returns:
            The bytes moved: fewer than the chunk has at the end of the file or if the drive
                stopped.

        Raises:
            OSError: what the system reports.
        """
        call = os.pwritev if write else os.preadv
        view = chunk.numpy().data
        done = 0
        while done < len(view):
            count = call(self._file, [view[done:]], offset + done)
            done += count
            if count == 0 or done % BLOCK_BYTES:  # no disk stops inside a block unless it must
                break
        return done

    def close(self) -> None:
        """Close it; no transfer may be under way."""
        os.close(self._file)


def _open(path: Path, *, direct: bool) -> tuple[int, str]:
    flags = os.O_RDWR | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        try:
            file = os.open(path, flags | os.O_DIRECT)
            try:
                os.preadv(file, [mmap.mmap(-1, BLOCK_BYTES)], 0)  # some refuse only here
                return file, "direct"
            except OSError:
                os.close(file)
                raise
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    file = os.open(path, flags)
    if direct and hasattr(fcntl, "F_NOCACHE"):  # macOS
        fcntl.fcntl(file, getattr(fcntl, "F_NOCACHE"), 1)  # noqa: B009
    return file, "buffered"
