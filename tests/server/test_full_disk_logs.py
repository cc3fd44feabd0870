"""A full disk in the logs and in a store's errors."""

from __future__ import annotations

import errno
import io
import logging
import sqlite3

from ondevice.core.errors import (
    StorageError,
)
from ondevice.server import service


def test_a_full_disk_is_one_line_in_the_log_with_its_count(tmp_path, monkeypatch) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    log = logging.getLogger("a thread")
    seconds = 1000.0
    monkeypatch.setattr(service.time, "monotonic", lambda: seconds)

    def fail(error: Exception) -> None:
        try:
            raise error
        except Exception:
            log.exception("housekeeping failed; trying again")

    try:
        service.start_log(tmp_path)
        for _ in range(100):
            fail(OSError(errno.ENOSPC, "No space left on device"))
        seconds += service.SILENT_S
        fail(OSError(errno.ENOSPC, "No space left on device"))
        fail(ValueError("a bug"))
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
    text = (tmp_path / "ondevice.log").read_text()
    assert text.count("No space left") == 2 and "(99 times more since)" in text
    assert text.count("Traceback") == 1 and "ValueError: a bug" in text


class FullDisk(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_that_a_full_disk_took_are_counted_in_the_log(tmp_path, capsys) -> None:
    log = service.LogFile(tmp_path / "ondevice.log")
    record = logging.LogRecord("x", logging.INFO, "", 0, "a line", (), None)
    log.emit(record)
    log.maxBytes = 0  # no rotation, whose file is another
    stream = log.stream
    log.stream = FullDisk()  # type: ignore[assignment]
    for _ in range(3):
        log.emit(record)
    log.stream = stream
    log.emit(record)
    log.close()
    assert (tmp_path / "ondevice.log").read_text().splitlines() == [
        "a line",
        "a line",
        "3 lines are missing here: the disk was full",
    ]
    assert "Traceback" not in capsys.readouterr().err


def test_a_store_s_error_of_a_full_disk_is_one() -> None:
    def stored(cause: Exception) -> Exception:
        try:
            try:
                raise cause
            except Exception:
                raise StorageError("the store cannot be written") from None
        except StorageError as error:
            return error

    assert service.is_full(stored(sqlite3.OperationalError("database or disk is full")))
    assert service.is_full(stored(OSError(errno.ENOSPC, "No space left on device")))
    assert not service.is_full(stored(sqlite3.OperationalError("database is locked")))
    assert not service.is_full(stored(PermissionError(errno.EACCES, "Permission denied")))
