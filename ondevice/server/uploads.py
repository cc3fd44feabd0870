"""Uploads in parts: created with a size, filled from the front, checked as a whole, then put in place or refused.

The answer to a part that is sent again after a lost answer says how much has arrived. Nothing is in the store's own
folders before it has been checked, and a refused upload is deleted.

    uploads/ID/content          what has arrived
    uploads/.ID.taken/content   while it is being checked, beside what is made of it; `recover` takes it back
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ondevice.artifact.files import fsync_folder, fsync_tree, sha256_file, storage_errors
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import StrictConfig
from ondevice.core.errors import (
    ArtifactError,
    BusyError,
    ConfigError,
    DataError,
    ModelError,
    StorageError,
    TrainingError,
)
from ondevice.core.untrusted import read_object
from ondevice.server.adapters import copy_adapter, insert_adapter
from ondevice.server.jobs import OPTIONS, TASK_NAME
from ondevice.server.store import MissingError, Store, new_id
from ondevice.server.unpack import unpack

Kind = Literal["dataset", "model", "artifact", "adapter"]
GIB = 1 << 30
LIMITS: dict[Kind, int] = {
    "dataset": 2 * GIB,
    "model": 64 * GIB,
    "artifact": 64 * GIB,
    "adapter": 4 * GIB,
}
PART_BYTES = 8 << 20
SPARE_BYTES = 256 << 20
"""Bytes that an upload leaves free on the disk: jobs and the database must be able to go on."""
KEPT_S = 24 * 3600.0
"""How long an upload waits for its next part, in the store's own time."""
PROBLEMS = 100
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".xlsx", ".parquet", ".txt")


class UploadRequest(StrictConfig):
    """The body of POST /v1/uploads."""

    kind: Kind
    """Rows as a file; a model, an artifact or an adapter as a zip of its folder."""

    name: str = Field(min_length=1, max_length=200)
    """A data set's file name (its ending says the format), a model's or artifact's id, or an adapter's title."""

    bytes: int = Field(ge=1, le=64 * GIB)
    """Size of the file."""

    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Of the file; what arrives otherwise is refused."""

    task: str | None = Field(default=None, max_length=64, pattern=TASK_NAME)
    """For rows: a prompt template of the tasks; None infers the format from the keys."""

    columns: dict[str, str] = Field(default={}, max_length=40)
    """For rows: the file's column of a field, where it has another name."""

    skip_bad_rows: bool = False
    """For rows: leave out bad ones instead of refusing the file."""


class BadRowsError(DataError):
    """Rows that cannot be used; `problems` has file, line, field and reason of the first of `count`."""

    def __init__(self, name: str, problems: list[dict[str, Any]], count: int) -> None:
        first = problems[0]
        field = f" '{first['field']}':" if first["field"] else ""
        super().__init__(
            f"{name}, line {first['line']}:{field} {first['reason']}",
            expected="rows that can all be used",
            received=f"{count} bad rows",
            hint="correct them, or upload with skip_bad_rows",
        )
        self.problems = problems


def create(store: Store, request: UploadRequest) -> dict[str, Any]:
    """Begin an upload.

    Raises:
        ConfigError: a size or name that cannot be.
        StorageError: the disk has not that much room.
    """
    if request.bytes > LIMITS[request.kind]:
        limit = f"at most {LIMITS[request.kind]} bytes"
        raise ConfigError(
            f"a {request.kind} of this size is refused", expected=limit, received=request.bytes
        )
    if request.kind == "dataset" and Path(request.name).suffix.lower() not in ROW_SUFFIXES:
        raise ConfigError(
            "cannot tell what kind of data this is", expected="a name that ends with .jsonl, .csv or .txt",
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
    """Return an upload, with `received_bytes`; MissingError if there is none."""
    row = store.row("SELECT * FROM uploads WHERE id = ?", name)
    if row is None:
        raise MissingError(f"there is no upload {name}", hint="POST /v1/uploads begins one")
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
        BusyError: `offset` is not where the upload stands; it says where.
        ConfigError: the part reaches beyond the upload's size.
        StorageError: the disk has not that much room left.
    """
    upload = get(store, name)
    if offset != upload["received_bytes"]:
        raise BusyError(
            "the part does not begin where the upload stands", expected=f"offset {upload['received_bytes']}",
            received=f"offset {offset}",
        )  # fmt: skip
    if offset + size > upload["bytes"]:
        raise ConfigError(
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
            raise BusyError("the upload is being finished", hint="wait for that answer") from None
        store.clock.renew(f"uploads/{name}")
    return get(store, name)


Check = Callable[..., Any]
"""Asks a helper: `check("validate", file=...)`."""
LATER = (BusyError, StorageError, TrainingError)
"""Errors that say nothing of the upload: a helper that is busy or has died, a full disk, a name that is taken."""


def finish(store: Store, name: str, check: Check) -> dict[str, Any]:
    """Check the whole upload and put it in place; return `kind` and `id` of the new thing. A refused one is deleted.

    Raises:
        ConfigError: parts are missing, or the SHA-256 is another.
        DataError, ModelError, ArtifactError: what is wrong with the content.
        BusyError, StorageError, TrainingError: it cannot be checked or put in place now; the upload stays.
    """
    upload = get(store, name)
    row = store.row("SELECT * FROM uploads WHERE id = ?", name)
    request = UploadRequest.model_validate_json(row["options"]) if row is not None else None
    if request is None or upload["received_bytes"] != upload["bytes"]:
        received = f"{upload['received_bytes']} bytes"
        raise ConfigError(
            "the upload is not whole", expected=f"{upload['bytes']} bytes", received=received,
            hint="PUT the missing parts",
        )  # fmt: skip
    folder = store.path("uploads", name)
    claimed = _claimed(folder)
    try:
        os.rename(folder, claimed)  # whoever renames it finishes it
    except FileNotFoundError:
        raise BusyError("the upload is being finished", hint="wait for the first answer") from None
    try:
        content = claimed / "content"
        if request.sha256 is not None and (digest := sha256_file(content)) != request.sha256:
            raise ConfigError(
                "the upload is not what was sent", expected=request.sha256, received=digest
            )
        place = {"dataset": _dataset, "model": _model, "artifact": _artifact, "adapter": _adapter}[
            request.kind
        ]
        placed = place(store, request, content, check)
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
    """Undo what `finish` began: only the content stays."""
    for rows in claimed.glob("made/rows.*"):  # where it could not have two names
        if not (claimed / "content").exists():
            os.rename(rows, claimed / "content")
    for path in claimed.iterdir():
        if path.name != "content":
            _delete(path)
    os.rename(claimed, folder)


def _delete(path: Path) -> None:
    """Delete a folder or a file, if it can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def remove(store: Store, name: str) -> None:
    """Forget an upload and what has arrived of it. One that is being finished is finished all the same."""
    with store.transaction(frees=True) as db:
        db.execute("DELETE FROM uploads WHERE id = ?", (name,))
    _delete(store.path("uploads", name))


def _forget(store: Store, name: str) -> None:
    """Remove an upload that is finished, or refused."""
    _delete(_claimed(store.path("uploads", name)))
    remove(store, name)


def recover(store: Store) -> None:
    """Put the uploads in order when the daemon starts: take back those that were being checked, and delete what a
    killed daemon left that no upload has."""
    place = store.root / "uploads"
    ids = {row["id"] for row in store.rows("SELECT id FROM uploads")}
    for name in ids:
        folder = place / name
        if _claimed(folder).is_dir():
            _take_back(_claimed(folder), folder)
        if not (folder / "content").is_file():  # it was put in place, or lost
            remove(store, name)
            ids = ids - {name}
    for path in place.iterdir():
        if path.name not in ids:
            _delete(path)


def expire(store: Store) -> None:
    """Forget uploads of which no part has come for a day of the store's own time; one that is being checked stays."""
    for row in store.rows("SELECT id FROM uploads"):
        is_waiting = store.path("uploads", row["id"]).is_dir()
        if is_waiting and store.clock.age_s(f"uploads/{row['id']}") > KEPT_S:
            remove(store, row["id"])


def _ensure_room(store: Store, size: int) -> None:
    free = shutil.disk_usage(store.root).free
    if size + SPARE_BYTES > free:
        raise StorageError(
            "the disk has not enough room", expected=f"{size} bytes", received=f"{free} free"
        )


def _dataset(store: Store, request: UploadRequest, content: Path, check: Check) -> dict[str, Any]:
    suffix = Path(request.name).suffix.lower()
    made = content.with_name("made")
    made.mkdir(mode=0o700)
    rows = made / f"rows{suffix}"
    _link(content, rows)  # its ending says how it is read
    try:
        checked = check("validate", file=str(rows), task=request.task, columns=request.columns)
    except DataError as error:
        message = error.message.replace(str(rows), request.name)
        raise DataError(
            message, expected=error.expected, received=error.received, hint=error.hint
        ) from None
    problems = [problem | {"file": request.name} for problem in checked["problems"]]
    if problems and (not request.skip_bad_rows or not checked["rows"]):
        raise BadRowsError(request.name, problems, checked["bad_rows"])
    if not checked["rows"]:
        raise DataError(f"{request.name} has no row", expected="at least one row", received="none")
    name, size, digest = new_id("data"), rows.stat().st_size, sha256_file(rows)
    options = {"task": request.task, "columns": request.columns}
    target = store.path("datasets", name)
    with storage_errors(target):
        (made / OPTIONS).write_text(
            json.dumps({key: value for key, value in options.items() if value})
        )
        # On the disk before the row is: after a power cut a row without its file would be worse than a file without a
        # row.
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
    """Give a file a second name; where the disk knows only one for each, move it."""
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
        # Written anew, for "auto_m\u0061p" is the same key.
        if file in names and '"auto_map"' in json.dumps(read_object(folder / file, ModelError)):
            raise ModelError(
                f"{file} names code of its own",
                expected="a model without auto_map",
                received="auto_map",
            )
    try:
        check("check_model", folder=str(folder))
    except ModelError as error:
        raise _named(error, folder, request.name) from None
    return _in_place(store, "model", request.name, folder)


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
    return _in_place(store, "artifact", request.name, folder)


def _in_place(store: Store, kind: str, name: str, folder: Path) -> dict[str, Any]:
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


def _named(
    error: ArtifactError | ModelError, folder: Path, name: str
) -> ArtifactError | ModelError:
    """Rewrite an error to name the upload, not the folder where it was unpacked."""

    def renamed(text: Any) -> str | None:
        return None if text is None else str(text).replace(str(folder), name)

    return type(error)(
        str(renamed(error.message)),
        expected=renamed(error.expected),
        received=renamed(error.received),
        hint=error.hint,
    )
