"""Adapters of the store: add, activate, roll back, delete, zip."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ondevice.artifact.adapter import CONFIG_NAME, WEIGHTS_NAME, load_adapter
from ondevice.artifact.files import atomic_directory, sha256_file, storage_errors
from ondevice.core.errors import BusyError
from ondevice.data.tasks.trained import TASK_NAME, read_trained_task
from ondevice.server.queue import Job
from ondevice.server.store import MissingError, Store
from ondevice.server.worker import RUN

ACTIVE = "active"
_EARLIEST = (1980, 1, 1, 0, 0, 0)


def register_outcome(store: Store, job: str, folder: Path) -> Callable[[Job], None]:
    """Copy a finished job's adapters into the store; return the function that inserts their rows.

    The files are copied before the transaction, so that no other writer waits for it. The rows are
    inserted in the caller's transaction: the job is done and has its adapters, or neither.
    """
    copied = []
    for name, suffix in (("adapter", ""), ("adapter-best", "-best")):
        source = folder / RUN / name
        if source.is_dir():
            adapter = f"{job}{suffix}"
            copy_adapter(store, source, adapter)
            copied.append(adapter)

    def write(row: Job) -> None:
        for adapter in copied:
            name = row.spec.get("name") or job
            title = name
            if adapter.endswith("-best"):
                title = f"{name} (best)"
            insert_adapter(store, adapter, title, job, row.spec.get("model"))

    return write


def copy_adapter(store: Store, source: Path, name: str) -> None:
    """Copy an adapter's two files, and its task if it has one, into the store.

    Raises:
        ArtifactError: they are incomplete or damaged.
    """
    load_adapter(source)
    files = [CONFIG_NAME, WEIGHTS_NAME]
    if read_trained_task(source) is not None:
        files.append(TASK_NAME)
    with atomic_directory(store.path("adapters", name), marker=CONFIG_NAME) as partial:
        for file in files:
            shutil.copyfile(source / file, partial / file)


def insert_adapter(
    store: Store, name: str, title: str, job: str | None, model: str | None = None
) -> None:
    """Insert the row of an adapter whose files are in the store, inside a transaction.

    `model` is the job's name of the base model; without one it is the name in the adapter's record,
    as PEFT's configuration may name a folder of another machine."""
    folder = store.path("adapters", name)
    adapter = load_adapter(folder)
    record = read_trained_task(folder)
    if model is None and record is not None:
        model = record.base_model.source
    size = sum(path.stat().st_size for path in folder.iterdir())
    store.connection.execute(
        "INSERT OR REPLACE INTO adapters VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            name,
            title,
            job,
            model or adapter.base_model,
            adapter.rank,
            size,
            sha256_file(folder / WEIGHTS_NAME),
            time.time(),
        ),
    )


def list_adapters(
    store: Store, limit: int | None, after: str | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Return up to `limit` adapters (None: all) after `after`, the newest first, and whether there are more.

    Raises:
        ConfigError: `after` is not in the list.
    """
    active = active_adapter(store)
    rows, more = store.page("adapters", "-created_s, id", limit, after)
    return [{**dict(row), "active": row["id"] == active} for row in rows], more


def adapters_of(store: Store, jobs: Sequence[str]) -> dict[str, list[str]]:
    """Return the ids of the adapters of each of these jobs; a job without adapters is left out."""
    found: dict[str, list[str]] = {}
    query = f"SELECT id, job FROM adapters WHERE job IN ({','.join('?' * len(jobs))}) ORDER BY id"
    for row in store.rows(query, *jobs):
        found.setdefault(row["job"], []).append(row["id"])
    return found


def get_adapter(store: Store, name: str) -> dict[str, Any]:
    """Return an adapter's row, with `active`; raise MissingError if it does not exist."""
    row = store.row("SELECT * FROM adapters WHERE id = ?", name)
    if row is None:
        raise MissingError(f"no such adapter: {name}", hint="GET /v1/adapters lists them")
    return {**dict(row), "active": name == active_adapter(store)}


def active_adapter(store: Store) -> str | None:
    """Return the id of the active adapter; None for the base model."""
    row = store.row("SELECT adapter FROM activations ORDER BY number DESC LIMIT 1")
    if row:
        return row["adapter"]
    return None


def activate(store: Store, name: str) -> None:
    """Activate an adapter: the link `active` then points to its folder."""
    with store.transaction() as db:
        get_adapter(store, name)
        if active_adapter(store) != name:
            db.execute(
                "INSERT INTO activations (adapter, time_s) VALUES (?, ?)", (name, time.time())
            )
    link_active(store)


def roll_back(store: Store) -> str | None:
    """Activate the previous adapter again; return its id, None for the base model.

    Raises:
        BusyError: no adapter is active.
    """
    with store.transaction() as db:
        row = store.row("SELECT number FROM activations ORDER BY number DESC LIMIT 1")
        if row is None:
            raise BusyError(
                "no adapter is active", expected="an active adapter", hint="activate one first"
            )
        db.execute("DELETE FROM activations WHERE number = ?", (row["number"],))
    link_active(store)
    return active_adapter(store)


def link_active(store: Store) -> None:
    """Point the link `active` to the adapter that is active in the database, with one rename."""
    # The transaction is a lock: two threads that link at once take turns, so the newest row wins.
    with store.transaction(durable=False):
        name = active_adapter(store)
        link = store.root / ACTIVE
        if name is None:
            link.unlink(missing_ok=True)
            return
        partial = store.root / f".{ACTIVE}.partial"
        partial.unlink(missing_ok=True)
        os.symlink(Path("adapters") / name, partial)
        os.replace(partial, link)


def remove_adapter(store: Store, name: str) -> None:
    """Delete an adapter that is not active."""
    with store.transaction(frees=True) as db:
        get_adapter(store, name)
        if active_adapter(store) == name:
            raise BusyError(
                "the adapter is active",
                expected="an adapter that is not active",
                hint="roll back first",
            )
        db.execute("DELETE FROM adapters WHERE id = ?", (name,))
        db.execute("DELETE FROM activations WHERE adapter = ?", (name,))
    store.discard("adapters", name)


def zipped_stream(folder: Path, place: Path) -> BinaryIO:
    """Zip a folder's files into a nameless file in `place`, which disappears when it is closed.

    Raises:
        StorageError: the disk is full.
    """
    with storage_errors(place):
        packed = zipped(folder, place)
    stream = packed.open("rb")
    packed.unlink()
    return stream


def zipped(folder: Path, place: Path) -> Path:
    """Zip a folder's files into a new file in `place`; the bytes depend only on the files."""
    descriptor, name = tempfile.mkstemp(suffix=".zip", dir=place)
    try:
        with (
            os.fdopen(descriptor, "wb") as packed,
            zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive,
        ):
            for path in sorted(folder.iterdir()):
                entry = zipfile.ZipInfo(path.name, _EARLIEST)  # a fixed date: the same bytes
                entry.file_size = path.stat().st_size
                entry.external_attr = (0o100755 if os.access(path, os.X_OK) else 0o100644) << 16
                with archive.open(entry, "w") as target, path.open("rb") as source:
                    # In pieces: an adapter may be larger than a board's memory.
                    shutil.copyfileobj(source, target)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
