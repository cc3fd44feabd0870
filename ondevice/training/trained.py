"""Find what a folder holds that was trained: a run, an adapter, a model or an artifact.

Everything that takes an adapter takes a run's folder as well, and follows the task that was trained.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from ondevice.artifact.adapter import CONFIG_NAME, is_mlx_lm
from ondevice.artifact.manifest import ANSWERS_FILE, MANIFEST_NAME, read_manifest
from ondevice.core.errors import ArtifactError
from ondevice.core.manifest import ModelInfo
from ondevice.core.process import path_of
from ondevice.core.untrusted import read_object
from ondevice.data.tasks.trained import TrainedTask, read_trained_task
from ondevice.gguf.task import read_task
from ondevice.models.sources.resolve import SourceInfo, is_in_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ondevice.models import LoadedModel

ADAPTER = "adapter"
BEST_ADAPTER = "adapter-best"
MODEL = "model"
"""Folders in a run's."""
_log = logging.getLogger(__name__)
_MODEL_CONFIG = "config.json"
_TASKS: WeakKeyDictionary[Any, TrainedTask] = WeakKeyDictionary()


@dataclass(frozen=True)
class TrainedSource:
    """What was trained.

    Attributes:
        kind: `run`, `adapter`, `model` or `artifact`.
        source: as the user named it.
        adapter: the adapter's folder, if it has one.
        model: the adapter's base model, or the model or artifact itself.
        revision: of a base model on the hub.
        task: the recorded task; None if nothing recorded it.
    """

    kind: Literal["run", "adapter", "model", "artifact"]
    source: str
    adapter: Path | None
    model: str
    revision: str | None = None
    task: TrainedTask | None = None


def find_trained(source: str | os.PathLike[str], model: str | None = None) -> TrainedSource:
    """Return what `source` names: a run's folder, an adapter, a model or an artifact.

    A name that is no path on this disk is a model's, such as a hub id or `package:NAME`.

    Args:
        model: the base model of an adapter; by default the one that its record names.

    Raises:
        ArtifactError: the folder holds none of them, or an adapter does not name its base model.
    """
    folder = path_of(source, "the trained model")
    if (folder / MANIFEST_NAME).is_file():
        return TrainedSource(
            "artifact", os.fspath(source), None, str(folder), task=_artifact_task(folder)
        )
    if (folder / ANSWERS_FILE).is_file():
        task = read_trained_task(folder)
        return TrainedSource("artifact", str(source), None, str(folder), task=task)
    adapter = _inside(folder)
    if adapter is not None:
        kind: Literal["run", "adapter"] = "run"
        if adapter == folder:
            kind = "adapter"
        return _with_base(kind, os.fspath(source), adapter, model)
    if (folder / MODEL / _MODEL_CONFIG).is_file():
        inner = folder / MODEL
        return TrainedSource(
            "run", os.fspath(source), None, str(inner), task=read_trained_task(inner)
        )
    if not folder.is_dir() or (folder / _MODEL_CONFIG).is_file():
        task = None
        if folder.exists():
            task = read_task(folder)
        return TrainedSource("model", os.fspath(source), None, os.fspath(source), task=task)
    raise _nothing(folder)


def adapter_folder(source: str | os.PathLike[str]) -> Path:
    """Return the folder of an adapter, which may be given as the run that trained it.

    Raises:
        ArtifactError: the adapter does not exist.
    """
    folder = path_of(source, "the adapter's folder")
    adapter = _inside(folder)
    if adapter is None:
        raise _nothing(folder)
    return adapter


def task_of_adapter(adapter: Path | None) -> TrainedTask | None:
    """Return the task of an adapter or of the run that trained it; None without a record."""
    if adapter is None:
        return None
    return read_trained_task(adapter_folder(adapter))


def remember_task(model: Any, task: TrainedTask) -> None:
    """Remember what a model in memory was trained to do, as long as it exists."""
    _TASKS[model] = task


def task_in_memory(loaded: LoadedModel) -> TrainedTask | None:
    """Return what a model in memory was trained to do: by a run here, or as its folder records."""
    folder = loaded.source.path
    if loaded.model in _TASKS or folder is None:
        return _TASKS.get(loaded.model)
    return read_task(folder)


def notes_of_labels(task: TrainedTask | None, labels: Iterable[str]) -> list[str]:
    """Return a sentence that names the labels of rows that an adapter was not trained on, or
    nothing."""
    known = set(task.labels.values()) if task is not None else set()
    new = [label for label in labels if label not in known]
    if not known or not new:
        return []
    return [f"labels that the adapter was not trained on: {', '.join(new)}"]


def check_base(
    task: TrainedTask | None, model: SourceInfo | ModelInfo, adapter: str | Path
) -> None:
    """Refuse an adapter that was trained on another base model; `adapter` names it.

    Raises:
        ArtifactError: the SHA-256 of the model differs from that of the training.
    """
    if task is None or task.base_model.sha256 is None or is_in_memory(model):
        return
    if model.sha256 != task.base_model.sha256:
        named = task.base_model.source
        raise ArtifactError(
            f"the adapter in {adapter} was trained on another model than {model.source}",
            expected=f"{named}, SHA-256 {task.base_model.sha256}",
            received=f"{model.source}, SHA-256 {model.sha256}",
            hint=f"use its own base model: --model {named}",
        )


def _inside(folder: Path) -> Path | None:
    """Return the adapter of a folder: the folder itself, a run's last or its best one."""
    if _is_adapter(folder):
        return folder
    last = folder / ADAPTER
    best = folder / BEST_ADAPTER
    if _is_adapter(last):
        if _is_adapter(best):
            message = "%s is the last adapter; an earlier evaluation was better: %s"
            _log.warning(message, last, best)
        return last
    if _is_adapter(best):
        return best
    return None


def _is_adapter(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file() or is_mlx_lm(folder)


def _with_base(
    kind: Literal["run", "adapter"], source: str, adapter: Path, model: str | None
) -> TrainedSource:
    """Return an adapter with its base model: the named one, or that of its record or its config."""
    task = read_trained_task(adapter)
    if model is not None:
        return TrainedSource(kind, source, adapter, model, task=task)
    if task is not None and task.base_model.source:
        base = task.base_model
        return TrainedSource(kind, source, adapter, base.source, base.revision, task)
    named: Any = None
    if (adapter / CONFIG_NAME).is_file():
        config = read_object(adapter / CONFIG_NAME, ArtifactError, hint="copy it again")
        named = config.get("base_model_name_or_path") or config.get("model")
    if not isinstance(named, str) or not named:
        raise ArtifactError(
            f"{adapter} does not name its base model",
            expected="--model, the model that it was trained on",
            received="none",
        )
    return TrainedSource(kind, source, adapter, named, task=task)


def _artifact_task(folder: Path) -> TrainedTask | None:
    read_manifest(folder, check_files=False)
    return read_trained_task(folder)


def _nothing(folder: Path) -> ArtifactError:
    """Build the error for a folder that holds nothing trained."""
    hint = "give the folder of a run, or of an adapter"
    if (folder / MANIFEST_NAME).is_file():
        received = "an artifact, which holds no trained adapter"
        hint = "give the folder of the run that trained it"
    elif not folder.exists():
        received = "no such folder"
    elif not folder.is_dir():
        received = "a file"
    else:
        names = sorted(path.name for path in folder.iterdir())
        received = ", ".join(names[:6]) or "an empty folder"
        if (folder / "events.jsonl").is_file():
            hint = "the run has saved no adapter yet: let it finish, or `ondevice train --resume`"
    return ArtifactError(
        f"nothing trained in {folder}",
        expected=f"{CONFIG_NAME}, or a run's folder with {ADAPTER} or {MODEL} in it",
        received=received,
        hint=hint,
    )
