"""Uploads in parts: created with a size, filled from the front, checked, then stored or refused.

The response to a part that is sent again reports how much has arrived. Nothing is in the store's
folders before it was checked, and a refused upload is deleted.

    uploads/ID/content          what has arrived
    uploads/.ID.taken/content   during its check, next to the results; `recover` moves it back
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from ondevice.artifact.files import fsync_folder, fsync_tree, sha256_file, storage_errors
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import StrictConfig
from ondevice.core.errors import (
    ArtifactError,
    BusyError,
    ConfigError,
    DataError,
    ModelError,
    OndeviceError,
    StorageError,
    TrainingError,
)
from ondevice.core.untrusted import read_object
from ondevice.server.adapters import copy_adapter, insert_adapter
from ondevice.server.jobs import OPTIONS, TASK_NAME, locate_task
from ondevice.server.store import ID, MissingError, Store, new_id
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
"""Bytes that an upload leaves free on the disk, for jobs and the database."""
KEPT_S = 24 * 3600.0
"""Seconds that an upload waits for its next part, by the store's clock."""
PROBLEMS = 100
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".xlsx", ".parquet", ".txt")


_ENDINGS = "|".join(suffix.removeprefix(".") for suffix in ROW_SUFFIXES)
_NAMES: dict[Kind, str] = {
    "dataset": rf"[^./]\.({_ENDINGS})$",
    "model": f"^{ID.pattern}$",
    "artifact": f"^{ID.pattern}$",
    "adapter": ".",
}


class UploadRequest(StrictConfig):
    """The body of POST /v1/uploads."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "properties": {
                        "kind": {"const": kind},
                        "name": {"pattern": pattern},
                        "bytes": {"maximum": LIMITS[kind]},
                    }
                }
                for kind, pattern in _NAMES.items()
            ]
        }
    )

    kind: Kind
    """Rows as a file; a model, an artifact or an adapter as a zip of its folder."""

    name: str = Field(min_length=1, max_length=200)
    """A data set's file name, a model's or artifact's id, or an adapter's title."""

    bytes: int = Field(ge=1, le=64 * GIB)
    """Size of the file."""

    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the file; anything else is refused."""

    task: str | None = Field(default=None, max_length=64, pattern=TASK_NAME)
    """For rows: a prompt template; None infers the format from the keys."""

    columns: dict[str, str] = Field(default={}, max_length=40)
    """For rows: the file's columns of fields with other names."""

    skip_bad_rows: bool = False
    """For rows: leave out bad ones instead of refusing the file."""


class IncompleteError(ConfigError):
    """Parts of an upload are missing, or do not belong to it."""


class FinishRequest(StrictConfig):
    """The body of POST /v1/uploads/ID/finish, if rows are read in another way than was first said."""

    task: str | None = Field(default=None, max_length=64, pattern=TASK_NAME)
    """A prompt template."""

    columns: dict[str, str] | None = Field(default=None, max_length=40)
    """The file's columns of fields with other names."""

    skip_bad_rows: bool | None = None
    """Leave out bad rows instead of refusing the file."""


class BadRowsError(DataError):
    """Unusable rows; `problems` has file, line, field and reason of the first of `count`."""

    def __init__(self, name: str, problems: list[dict[str, Any]], count: int) -> None:
        first = problems[0]
        field = ""
        if first["field"]:
            field = f" '{first['field']}':"
        super().__init__(
            f"{name}, line {first['line']}:{field} {first['reason']}",
            expected="only usable rows",
            received=f"{count} bad rows",
            hint="correct them, or upload with skip_bad_rows",
        )
        self.problems = problems


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


Check = Callable[..., Any]
"""Calls a helper process: `check("validate", file=...)`."""
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
