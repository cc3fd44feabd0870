"""An upload that has arrived is checked as its kind, and moved into the store."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ondevice.artifact.files import fsync_folder, fsync_tree, sha256_file, storage_errors
from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import (
    ArtifactError,
    BusyError,
    DataError,
    ModelError,
    OndeviceError,
    StorageError,
)
from ondevice.core.untrusted import read_object
from ondevice.server.adapters import copy_adapter, insert_adapter
from ondevice.server.jobs import OPTIONS, locate_task
from ondevice.server.store import Store, new_id
from ondevice.server.unpack import unpack
from ondevice.server.upload_requests import LIMITS, BadRowsError, UploadRequest

Check = Callable[..., Any]
"""Calls a helper process: `check("validate", file=...)`."""
SPARE_BYTES = 256 << 20
"""Bytes that an upload leaves free on the disk, for jobs and the database."""
PROBLEMS = 100
"""Bad rows that are named."""


def _dataset(store: Store, request: UploadRequest, content: Path, check: Check) -> dict[str, Any]:
    suffix = Path(request.name).suffix.lower()
    made = content.with_name("made")
    made.mkdir(mode=0o700)
    rows = made / f"rows{suffix}"
    _link(content, rows)  # its ending decides how it is read
    try:
        task = locate_task(store, request.task)
        checked = check("validate", file=str(rows), task=task, columns=request.columns)
    except DataError as error:
        message = error.message.replace(str(rows), request.name)
        raise DataError(
            message, expected=error.expected, received=error.received, hint=error.hint
        ) from None
    problems = [problem | {"file": request.name} for problem in checked["problems"]]
    if problems and (not request.skip_bad_rows or not checked["rows"]):
        raise BadRowsError(request.name, problems, checked["bad_rows"])
    if not checked["rows"]:
        raise DataError(f"{request.name} has no rows", expected="at least one row", received="none")
    name = new_id("data")
    size = rows.stat().st_size
    digest = sha256_file(rows)
    options = {"task": request.task, "columns": request.columns}
    target = store.path("datasets", name)
    with storage_errors(target):
        (made / OPTIONS).write_text(
            json.dumps({key: value for key, value in options.items() if value})
        )
        # On the disk before the row: after a power cut a file without a row is better than the
        # reverse.
        fsync_tree(made)
        os.rename(made, target)
        fsync_folder(target.parent)
    try:
        with store.transaction() as db:
            db.execute(
                "INSERT INTO datasets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (name, request.name, rows.name, size, digest, checked["format"], checked["rows"],
                 json.dumps(problems[:PROBLEMS]), time.time()),
            )  # fmt: skip
    except StorageError:
        store.discard("datasets", name)
        raise
    return {"kind": "dataset", "id": name}


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; on a disk without hard links, move it."""
    try:
        os.link(source, target)
    except OSError:
        os.rename(source, target)


def _unpacked(store: Store, request: UploadRequest, content: Path) -> tuple[Path, list[str]]:
    folder = content.with_name("unpacked")
    folder.mkdir(mode=0o700)
    room = shutil.disk_usage(store.root).free - SPARE_BYTES
    return folder, unpack(content, folder, limit_bytes=LIMITS[request.kind], room_bytes=room)


def _adapter(store: Store, request: UploadRequest, content: Path, check: Check) -> dict[str, Any]:
    folder, _ = _unpacked(store, request, content)
    name = new_id("adapter")
    try:
        copy_adapter(store, folder, name)
    except ArtifactError as error:
        raise _named(error, folder, request.name) from None
    with store.transaction():
        insert_adapter(store, name, request.name, None)
    return {"kind": "adapter", "id": name}


def _model(store: Store, request: UploadRequest, content: Path, check: Check) -> dict[str, Any]:
    folder, names = _unpacked(store, request, content)
    for file in ("config.json", "tokenizer_config.json"):
        # Written again, because "auto_m\u0061p" is the same key.
        if file in names and '"auto_map"' in json.dumps(read_object(folder / file, ModelError)):
            raise ModelError(
                f"{file} names its own code",
                expected="a model without auto_map",
                received="auto_map",
            )
    try:
        check("check_model", folder=str(folder))
    except ModelError as error:
        raise _named(error, folder, request.name) from None
    return in_place(store, "model", request.name, folder)


def _artifact(store: Store, request: UploadRequest, content: Path, check: Check) -> dict[str, Any]:
    folder, names = _unpacked(store, request, content)
    try:
        manifest = read_manifest(folder, check_files=False)
        for name in (*manifest.files, manifest.program):
            if name not in names:
                raise ArtifactError(
                    "the manifest names a file that the zip lacks", expected=name[:200]
                )
        read_manifest(folder)
    except ArtifactError as error:
        raise _named(error, folder, request.name) from None
    return in_place(store, "artifact", request.name, folder)


def in_place(store: Store, kind: str, name: str, folder: Path) -> dict[str, Any]:
    target = store.path(f"{kind}s", name)
    with storage_errors(target):
        fsync_tree(folder)
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise BusyError(
                f"there is a {kind} {name} already", hint="choose another name"
            ) from None
        fsync_folder(target.parent)
    return {"kind": kind, "id": name}


PLACES = {"dataset": _dataset, "model": _model, "artifact": _artifact, "adapter": _adapter}
"""What checks and stores an upload, by its kind."""

E = TypeVar("E", bound=OndeviceError)


def _named(error: E, folder: Path, name: str) -> E:
    """Rewrite an error to name the upload, not the folder it was unpacked to."""

    def renamed(text: Any) -> str | None:
        if text is None:
            return None
        return str(text).replace(str(folder), name)

    return type(error)(
        str(renamed(error.message)),
        expected=renamed(error.expected),
        received=renamed(error.received),
        hint=renamed(error.hint),
    )


@contextmanager
def naming(file: Path, name: str) -> Iterator[None]:
    """Let errors name a file as its owner does, not by its place in the store."""
    try:
        yield
    except OndeviceError as error:
        raise _named(error, file, name) from None
