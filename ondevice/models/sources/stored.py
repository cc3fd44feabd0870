"""Models that are on this machine already: converted ones in this package's cache, and the hub's in
its own."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ondevice.artifact.files import storage_errors
from ondevice.core.errors import ModelError
from ondevice.core.process import cache_root
from ondevice.core.untrusted import read_json
from ondevice.models.sources import cache


@dataclass(frozen=True)
class Stored:
    """A model in a cache.

    Attributes:
        source: what `--model` takes for it.
        kind: `package`, `gguf` or `hub`.
        model_type: of its `config.json`; empty if that is missing.
        bytes: of its files on the disk.
        path: its folder.
        whole: False for a hub model of which a file is missing; a load fetches the rest.
    """

    source: str
    kind: str
    model_type: str
    bytes: int
    path: Path
    whole: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return what `ondevice models --json` prints of it."""
        return asdict(self) | {"path": str(self.path)}


def stored_models() -> list[Stored]:
    """List every model in the caches, by its source."""
    return sorted([*_converted(), *_hub()], key=lambda model: model.source)


def find_stored(source: str) -> Stored:
    """Return a model of the caches.

    Args:
        source: as `stored_models` lists it; a package may be named without its version if there is
            only one.

    Raises:
        ModelError: no cache has it, or several versions of it are there.
    """
    models = stored_models()
    found = [model for model in models if model.source == source]
    found = found or [model for model in models if model.source.partition("==")[0] == source]
    if len(found) != 1:
        raise ModelError(
            f"{len(found)} models of the caches are named {source}"
            if found
            else f"no cache has the model {source}",
            expected="one of "
            + (
                ", ".join(model.source for model in found or models) or "none: the caches are empty"
            ),
            received=source,
            hint="`ondevice models` lists them",
        )
    return found[0]


def remove_model(source: str) -> Stored:
    """Delete a model from its cache; the next load fetches or converts it again.

    Raises:
        ModelError: as `find_stored`.
        StorageError: a file cannot be deleted.
    """
    model = find_stored(source)
    with storage_errors(model.path):
        if model.kind == "hub":
            _remove_from_hub(model)
        else:
            with cache.locked(str(model.path.relative_to(cache_root() / "models"))):
                shutil.rmtree(model.path)
    return model


def _converted() -> list[Stored]:
    models = []
    for record in sorted((cache_root() / "models").glob(f"*/*/{cache.RECORD_NAME}")):
        try:
            source = str(read_json(record)["source"])
        except (OSError, ValueError, KeyError, TypeError):
            source = str(record.parent)
        folder = record.parent
        models.append(
            Stored(source, folder.parent.name, _model_type(folder), _size(folder), folder)
        )
    return models


def _hub() -> list[Stored]:
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        found = scan_cache_dir()
    except (CacheNotFound, OSError):
        return []
    models = []
    for repository in found.repos:
        if repository.repo_type != "model":
            continue
        newest = max(
            repository.revisions, key=lambda revision: revision.last_modified, default=None
        )
        folder = repository.repo_path
        if newest is not None:
            folder = newest.snapshot_path
        models.append(
            Stored(
                repository.repo_id,
                "hub",
                _model_type(folder),
                repository.size_on_disk,
                repository.repo_path,
                whole=any(folder.glob("*.safetensors")) and (folder / "config.json").is_file(),
            )
        )
    return models


def _remove_from_hub(model: Stored) -> None:
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir()
    revisions = [
        revision.commit_hash
        for repository in found.repos
        if repository.repo_type == "model" and repository.repo_id == model.source
        for revision in repository.revisions
    ]
    found.delete_revisions(*revisions).execute()


def _model_type(folder: Path) -> str:
    try:
        return str(read_json(folder / "config.json").get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _size(folder: Path) -> int:
    return sum(os.path.getsize(path) for path in folder.rglob("*") if path.is_file())
