"""Adapters of the store: registered when a job ends or an upload is whole, activated, rolled back, zipped."""

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
from ondevice.server.queue import Job
from ondevice.server.store import MissingError, Store
from ondevice.server.worker import RUN

ACTIVE = "active"
_EARLIEST = (1980, 1, 1, 0, 0, 0)


def register_outcome(store: Store, job: str, folder: Path) -> Callable[[Job], None]:
    """Copy a finished job's adapters into the store; return the function that inserts their rows.

    The files are copied before the transaction, which no other writer should wait for, and the rows are inserted in
    the caller's: the job is done and has its adapters, or neither.
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
            title = f"{name} (best)" if adapter.endswith("-best") else name
            insert_adapter(store, adapter, title, job, row.spec.get("model"))

    return write


def copy_adapter(store: Store, source: Path, name: str) -> None:
    """Copy an adapter's two files to a name of the store; ArtifactError if they are no whole adapter."""
    load_adapter(source)
    with atomic_directory(store.path("adapters", name), marker=CONFIG_NAME) as partial:
        for file in (CONFIG_NAME, WEIGHTS_NAME):
            shutil.copyfile(source / file, partial / file)


def insert_adapter(
    store: Store, name: str, title: str, job: str | None, model: str | None = None
) -> None:
    """Insert the row of an adapter whose files are in place, inside a transaction; `model` is the job's own word for
    the base model, which the adapter's files may name by a folder."""
    folder = store.path("adapters", name)
    adapter = load_adapter(folder)
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
    store: Store, limit: int, after: str | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Return so many adapters behind `after`, the newest first, and if there are more; `active` marks the one in use.

    Raises:
        ConfigError: `after` is not in the list.
    """
    active = active_adapter(store)
    rows, more = store.page("adapters", "-created_s, id", limit, after)
    return [{**dict(row), "active": row["id"] == active} for row in rows], more


def adapters_of(store: Store, jobs: Sequence[str]) -> dict[str, list[str]]:
    """Return the ids of the adapters that each of these jobs has made, of those that have made any."""
    found: dict[str, list[str]] = {}
    query = f"SELECT id, job FROM adapters WHERE job IN ({','.join('?' * len(jobs))}) ORDER BY id"
    for row in store.rows(query, *jobs):
        found.setdefault(row["job"], []).append(row["id"])
    return found


def get_adapter(store: Store, name: str) -> dict[str, Any]:
    """Return an adapter's row, with `active`; MissingError if there is none."""
    row = store.row("SELECT * FROM adapters WHERE id = ?", name)
    if row is None:
        raise MissingError(f"there is no adapter {name}", hint="GET /v1/adapters lists them")
    return {**dict(row), "active": name == active_adapter(store)}


def active_adapter(store: Store) -> str | None:
    """Return the id of the adapter in use; None for the base model."""
    row = store.row("SELECT adapter FROM activations ORDER BY number DESC LIMIT 1")
    return row["adapter"] if row else None


def activate(store: Store, name: str) -> None:
    """Use an adapter: GET /v1/adapters says so, and the link `active` points to its folder."""
    with store.transaction() as db:
        get_adapter(store, name)
        if active_adapter(store) != name:
            db.execute(
                "INSERT INTO activations (adapter, time_s) VALUES (?, ?)", (name, time.time())
            )
    link_active(store)


def roll_back(store: Store) -> str | None:
    """Use the adapter that was in use before; return its id, None for the base model.

    Raises:
        BusyError: nothing is in use.
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
    """Point the link to the adapter that the database says is active, in one rename."""
    # The transaction is a lock here: two that link at once take turns, so that the link is of the newest row.
    with store.transaction(durable=False):
        name, link = active_adapter(store), store.root / ACTIVE
        if name is None:
            link.unlink(missing_ok=True)
            return
        partial = store.root / f".{ACTIVE}.partial"
        partial.unlink(missing_ok=True)
        os.symlink(Path("adapters") / name, partial)
        os.replace(partial, link)


def remove_adapter(store: Store, name: str) -> None:
    """Delete an adapter that is not in use."""
    with store.transaction(frees=True) as db:
        get_adapter(store, name)
        if active_adapter(store) == name:
            raise BusyError(
                "the adapter is active",
                expected="an adapter that is not in use",
                hint="roll back first",
            )
        db.execute("DELETE FROM adapters WHERE id = ?", (name,))
        db.execute("DELETE FROM activations WHERE adapter = ?", (name,))
    store.discard("adapters", name)


def zipped_stream(folder: Path, place: Path) -> BinaryIO:
    """Zip a folder's files into a file in `place` that has no name: it is gone when it is closed, or with the process.

    Raises:
        StorageError: the disk is full.
    """
    with storage_errors(place):
        packed = zipped(folder, place)
    stream = packed.open("rb")
    packed.unlink()
    return stream


def zipped(folder: Path, place: Path) -> Path:
    """Zip a folder's files into a new file in `place`, which the caller deletes; the same files give the same bytes."""
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
                    # A piece at a time: an adapter may be larger than a board's memory.
                    shutil.copyfileobj(source, target)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
