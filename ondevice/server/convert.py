"""The conversion of an adapter in a helper process: its stages, and the check of the result."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ondevice.core.errors import OndeviceError, StorageError
from ondevice.exits import convert as write
from ondevice.exits.base import form_of
from ondevice.exits.check import PROMPTS
from ondevice.models import read_dims
from ondevice.planning.estimate import weight_bytes
from ondevice.server.room import check_room_here, needs

SPARE_BYTES = 256 << 20
"""Bytes that a conversion leaves free on the disk, for jobs and the database."""
_BYTES = {"float32": 4.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_k_m": 26 / 32, "q5_k_m": 28 / 32,
          "q6_k": 34 / 32, "4bit": 36 / 64, "8bit": 68 / 64}  # fmt: skip
"""Bytes per element, about; two for every other type."""


def convert(
    source: str, to: str, out: str, model: str | None, dtype: str | None, job: dict[str, Any] | None
) -> Generator[dict[str, str], None, dict[str, Any]]:
    """Convert; yield `{"stage": text}`, and return the report without paths.

    Args:
        source: the adapter's folder.
        to, dtype, model: as `ondevice.exits.convert` takes them; a model is a source string.
        out: the file or folder to write. Its parent becomes the working folder, so that texts name
            no other path.
        job: of `server.daemon.running_job`.

    Raises:
        BusyError: it does not fit next to the running job.
        StorageError: not enough space on the disk.
        OndeviceError: what `ondevice.exits.convert` raises.
    """
    place = Path(out)
    form = form_of(to)
    if model is not None:
        _check_room(model, dtype or next(iter(form.dtypes), ""), form.merged, place.parent, job)
    told: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
    ended: list[Any] = []

    def work() -> None:
        try:
            ended.append(write(source, to, place.name, model=model, dtype=dtype).to_dict())
        except BaseException as error:  # raised again below, in the thread of the call
            ended.append(error)
        told.put(None)

    handler = _Stages(told)
    logger = logging.getLogger("ondevice")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    before = os.getcwd()
    os.chdir(place.parent)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while (stage := told.get()) is not None:
            yield stage
        thread.join()
    finally:
        os.chdir(before)
        logger.removeHandler(handler)
    if isinstance(ended[0], OndeviceError):
        raise _without(ended[0], source, Path(source).name)
    if isinstance(ended[0], BaseException):
        raise ended[0]
    report: dict[str, Any] = ended[0]
    for field in ("out", "adapter", "model"):
        del report[field]
    report["notes"] = [note.replace(f"{place.parent}{os.sep}", "") for note in report["notes"]]
    return report


class _Stages(logging.Handler):
    """Put the log messages of the exits into a queue."""

    def __init__(self, told: queue.SimpleQueue[dict[str, str] | None]) -> None:
        super().__init__(logging.INFO)
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self.told.put({"stage": record.getMessage()})


def _without(error: OndeviceError, path: str, name: str) -> OndeviceError:
    """Name the adapter, not its folder on this machine."""
    error.message = error.message.replace(path, name)
    return error


def _check_room(
    model: str, dtype: str, merged: bool, place: Path, job: dict[str, Any] | None
) -> None:
    """Refuse a conversion that does not fit into memory next to the job, or onto the disk."""
    dims = read_dims(model)
    weights = sum(weight_bytes(dims, "float32"))
    if job is not None:
        parts = needs(dims, weights, "float32", max(map(len, PROMPTS)), "cpu")
        if merged:
            parts["weights, read back"] = weights
        check_room_here(parts, "cpu", job)
    need = 0
    if merged:
        need = int(weights / 4 * _BYTES.get(dtype, 2.0))
    free = shutil.disk_usage(place).free
    if need + SPARE_BYTES > free:
        raise StorageError(
            "not enough space on the disk", expected=f"{need} bytes", received=f"{free} free"
        )
