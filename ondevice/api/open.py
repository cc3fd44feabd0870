"""Open an artifact in the runtime it was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ondevice.artifact.manifest import read_manifest
from ondevice.core.process import path_of
from ondevice.core.registry import target


def open_artifact(folder: Path) -> Any:
    """Check an artifact and open it in its runtime; step it with `.step(ids, labels, step, learning_rate)`.

    Raises:
        ArtifactError: the folder is not a complete artifact.
        MissingPackageError: its runtime is not installed.
    """
    folder = path_of(folder, "the artifact")
    manifest = read_manifest(folder)
    return target(manifest.target).open(folder, manifest)
