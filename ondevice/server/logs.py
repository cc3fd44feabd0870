"""Logs that do not fill the disk, and say no secret."""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import shutil
from pathlib import Path

LOG_BYTES, LOG_FILES = 2 << 20, 5
WORKER_LOG_BYTES = 4 << 20
_SECRET = re.compile(r"odt_[A-Za-z0-9]+_[A-Za-z0-9_-]+|ods_[A-Za-z0-9]+_[A-Za-z0-9_-]+|(?i:bearer)\s+\S+")


class Redact(logging.Filter):
    """Takes everything that looks like a token out of a record, as the last line of defence."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if _SECRET.search(text):
            record.msg, record.args = _SECRET.sub("[secret]", text), None
        return True


def start_log(folder: Path) -> logging.handlers.RotatingFileHandler:
    """Write the daemon's log to `folder`/ondevice.log, some ten megabytes in all, and to standard error."""
    form = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.handlers.RotatingFileHandler(
        folder / "ondevice.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8"
    )
    console = logging.StreamHandler()
    root = logging.getLogger()
    for each in (handler, console):
        each.setFormatter(form)
        each.addFilter(Redact())
        root.addHandler(each)
    root.setLevel(logging.INFO)
    return handler


def trim(path: Path, limit_bytes: int = WORKER_LOG_BYTES) -> None:
    """Keep a log that another process appends to below twice `limit_bytes`: a copy of the old part, then from zero."""
    try:
        if path.stat().st_size > limit_bytes:
            shutil.copyfile(path, path.with_name(path.name + ".1"))
            os.truncate(path, 0)
    except OSError:
        return


def tail(path: Path, count_bytes: int) -> str:
    """The last bytes of a log and of its trimmed part, from the beginning of a line."""
    content = b""
    for part in (path, path.with_name(path.name + ".1")):
        try:
            with open(part, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - count_bytes))
                content = file.read() + content
        except FileNotFoundError:
            continue
    if len(content) > count_bytes:
        content = content[-count_bytes:]
        content = content[content.find(b"\n") + 1 :]
    return _SECRET.sub("[secret]", content.decode(errors="replace"))
