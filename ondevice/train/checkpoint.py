"""Checkpoints: one directory a step, written beside and renamed, so that a name means a whole checkpoint.

    checkpoint-00000100/
        state.safetensors   what `Session.state()` gave after 100 steps
        meta.json           schema version, step, identity, seed, backend, evaluation, SHA-256 of the state
        model/              the weights as transformers loads them, for methods that train a model on the host

The two newest and the best by evaluation are kept. The position in the data and in the schedule is the step.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.artifact.files import atomic_directory, sha256_file
from ondevice.artifact.tensors import TornError, read_tensors, write_tensors
from ondevice.errors import CheckpointError, StorageError

SCHEMA_VERSION = 1
STATE_FILE, META_FILE = "state.safetensors", "meta.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")


@dataclass(frozen=True)
class Meta:
    """What `meta.json` holds.

    Attributes:
        step: optimizer steps that are done; the next step has this number.
        identity: the settings that make two runs the same run, as JSON values.
        evaluation: the figures of the evaluation after this step, if there was one.
        score: what is compared to find the best evaluation, element by element, higher is better.
        state_sha256: of `state.safetensors`.
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


@dataclass(frozen=True)
class Loaded:
    """An intact checkpoint."""

    path: Path
    meta: Meta
    state: dict[str, np.ndarray]


def identity_sha256(identity: dict[str, Any]) -> str:
    """The hash of an identity; the order of its keys does not matter."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_identity(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Compare two identities, both as JSON values.

    Raises:
        CheckpointError: naming every setting that differs, with both values.
    """
    ours, theirs = _flatten(expected), _flatten(found)
    differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if differing:
        raise CheckpointError(
            f"{where} belongs to another run: {', '.join(differing)}",
            expected=", ".join(f"{key} = {ours.get(key, 'absent')}" for key in differing),
            received=", ".join(f"{key} = {theirs.get(key, 'absent')}" for key in differing),
            hint="resume with the settings that the run was started with, or choose another `train.out`",
        )


class CheckpointStore:
    """The checkpoints in a run's folder, whose lock the caller holds.

    Args:
        folder: the run's folder.
        identity: JSON values; a checkpoint with another identity is foreign.
        keep: how many of the newest are kept, besides the best.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], *, seed: int, backend: str, keep: int = 2) -> None:
        self.folder, self.identity, self.seed, self.backend, self.keep = folder, identity, seed, backend, keep

    def paths(self) -> list[Path]:
        """All checkpoints by name, oldest first, whole or not."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def save(
        self,
        step: int,
        state: dict[str, np.ndarray],
        *,
        evaluation: dict[str, Any] | None = None,
        score: tuple[float, ...] | None = None,
        written: Callable[[str], None] | None = None,
        beside: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the checkpoint after `step` steps, then delete those that are no longer kept.

        Args:
            written: as for `write_tensors`.
            beside: writes more into the checkpoint's folder, before the state.

        Raises:
            StorageError: if the disk is full; the checkpoints before are as they were.
        """
        path = self.folder / f"checkpoint-{step:08d}"
        try:
            with atomic_directory(path) as folder:
                if beside is not None:
                    beside(folder)
                digest = write_tensors(folder / STATE_FILE, state, written=written)
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
                (folder / META_FILE).write_text(json.dumps(meta, indent=1) + "\n")
        except OSError as error:
            raise StorageError(
                f"{path}: the checkpoint cannot be written: {error.strerror or error}",
                hint="free some space and resume: the checkpoint before is intact",
            ) from None
        self._prune(step)
        return path

    def newest(self, warn: Callable[[str], None]) -> Loaded | None:
        """The newest intact checkpoint, or None if there is none at all; `warn` is told of each torn one.

        Raises:
            CheckpointError: if the newest intact one is of another run or a newer version, or all are torn.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                meta = read_meta(path)
                if sha256_file(path / STATE_FILE) != meta.state_sha256:
                    raise TornError(f"{path.name} is torn: {STATE_FILE} is not what was written")
                state = read_tensors(path / STATE_FILE)
            except (TornError, OSError) as error:
                warn(f"{getattr(error, 'message', error)}; the checkpoint before it is used")
                continue
            check_identity(meta.identity, self.identity, f"{path}: the checkpoint")
            return Loaded(path, meta, state)
        if paths:
            raise CheckpointError(
                f"{self.folder}: none of the {len(paths)} checkpoints is whole",
                hint="start again in another folder, or with `--overwrite`",
            )
        return None

    def best(self) -> tuple[tuple[float, ...], Path] | None:
        """Score and path of the checkpoint with the best evaluation; the earliest of equals."""
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
        """Keep the newest up to `step` and the best. Later ones are torn: a resume passed them over."""
        paths = self.paths()
        past = [path for path in paths if int(path.name.split("-")[1]) <= step]
        best = self.best()
        kept = {*past[-self.keep :], *([best[1]] if best else [])} & set(past)
        for path in paths:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def read_meta(path: Path) -> Meta:
    """Read `meta.json` of a checkpoint.

    Raises:
        TornError: if it is not there or not whole.
        CheckpointError: if it is of another version.
    """
    try:
        values = json.loads((path / META_FILE).read_text())
        schema = values["schema"]
        if schema != SCHEMA_VERSION:
            raise CheckpointError(
                f"{path.name} is of another version",
                expected=f"schema {SCHEMA_VERSION}",
                received=f"schema {schema}",
                hint="resume with the version of ondevice that wrote it",
            )
        score = values.pop("score")
        return Meta(score=None if score is None else tuple(score), **values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TornError(f"{path.name} is torn: {META_FILE} cannot be read ({type(error).__name__})") from None


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
