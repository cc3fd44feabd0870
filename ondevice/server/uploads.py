"""Uploads in parts: created with a size, filled from the front, checked, then stored or refused.

The response to a part that is sent again reports how much has arrived. Nothing is in the store's
folders before it was checked, and a refused upload is deleted.

    uploads/ID/content          what has arrived
    uploads/.ID.taken/content   during its check, next to the results; `recover` moves it back
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from ondevice.artifact.files import sha256_file, storage_errors
from ondevice.core.errors import BusyError, ConfigError, StorageError, TrainingError
from ondevice.server.placing import PLACES, SPARE_BYTES, Check
from ondevice.server.store import MissingError, Store, new_id
from ondevice.server.upload_requests import (
    LIMITS,
    ROW_SUFFIXES,
    FinishRequest,
    IncompleteError,
    UploadRequest,
)

PART_BYTES = 8 << 20
KEPT_S = 24 * 3600.0
"""Seconds that an upload waits for its next part, by the store's clock."""


def create(store: Store, request: UploadRequest) -> dict[str, Any]:
    """Begin an upload.

    Raises:
        ConfigError: an invalid size or name.
        StorageError: not enough space on the disk.
    """
    if request.bytes > LIMITS[request.kind]:
        limit = f"at most {LIMITS[request.kind]} bytes"
        raise ConfigError(
            f"a {request.kind} of this size is refused", expected=limit, received=request.bytes
        )
    if request.kind == "dataset" and Path(request.name).suffix.lower() not in ROW_SUFFIXES:
        raise ConfigError(
            "unknown kind of data", expected="a name that ends with .jsonl, .csv or .txt",
            received=request.name,
        )  # fmt: skip
    if request.kind in ("model", "artifact"):
        target = store.path(f"{request.kind}s", request.name)
        if target.exists():
            raise BusyError(
                f"there is a {request.kind} {request.name} already", hint="choose another name"
            )
    _ensure_room(store, request.bytes)
    name = new_id("up")
    folder = store.path("uploads", name)
    folder.mkdir(mode=0o700)
    store.clock.renew(f"uploads/{name}")
    (folder / "content").touch(mode=0o600)
    with store.transaction() as db:
        db.execute(
            "INSERT INTO uploads VALUES (?, ?, ?, 'content', ?, ?, ?, ?)",
            (
                name,
                request.kind,
                request.name,
                request.bytes,
                request.sha256,
                request.model_dump_json(),
                time.time(),
            ),
        )
    return get(store, name)


def get(store: Store, name: str) -> dict[str, Any]:
    """Return an upload, with `received_bytes`; raise MissingError if it does not exist."""
    row = store.row("SELECT * FROM uploads WHERE id = ?", name)
    if row is None:
        raise MissingError(f"no such upload: {name}", hint="POST /v1/uploads begins one")
    folder = store.path("uploads", name)
    paths = [path / row["file"] for path in (folder, _claimed(folder))]
    received = next((path.stat().st_size for path in paths if path.is_file()), 0)
    return {
        "id": name, "kind": row["kind"], "name": row["name"], "bytes": row["bytes"], "received_bytes": received,
        "created_s": row["created_s"],
    }  # fmt: skip


def check_part(store: Store, name: str, offset: int, size: int) -> None:
    """Check that a part of `size` bytes can be appended.

    Raises:
        BusyError: `offset` is not the number of bytes that have arrived, which the error names.
        IncompleteError: the part reaches beyond the upload's size.
        StorageError: not enough space is left on the disk.
    """
    upload = get(store, name)
    if offset != upload["received_bytes"]:
        raise BusyError(
            "the part does not continue the upload", expected=f"offset {upload['received_bytes']}",
            received=f"offset {offset}",
        )  # fmt: skip
    if offset + size > upload["bytes"]:
        raise IncompleteError(
            "the part is longer than the upload",
            expected=f"{upload['bytes'] - offset} bytes at most",
            received=size,
        )
    _ensure_room(store, size)


def write(store: Store, name: str, offset: int, content: bytes) -> dict[str, Any]:
    """Append a part, or a piece of one; errors as `check_part`."""
    check_part(store, name, offset, len(content))
    path = store.path("uploads", name) / "content"
    with storage_errors(path):
        try:
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(content)
        except FileNotFoundError:
            raise BusyError("the upload is being finished", hint="wait for that response") from None
        store.clock.renew(f"uploads/{name}")
    return get(store, name)


def end_early(store: Store, name: str) -> None:
    """Take what has arrived as the whole file: its size was only known as an upper limit."""
    size = get(store, name)["received_bytes"]
    with store.transaction() as db:
        db.execute("UPDATE uploads SET bytes = ? WHERE id = ?", (size, name))


LATER = (BusyError, StorageError, TrainingError)
"""Errors that are not the upload's: a busy or dead helper, a full disk, a taken name."""


def rows_file(store: Store, name: str) -> Path:
    """Return the rows of an upload that has arrived, before its check; its ending is the file's.

    Raises:
        IncompleteError: it is not of rows, or parts are missing.
        BusyError: it is being finished.
    """
    upload = get(store, name)
    if upload["kind"] != "dataset":
        raise IncompleteError("the upload has no rows", expected="dataset", received=upload["kind"])
    _ensure_complete(upload)
    folder = store.path("uploads", name)
    file = folder / f"rows{Path(upload['name']).suffix.lower()}"
    try:
        file.symlink_to("content")
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise BusyError("the upload is being finished", hint="wait for that response") from None
    return file


def _ensure_complete(upload: dict[str, Any]) -> None:
    if upload["received_bytes"] != upload["bytes"]:
        raise IncompleteError(
            "the upload is incomplete",
            expected=f"{upload['bytes']} bytes",
            received=f"{upload['received_bytes']} bytes",
            hint="PUT the missing parts",
        )


def finish(
    store: Store, name: str, check: Check, changed: FinishRequest | None = None
) -> dict[str, Any]:
    """Check an upload and store it; return `kind` and `id` of the new thing. A refused upload is
    deleted.

    Raises:
        IncompleteError: parts are missing.
        ConfigError: the SHA-256 differs.
        DataError, ModelError, ArtifactError: the content is wrong.
        BusyError, StorageError, TrainingError: it cannot be checked or stored now; the upload
            stays.
    """
    upload = get(store, name)
    row = store.row("SELECT * FROM uploads WHERE id = ?", name)
    _ensure_complete(upload)
    if row is None:
        raise BusyError("the upload was finished meanwhile", hint="upload it again")
    request = UploadRequest.model_validate_json(row["options"])
    if changed is not None:
        request = request.model_copy(update=changed.model_dump(exclude_none=True))
    folder = store.path("uploads", name)
    claimed = _claimed(folder)
    try:
        os.rename(folder, claimed)  # the process that renames it finishes it
    except FileNotFoundError:
        raise BusyError(
            "the upload is being finished", hint="wait for the first response"
        ) from None
    try:
        content = claimed / "content"
        if request.sha256 is not None and (digest := sha256_file(content)) != request.sha256:
            raise ConfigError(
                "the upload differs from the sent file", expected=request.sha256, received=digest
            )
        placed = PLACES[request.kind](store, request, content, check)
    except LATER:
        _take_back(claimed, folder)
        raise
    except BaseException:
        _forget(store, name)
        raise
    _forget(store, name)
    return placed


def _claimed(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.taken")


def _take_back(claimed: Path, folder: Path) -> None:
    """Undo `finish`: only the content stays."""
    for rows in claimed.glob("made/rows.*"):  # on a disk without hard links
        if not (claimed / "content").exists():
            os.rename(rows, claimed / "content")
    for path in claimed.iterdir():
        if path.name != "content":
            _delete(path)
    os.rename(claimed, folder)


def _delete(path: Path) -> None:
    """Delete a folder or a file, if possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def remove(store: Store, name: str) -> None:
    """Delete an upload with its content. One that is being finished goes on."""
    with store.transaction(frees=True) as db:
        db.execute("DELETE FROM uploads WHERE id = ?", (name,))
    _delete(store.path("uploads", name))


def _forget(store: Store, name: str) -> None:
    """Remove a finished or refused upload."""
    _delete(_claimed(store.path("uploads", name)))
    remove(store, name)


def recover(store: Store) -> None:
    """Clean up at the daemon's start: move back uploads in a check, and delete the rest."""
    place = store.root / "uploads"
    ids = {row["id"] for row in store.rows("SELECT id FROM uploads")}
    for name in ids:
        folder = place / name
        if _claimed(folder).is_dir():
            _take_back(_claimed(folder), folder)
        if not (folder / "content").is_file():  # it was stored, or lost
            remove(store, name)
            ids = ids - {name}
    for path in place.iterdir():
        if path.name not in ids:
            _delete(path)


def expire(store: Store) -> None:
    """Delete uploads without a new part for a day, by the store's clock, except in a check."""
    for row in store.rows("SELECT id FROM uploads"):
        is_waiting = store.path("uploads", row["id"]).is_dir()
        if is_waiting and store.clock.age_s(f"uploads/{row['id']}") > KEPT_S:
            remove(store, row["id"])


def _ensure_room(store: Store, size: int) -> None:
    free = shutil.disk_usage(store.root).free
    if size + SPARE_BYTES > free:
        raise StorageError(
            "not enough space on the disk", expected=f"{size} bytes", received=f"{free} free"
        )
