"""Checkpoints: one directory a step, renamed when it is written, so that a name means a complete one.

    checkpoint-00000100/
        state.safetensors   what `Session.state()` gave after 100 steps
        state-00001.safetensors   and so on: what the other ranks gave, if several train together
        meta.json           schema version, step, identity, seed, backend, evaluation, SHA-256 of the state
        model/              the weights as transformers loads them, for methods that train a model on the host

The two newest and the best by evaluation are kept. The position in the data and in the schedule is the step. The lock
keeps a second run out of the folder; the kernel releases it when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.artifact.files import (
    DamagedError,
    atomic_directory,
    read_tensors,
    sha256_file,
    write_tensors,
)
from ondevice.core.errors import BusyError, CheckpointError, StorageError
from ondevice.core.untrusted import inside, read_json
from ondevice.training.identity import ENCODED, NAMES

FILE_NAME = "run.lock"
KEPT = 2
"""Newest checkpoints that are kept, besides the best."""


def check_place(folder: Path) -> None:
    """Refuse a folder that cannot be made or written with StorageError."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise StorageError(
            f"{folder}: the run's folder cannot be written",
            expected="a folder, or a free name in one",
            received=f"{place} cannot be written into",
            hint="--out names another folder",
        )


class RunLock:
    """Holds `folder` while open; creates the folder. A context manager.

    The file that a dead process leaves behind locks nothing: the lock is `flock`'s, and the number in the
    file only says who holds it.

    Raises:
        BusyError: if another process, or another run of this process, holds the folder; it names the process.
        StorageError: if the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._file = -1

    def __enter__(self) -> RunLock:
        check_place(self.path.parent)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(
                f"{self.path.parent}: the run's folder cannot be written: {error.strerror}",
                hint="choose another `train.out`",
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            os.close(self._file)
            self._file = -1
            raise BusyError(
                f"{self.path.parent}: another run holds this folder (process {holder})",
                hint=f"wait for it, stop it with `kill {holder}`, or choose another `train.out`",
            ) from None
        except OSError as error:
            os.close(self._file)
            self._file = -1
            raise StorageError(
                f"{self.path.parent}: this file system cannot lock files: {error.strerror}",
                hint="choose a `train.out` on a local disk",
            ) from None
        # Written after the lock is taken, so that the number is never that of a process that was refused.
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        return self

    @classmethod
    def check(cls, folder: Path) -> None:
        """Refuse a folder that `RunLock(folder)` would refuse, and make none."""
        check_place(folder)
        if (folder / FILE_NAME).exists():
            with cls(folder):
                return

    def __exit__(self, *_: object) -> None:
        if (
            self._file >= 0
        ):  # the file stays: removing it would let two processes lock two files of one name
            os.ftruncate(self._file, 0)
            fcntl.flock(
                self._file, fcntl.LOCK_UN
            )  # closing alone leaves it to a process that is being forked just now
            os.close(self._file)
            self._file = -1

    def _holder(self) -> str:
        """Return the number in the file; the holder may be between taking the lock and writing it."""
        for _ in range(20):
            number = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            if number:
                return number
            time.sleep(0.01)
        return "unknown"


SCHEMA_VERSION = 1
STATE_FILE, META_FILE = "state.safetensors", "meta.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")


@dataclass(frozen=True)
class Meta:
    """The content of `meta.json`.

    Attributes:
        step: optimizer steps that are done; the next step has this number.
        identity: the settings that make two runs the same run, as JSON values.
        evaluation: the figures of the evaluation after this step, if there was one.
        score: compared to find the best evaluation, element by element, higher is better.
        state_sha256: of `state.safetensors`.
        parts: SHA-256 by name of the files of other ranks, which belong to the state.
    """

    step: int
    identity: dict[str, Any]
    seed: int
    backend: str
    state_sha256: str
    evaluation: dict[str, Any] | None = None
    score: tuple[float, ...] | None = None
    schema: int = SCHEMA_VERSION
    identity_sha256: str = field(default="")
    parts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """An intact checkpoint, read: its folder, `meta.json` and the arrays of `Session.state`."""

    path: Path
    meta: Meta
    state: dict[str, np.ndarray]


def identity_sha256(identity: dict[str, Any]) -> str:
    """Hash an identity; the order of its keys does not matter."""
    return hashlib.sha256(
        json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


NOT_COMPARED = {"method.learning_rate", "learning_rate"}
"""Settings of an identity that a resumed run may change; the log says so."""


def check_identity(
    stored: dict[str, Any], expected: dict[str, Any], where: str, *, accept: bool = False
) -> dict[str, list[Any]]:
    """Compare two identities, both as JSON values.

    Args:
        accept: take other rows, another chat template and another tokenizer.

    Returns:
        What differs and is taken, each as [stored, expected]: what `accept` takes, digests that an older log does not
        have, and rows to evaluate that one of the two does not have.

    Raises:
        CheckpointError: naming every setting that differs, with both values.
    """
    ours = flatten(expected)
    theirs = flatten(stored)
    is_older = not any(key.startswith(ENCODED) for key in theirs)
    keys = (ours.keys() | theirs.keys()) - NOT_COMPARED
    differing = sorted(key for key in keys if ours.get(key) != theirs.get(key))

    def is_taken(key: str) -> bool:
        if key == f"{ENCODED}.evaluation_rows" and not (key in ours and key in theirs):
            return True
        return key in NAMES and (accept or (is_older and key.startswith(ENCODED)))

    refused = [key for key in differing if not is_taken(key)]
    if refused:
        message = f"{where} belongs to another run: {', '.join(refused)}"
        hint = (
            "resume with the settings that the run was started with, or choose another `train.out`"
        )
        if all(key in NAMES for key in refused):
            message += f" ({', '.join(NAMES[key] for key in refused)})"
            hint = (
                "put back what the run began with (another version of a library may also encode rows otherwise), or "
                "go on with --accept-changes (train.accept_changes: true), and the log says what changed"
            )
        raise CheckpointError(
            message,
            expected=", ".join(f"{key} = {ours.get(key, 'absent')}" for key in refused),
            received=", ".join(f"{key} = {theirs.get(key, 'absent')}" for key in refused),
            hint=hint,
        )
    return {key: [theirs.get(key), ours.get(key)] for key in differing}


class CheckpointStore:
    """The checkpoints in a run's folder, whose lock the caller holds.

    Args:
        folder: the run's folder.
        identity: JSON values; a checkpoint with another identity is foreign.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], *, seed: int, backend: str) -> None:
        self.folder = folder
        self.identity = identity
        self.seed = seed
        self.backend = backend

    def paths(self) -> list[Path]:
        """List all checkpoints by name, oldest first, whole or not."""
        if not self.folder.is_dir():
            return []
        numbered = [
            (int(match[1]), path)
            for path in self.folder.iterdir()
            if (match := _NAME.fullmatch(path.name))
        ]
        return [path for _, path in sorted(numbered)]

    def steps(self) -> list[int]:
        """List the steps after which there is a checkpoint, in their order."""
        return [int(path.name.rpartition("-")[2]) for path in self.paths()]

    def save(
        self,
        step: int,
        state: dict[str, np.ndarray],
        *,
        evaluation: dict[str, Any] | None = None,
        score: tuple[float, ...] | None = None,
        written: Callable[[str], None] | None = None,
        beside: Callable[[Path], Callable[[], dict[str, str]] | None] | None = None,
    ) -> Path:
        """Write the checkpoint after `step` steps, then delete those that are no longer kept.

        Args:
            written: as for `write_tensors`.
            beside: writes more into the checkpoint's folder, before the state. It may return a function, called
                after the state and gives the SHA-256 by name of further files of the state.

        Raises:
            StorageError: if the disk is full; the checkpoints before are as they were.
        """
        path = self.folder / f"checkpoint-{step:08d}"
        try:
            with atomic_directory(path) as folder:
                others = beside and beside(folder)
                digest = write_tensors(folder / STATE_FILE, state, written=written)
                parts = others and others()
                meta = {
                    "schema": SCHEMA_VERSION,
                    "step": step,
                    "identity": self.identity,
                    "identity_sha256": identity_sha256(self.identity),
                    "seed": self.seed,
                    "backend": self.backend,
                    "evaluation": evaluation,
                    "score": score,
                    "state_sha256": digest,
                }
                if parts:
                    meta["parts"] = parts
                (folder / META_FILE).write_text(json.dumps(meta, indent=1) + "\n")
        except OSError as error:
            raise StorageError(
                f"{path}: the checkpoint cannot be written: {error.strerror or error}",
                hint="free some space and resume: the checkpoint before is intact",
            ) from None
        self._prune(step)
        return path

    def newest(self, warn: Callable[[str], None], *, accept: bool = False) -> Loaded | None:
        """Read the newest intact checkpoint; None if there is none at all. `warn` is called for each damaged one.

        Args:
            accept: see `check_identity`.

        Raises:
            CheckpointError: if the newest intact one is of another run or a newer version, or all are damaged.
        """
        paths = self.paths()
        for path in reversed(paths):
            # A rename makes a whole folder, but a power cut or a copy can still damage its content: so the hash.
            try:
                meta = read_meta(path)
                expected = {STATE_FILE: meta.state_sha256, **meta.parts}
                if absent := [name for name in expected if not (path / name).is_file()]:
                    raise DamagedError(f"{path.name} is damaged: it has no file {absent[0]}")
                with ThreadPoolExecutor() as pool:
                    actual = pool.map(lambda name, path=path: sha256_file(path / name), expected)
                    for name, digest in zip(expected, actual, strict=True):
                        if digest != expected[name]:
                            raise DamagedError(
                                f"{path.name} is damaged: {name} is not what was written"
                            )
                state = read_state(path, meta)
            except (DamagedError, OSError) as error:
                warn(f"{getattr(error, 'message', error)}; the checkpoint before it is used")
                continue
            check_identity(meta.identity, self.identity, f"{path}: the checkpoint", accept=accept)
            return Loaded(path, meta, state)
        if paths:
            raise CheckpointError(
                f"{self.folder}: none of the {len(paths)} checkpoints is whole",
                hint="start again in another folder, or with `--overwrite`",
            )
        return None

    def best(self) -> tuple[tuple[float, ...], Path] | None:
        """Return score and path of the checkpoint with the best evaluation, the earliest of equals; None without."""
        best = None
        for path in self.paths():
            try:
                score = read_meta(path).score
            except CheckpointError:
                continue
            if score is not None and (best is None or score > best[0]):
                best = (score, path)
        return best

    def clear(self) -> None:
        """Delete all checkpoints."""
        for path in self.paths():
            shutil.rmtree(path)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Delete what killed processes left half written; the lock says that nobody else writes here."""
        for path in self.folder.glob(".checkpoint-*.partial-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Keep the newest up to `step` and the best. Later ones are damaged: a resume passed them over."""
        paths = self.paths()
        past = [path for path in paths if int(path.name.split("-")[1]) <= step]
        best = self.best()
        kept = {*past[-KEPT:], *([best[1]] if best else [])} & set(past)
        for path in paths:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def read_state(path: Path, meta: Meta | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of a checkpoint: of one process into memory, of several ranks as private maps of their files,
    because no process need have room for all.

    Raises:
        DamagedError: if a file is not whole.
    """
    parts = sorted((meta or read_meta(path)).parts)
    state = read_tensors(path / STATE_FILE, mapped=bool(parts))
    for name in parts:
        state |= read_tensors(path / name, mapped=True)
    return state


def read_meta(path: Path) -> Meta:
    """Read `meta.json` of a checkpoint.

    Raises:
        DamagedError: if it is not there or not whole.
        CheckpointError: if it is of another version.
    """
    try:
        values = read_json(path / META_FILE)
        schema = values["schema"]
        if schema != SCHEMA_VERSION:  # not damaged: an older checkpoint would be taken in its place
            raise CheckpointError(
                f"{path.name} is of another version",
                expected=f"schema {SCHEMA_VERSION}",
                received=f"schema {schema}",
                hint="resume with the version of ondevice that wrote it",
            )
        score = values.pop("score")
        meta = Meta(score=None if score is None else tuple(map(float, score)), **values)
        _check_fields(meta, path)
        return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{path.name} is damaged: {META_FILE} cannot be read ({type(error).__name__})"
        ) from None


def _check_fields(meta: Meta, folder: Path) -> None:
    """Check the types of `meta.json`'s fields, and that its files are in the checkpoint; ValueError if not."""
    kinds = {
        "step": int,
        "seed": int,
        "backend": str,
        "identity": dict,
        "state_sha256": str,
        "parts": dict,
    }
    for name, kind in kinds.items():
        if type(getattr(meta, name)) is not kind:
            raise ValueError(name)
    if not isinstance(meta.evaluation, dict | None):
        raise ValueError("evaluation")
    for name in meta.parts:
        inside(folder, name)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted keys."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
