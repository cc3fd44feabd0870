"""The session that an artifact asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest
    from ondevice.runtime.executorch import ExecutorchSession


def open_session(folder: Path, manifest: Manifest) -> ExecutorchSession:
    """An artifact's session: with the NPU's simulator where its program has a part for one.

    Raises:
        MissingPackageError: a package that this runtime needs is not installed.
        ArtifactError: the runtime cannot load the program.
    """
    if manifest.soc is not None:
        from ondevice.runtime.npu import NpuSession

        return NpuSession(folder, manifest)
    from ondevice.runtime.executorch import ExecutorchSession

    return ExecutorchSession(folder, manifest)
