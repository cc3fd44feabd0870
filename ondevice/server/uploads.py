"""Uploads in parts: created with a size, filled from the front, checked as a whole, then put in place or refused.

The answer to a part that is sent again after a lost answer says how much has arrived. Nothing is in the store's own
folders before it has been checked, and a refused upload is deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ondevice.artifact.files import fsync_folder, fsync_tree, sha256_file, storage_errors
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import StrictConfig
from ondevice.core.errors import ArtifactError, BusyError, ConfigError, DataError, ModelError, StorageError
from ondevice.core.untrusted import read_object
from ondevice.server.adapters import copy_adapter, insert_adapter
from ondevice.server.helper import Helper
from ondevice.server.jobs import OPTIONS, TASK_NAME
from ondevice.server.store import MissingError, Store, new_id
from ondevice.server.unpack import unpack

Kind = Literal["dataset", "model", "artifact", "adapter"]
GIB = 1 << 30
LIMITS: dict[Kind, int] = {"dataset": 2 * GIB, "model": 64 * GIB, "artifact": 64 * GIB, "adapter": 4 * GIB}
PART_BYTES = 8 << 20
SPARE_BYTES = 256 << 20
"""Bytes that an upload leaves free on the disk: jobs and the database must be able to go on."""
KEPT_S = 24 * 3600.0
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
    """Rows that cannot be used; `problems` has file, line, field and reason of each."""

    def __init__(self, name: str, problems: list[dict[str, Any]]) -> None:
        first = problems[0]
        field = f" '{first['field']}':" if first["field"] else ""
        super().__init__(
            f"{name}, line {first['line']}:{field} {first['reason']}",
            expected="rows that can all be used",
            received=f"{len(problems)} bad rows",
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
        raise ConfigError(f"a {request.kind} of this size is refused", expected=limit, received=request.bytes)
    if request.kind == "dataset" and Path(request.name).suffix.lower() not in ROW_SUFFIXES:
        raise ConfigError(
            "cannot tell what kind of data this is", expected="a name that ends with .jsonl, .csv or .txt",
            received=request.name,
        )  # fmt: skip
    if request.kind in ("model", "artifact"):
        target = store.path(f"{request.kind}s", request.name)
        if target.exists():
            raise BusyError(f"there is a {request.kind} {request.name} already", hint="choose another name")
    _ensure_room(store, request.bytes)
    name = new_id("up")
    folder = store.path("uploads", name)
    folder.mkdir(mode=0o700)
    (folder / "content").touch(mode=0o600)
    with store.transaction() as db:
        db.execute(
            "INSERT INTO uploads VALUES (?, ?, ?, 'content', ?, ?, ?, ?)",
            (name, request.kind, request.name, request.bytes, request.sha256, request.model_dump_json(), time.time()),
        )
    return get(store, name)


def get(store: Store, name: str) -> dict[str, Any]:
    """Return an upload, with `received_bytes`; MissingError if there is none."""
    row = store.row("SELECT * FROM uploads WHERE id = ?", name)
    if row is None:
        raise MissingError(f"there is no upload {name}", hint="POST /v1/uploads begins one")
    path = store.path("uploads", name) / row["file"]
    received = path.stat().st_size if path.is_file() else 0
    return {
        "id": name, "kind": row["kind"], "name": row["name"], "bytes": row["bytes"], "received_bytes": received,
        "created_s": row["created_s"],
    }  # fmt: skip


def write(store: Store, name: str, offset: int, content: bytes) -> dict[str, Any]:
    """Append a part.

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
    if offset + len(content) > upload["bytes"]:
        raise ConfigError(
            "the part is longer than the upload", expected=f"{upload['bytes'] - offset} bytes at most",
            received=len(content),
        )  # fmt: skip
    _ensure_room(store, len(content))
    path = store.path("uploads", name) / "content"
    with storage_errors(path), open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)
    return get(store, name)


def finish(store: Store, name: str, helper: Helper) -> dict[str, Any]:
    """Check the whole upload and put it in place; return `kind` and `id` of the new thing. A refused one is deleted.

    Raises:
        ConfigError: parts are missing, or the SHA-256 is another.
        DataError, ModelError, ArtifactError: what is wrong with the content.
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
    claimed = folder.with_name(_claimed(name))
    try:
        os.rename(folder, claimed)  # whoever renames it finishes it
    except FileNotFoundError:
        raise BusyError("the upload is being finished", hint="wait for the first answer") from None
    try:
        content = claimed / "content"
        if request.sha256 is not None and (digest := sha256_file(content)) != request.sha256:
            raise ConfigError("the upload is not what was sent", expected=request.sha256, received=digest)
        place = {"dataset": _dataset, "model": _model, "artifact": _artifact, "adapter": _adapter}[request.kind]
        return place(store, request, content, helper)
    finally:
        shutil.rmtree(claimed, ignore_errors=True)
        remove(store, name)


def _claimed(name: str) -> str:
    return f".{name}.taken"


def remove(store: Store, name: str) -> None:
    """Forget an upload and what has arrived of it."""
    with store.transaction() as db:
        db.execute("DELETE FROM uploads WHERE id = ?", (name,))
    shutil.rmtree(store.path("uploads", name), ignore_errors=True)


def expire(store: Store, now_s: float) -> None:
    """Forget uploads that were begun long ago, and what a killed daemon left of others."""
    for row in store.rows("SELECT id FROM uploads WHERE created_s < ?", now_s - KEPT_S):
        remove(store, row["id"])
    ids = {row["id"] for row in store.rows("SELECT id FROM uploads")}
    known = ids | {_claimed(name) for name in ids}  # one that is being checked may take longer than an hour
    for folder in (store.root / "uploads").iterdir():
        if folder.name not in known and folder.stat().st_mtime < now_s - 3600:
            shutil.rmtree(folder, ignore_errors=True)


def _ensure_room(store: Store, size: int) -> None:
    free = shutil.disk_usage(store.root).free
    if size + SPARE_BYTES > free:
        raise StorageError("the disk has not enough room", expected=f"{size} bytes", received=f"{free} free")


def _dataset(store: Store, request: UploadRequest, content: Path, helper: Helper) -> dict[str, Any]:
    suffix = Path(request.name).suffix.lower()
    rows = content.with_name(f"rows{suffix}")
    os.rename(content, rows)
    try:
        validated = helper("validate", file=str(rows), task=request.task, columns=request.columns)
    except DataError as error:
        message = error.message.replace(str(rows), request.name)
        raise DataError(message, expected=error.expected, received=error.received, hint=error.hint) from None
    problems = [problem | {"file": request.name} for problem in validated["problems"]]
    if problems and (not request.skip_bad_rows or not validated["rows"]):
        raise BadRowsError(request.name, problems)
    if not validated["rows"]:
        raise DataError(f"{request.name} has no row", expected="at least one row", received="none")
    name, size, digest = new_id("data"), rows.stat().st_size, sha256_file(rows)
    target = store.path("datasets", name)
    target.mkdir(mode=0o700)
    os.rename(rows, target / rows.name)
    options = {"task": request.task, "columns": request.columns}
    (target / OPTIONS).write_text(json.dumps({key: value for key, value in options.items() if value}))
    # On the disk before the row is: after a power cut a row without its file would be worse than a file without a row.
    fsync_tree(target)
    fsync_folder(target.parent)
    with store.transaction() as db:
        db.execute(
            "INSERT INTO datasets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (name, request.name, rows.name, size, digest, validated["format"], validated["rows"],
             json.dumps(problems[:PROBLEMS]), time.time()),
        )  # fmt: skip
    return {"kind": "dataset", "id": name}


def _unpacked(store: Store, request: UploadRequest, content: Path) -> tuple[Path, list[str]]:
    folder = content.with_name("unpacked")
    folder.mkdir(mode=0o700)
    room = shutil.disk_usage(store.root).free - SPARE_BYTES
    return folder, unpack(content, folder, limit_bytes=LIMITS[request.kind], room_bytes=room)


def _adapter(store: Store, request: UploadRequest, content: Path, helper: Helper) -> dict[str, Any]:
    folder, _ = _unpacked(store, request, content)
    name = new_id("adapter")
    try:
        copy_adapter(store, folder, name)
    except ArtifactError as error:
        raise _named(error, folder, request.name) from None
    with store.transaction():
        insert_adapter(store, name, request.name, None)
    return {"kind": "adapter", "id": name}


def _model(store: Store, request: UploadRequest, content: Path, helper: Helper) -> dict[str, Any]:
    folder, names = _unpacked(store, request, content)
    for file in ("config.json", "tokenizer_config.json"):
        # Written anew, for "auto_m\u0061p" is the same key.
        if file in names and '"auto_map"' in json.dumps(read_object(folder / file, ModelError)):
            raise ModelError(f"{file} names code of its own", expected="a model without auto_map", received="auto_map")
    try:
        helper("check_model", folder=str(folder))
    except ModelError as error:
        raise _named(error, folder, request.name) from None
    return _in_place(store, "model", request.name, folder)


def _artifact(store: Store, request: UploadRequest, content: Path, helper: Helper) -> dict[str, Any]:
    folder, names = _unpacked(store, request, content)
    try:
        manifest = read_manifest(folder, check_files=False)
        for name in (*manifest.files, manifest.program):
            if name not in names:
                raise ArtifactError("the manifest names a file that the zip lacks", expected=name[:200])
        read_manifest(folder)
    except ArtifactError as error:
        raise _named(error, folder, request.name) from None
    return _in_place(store, "artifact", request.name, folder)


def _in_place(store: Store, kind: str, name: str, folder: Path) -> dict[str, Any]:
    target = store.path(f"{kind}s", name)
    fsync_tree(folder)
    try:
        os.rename(folder, target)
    except OSError:
        raise BusyError(f"there is a {kind} {name} already", hint="choose another name") from None
    fsync_folder(target.parent)
    return {"kind": kind, "id": name}


def _named(error: ArtifactError | ModelError, folder: Path, name: str) -> ArtifactError | ModelError:
    """Rewrite an error to name the upload, not the folder where it was unpacked."""

    def renamed(text: Any) -> str | None:
        return None if text is None else str(text).replace(str(folder), name)

    return type(error)(
        str(renamed(error.message)), expected=renamed(error.expected), received=renamed(error.received), hint=error.hint
    )
