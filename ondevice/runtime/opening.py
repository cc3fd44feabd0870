"""The session that an artifact asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest


def open_session(folder: Path, manifest: Manifest) -> Any:
    """An artifact's session: of MLX, of PyTorch, or with the NPU's simulator where its program has a part for one.

    Raises:
        MissingPackageError: a package that this runtime needs is not installed.
        ArtifactError: the runtime cannot load the program.
    """
    if manifest.runtime.startswith("mlx "):
        from ondevice.runtime.mlx import MlxProgramSession

        return MlxProgramSession(folder, manifest)
    if manifest.runtime.startswith("torch "):
        from ondevice.runtime.torch import TorchProgramSession

        return TorchProgramSession(folder, manifest)
    if manifest.soc is not None:
        from ondevice.runtime.npu import NpuSession

        return NpuSession(folder, manifest)
    if manifest.method.get("name") == "mesp":
        from ondevice.runtime.first_order import FirstOrderProgramSession

        return FirstOrderProgramSession(folder, manifest)
    from ondevice.runtime.executorch import ExecutorchSession

    return ExecutorchSession(folder, manifest)
