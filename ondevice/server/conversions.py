"""Conversions of the store's adapters for other programs: one at a time, in a separate helper
process.

A conversion is a row and a folder of the store. The folder holds the one file to download: the
result, or a zip of it if it is a folder. A conversion that failed, or that the daemon's end
interrupted, keeps its row with the reason, and has no folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from ondevice.core.config import StrictConfig
from ondevice.core.errors import BusyError, ConfigError, OndeviceError, StorageError, TrainingError
from ondevice.exits.base import Form, form_names, form_of
from ondevice.server.adapters import get_adapter, zipped
from ondevice.server.helper import Helper
from ondevice.server.jobs import adapter_folder, locate_model
from ondevice.server.store import MissingError, Store, new_id

_log = logging.getLogger(__name__)
STAGE_S = 3600.0
"""Longest silence of a conversion, in seconds: a large model is read or written in one stage."""
STOP_S = 10.0
KEPT_S = 24 * 3600.0
WAITING = "waiting"
RUNNING = "running"
DONE = "done"
FAILED = "failed"


class ConversionRequest(StrictConfig):
    """The body of POST /v1/conversions."""

    adapter: str = Field(max_length=64)
    """An adapter of GET /v1/adapters."""

    to: str = Field(max_length=40, json_schema_extra={"enum": list(form_names())})
    """A format of GET /v1/forms."""

    model: str | None = Field(default=None, min_length=1, max_length=200)
    """The base model, one of GET /v1/models; None for the one that the adapter was trained on."""

    dtype: str | None = Field(default=None, max_length=20)
    """Type of the written weights; None for the format's first."""


def forms() -> list[dict[str, Any]]:
    """List the formats of `ondevice convert --to`."""
    found = [form_of(name) for name in form_names()]
    return [
        {"name": form.name, "reader": form.reader, "dtypes": [one for one in form.dtypes if one],
         "merged": form.merged, "needs_model": form.needs_model, "folder": form.marker is not None}
        for form in found
    ]  # fmt: skip


class Conversions:
    """The conversions of a store, and the thread that works on them.

    Args:
        running_job: called before each conversion for the job next to which it must fit; see
            `server.engine.model.hold`.
    """

    def __init__(self, store: Store, running_job: Callable[[], dict[str, Any] | None]) -> None:
        self.store = store
        self.running_job = running_job
        self.helper = Helper("conversion", timeout_s=STAGE_S)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._present: str | None = None
        self._turning = threading.Lock()
        """Held while `_present` changes or is ended, so that the next one is not ended instead."""
        self._thread = threading.Thread(target=self._run, name="conversions", daemon=True)

    def start(self) -> None:
        """Clean up after the previous daemon, and start to work."""
        cut = TrainingError(
            "the daemon ended during the conversion", hint="convert again"
        ).to_dict()
        try:
            with self.store.transaction() as db:
                db.execute(
                    "UPDATE conversions SET state = ?, error = ? WHERE state = ?",
                    (FAILED, json.dumps(cut), RUNNING),
                )
            self.tidy()
        except StorageError as error:  # a full disk: the housekeeping tries again
            _log.error("cannot clean up conversions now: %s", error)
        self._thread.start()

    def stop(self) -> None:
        """Stop the present conversion, and delete its output."""
        self._closing.set()
        self._wake.set()
        deadline = time.monotonic() + STOP_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self.helper.interrupt()  # again: it may be about to start its process
            self._thread.join(0.1)
        self.helper.close()

    def create(self, request: ConversionRequest) -> dict[str, Any]:
        """Queue a conversion; return its row.

        Raises:
            ConfigError: an unknown format or dtype, or no model although the format needs one.
            MissingError: no such adapter or model.
        """
        form = form_of(request.to)
        adapter = get_adapter(self.store, request.adapter)
        if request.dtype is not None and request.dtype not in filter(None, form.dtypes):
            expected = ", ".join(filter(None, form.dtypes)) or "none: this format keeps the numbers"
            raise ConfigError(f"dtype for {form.name}", expected=expected, received=request.dtype)
        model = request.model or adapter["base_model"] or None
        if model is None and form.needs_model:
            raise ConfigError(
                "the adapter does not name its model", expected="a model of GET /v1/models"
            )
        if model is not None:
            locate_model(self.store, model)
        name = new_id("exit")
        with self.store.transaction() as db:
            query = "INSERT INTO conversions (id, adapter, form, model, dtype, state, created_s) VALUES (?,?,?,?,?,?,?)"
            db.execute(
                query,
                (name, request.adapter, form.name, model, request.dtype, WAITING, time.time()),
            )
            self.store.clock.renew(f"exits/{name}")
        self._wake.set()
        return self.get(name)

    def page(self, limit: int, after: str | None = None) -> tuple[list[dict[str, Any]], bool]:
        """Return up to `limit` conversions after `after`, the newest first, and whether there are
        more.

        Raises:
            ConfigError: `after` is not in the list.
        """
        rows, more = self.store.page("conversions", "-number", limit, after)
        return [_public(row) for row in rows], more

    def get(self, name: str) -> dict[str, Any]:
        """Return a conversion; raise MissingError if it does not exist."""
        row = self.store.row("SELECT * FROM conversions WHERE id = ?", name)
        if row is None:
            raise MissingError(f"no such conversion: {name}", hint="GET /v1/conversions lists them")
        return _public(row)

    def file(self, name: str) -> Path:
        """Return the file to download; raise BusyError if it does not exist yet or any more."""
        conversion = self.get(name)
        if conversion["state"] != DONE:
            raise BusyError(
                f"conversion {name} is {conversion['state']}", expected="a conversion that is done"
            )
        return self.store.path("exits", name) / conversion["file"]

    def remove(self, name: str) -> None:
        """Delete a conversion and its output; a running one is stopped first."""
        self.get(name)
        with self.store.transaction(frees=True) as db:
            db.execute("DELETE FROM conversions WHERE id = ?", (name,))
        with self._turning:
            running = self._present == name
            if running:
                self.helper.interrupt()  # its thread takes the folder away
        if not running:
            self.store.discard("exits", name)

    def tidy(self) -> None:
        """Delete old conversions, by the store's clock, and folders of unfinished ones."""
        ended = self.store.rows("SELECT id FROM conversions WHERE state IN (?, ?)", DONE, FAILED)
        old = [
            (row["id"],) for row in ended if self.store.clock.age_s(f"exits/{row['id']}") > KEPT_S
        ]
        with self.store.transaction(frees=True) as db:
            db.executemany("DELETE FROM conversions WHERE id = ?", old)
        folders = [
            *(self.store.root / "exits").iterdir()
        ]  # first: one that is made now already has its row
        known = {
            row["id"]
            for row in self.store.rows(
                "SELECT id FROM conversions WHERE state IN (?, ?)", DONE, RUNNING
            )
        }
        for folder in folders:
            if folder.name not in known and folder.name != self._present:
                shutil.rmtree(folder, ignore_errors=True)

    def _run(self) -> None:
        while not self._closing.is_set():
            row = self.store.row(
                "SELECT * FROM conversions WHERE state = ? ORDER BY number LIMIT 1", WAITING
            )
            if row is None:
                self._wake.wait()
                self._wake.clear()
                continue
            with self._turning:
                self._present = row["id"]
            try:
                self._convert(dict(row))
            except Exception as error:
                _log.exception("conversion %s failed", row["id"])
                self._fail(
                    row["id"],
                    TrainingError(f"the conversion failed: {type(error).__name__}: {error}"),
                )
            finally:
                with self._turning:
                    self._present = None
                self.helper.end_if_idle(0.0)  # the next conversion does not need its model

    def _convert(self, row: dict[str, Any]) -> None:
        name = row["id"]
        form = form_of(row["form"])
        if not self._set(name, state=RUNNING, stage="starting"):
            return
        folder = self.store.path("exits", name)
        try:
            folder.mkdir(mode=0o700)
            source = str(adapter_folder(self.store, row["adapter"]))
            model = None
            if row["model"] is not None:
                model = locate_model(self.store, row["model"])
            written = folder / file_name(row["adapter"], form)
            parts = self.helper.stream(
                "convert", source=source, to=form.name, out=str(written), model=model, dtype=row["dtype"],
                job=self.running_job(),
            )  # fmt: skip
            while True:
                try:
                    if not self._set(
                        name, stage=next(parts)["stage"]
                    ):  # deleted, perhaps before it had a process
                        self.helper.interrupt()
                        parts.close()
                        self.store.discard("exits", name)
                        return
                except StopIteration as end:
                    report = end.value
                    break
            if form.marker is not None:
                self._set(name, stage="packing")
                packed = zipped(written, folder)
                shutil.rmtree(written)
                os.replace(packed, written := written.with_name(f"{written.name}.zip"))
            values = {
                "report": json.dumps(report),
                "file": written.name,
                "bytes": written.stat().st_size,
            }
            if not self._set(name, state=DONE, stage="", **values):
                self.store.discard("exits", name)  # it was deleted meanwhile
        except (OndeviceError, OSError) as error:
            self._fail(
                name, error if isinstance(error, OndeviceError) else TrainingError(str(error))
            )

    def _fail(self, name: str, error: OndeviceError) -> None:
        """Keep only the reason. When the daemon stops, waiting conversions stay; a running one is
        marked at the next start."""
        self.store.discard("exits", name)
        if not self._closing.is_set():
            self._set(name, state=FAILED, stage="", error=json.dumps(error.to_dict()))

    def _set(self, name: str, **values: Any) -> bool:
        """Change a row; return False if it is gone."""
        fields = ", ".join(f"{field} = ?" for field in values)
        with self.store.transaction(durable="state" in values) as db:
            return bool(
                db.execute(
                    f"UPDATE conversions SET {fields} WHERE id = ?", (*values.values(), name)
                ).rowcount
            )


def file_name(adapter: str, form: Form) -> str:
    """Return the name of the file that a format writes; a folder's ends with `.zip`."""
    return f"{adapter}-{form.name}" + ("" if form.marker is not None else ".gguf")


def _public(row: Any) -> dict[str, Any]:
    values = dict(row)
    del values["number"]
    values["to"] = values.pop("form")
    for field in ("report", "error"):
        values[field] = json.loads(values[field]) if values[field] else None
    if values["error"]:
        values["error"]["hint"] = values["error"].pop("try", None)
        values["error"].pop("exit_code", None)
    return values
