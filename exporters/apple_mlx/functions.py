"""Stage functions of an artifact, imported from its `.mlxfn` files."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from ondevice.core.errors import ArtifactError, MissingPackageError
from ondevice.core.untrusted import inside, well_formed

try:
    import mlx.core as mx
except ImportError:
    raise MissingPackageError(
        "mlx is not installed", hint="pip install 'ondevice-train[mlx]'"
    ) from None

FUNCTIONS = {"cpu": "functions", "gpu": "functions-gpu"}
"""Folder of an artifact's functions, by the device that they are for."""


def device() -> str:
    """Return MLX's default device, a key of `FUNCTIONS`."""
    return "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"


class ImportedFunctions:
    """Stages from `.mlxfn` files.

    Args:
        artifact: the artifact's folder.
        listed: file and outputs of each stage, from `program.json`.

    Raises:
        ArtifactError: it has no functions for this device.
    """

    def __init__(self, artifact: Path, listed: dict[str, Any]) -> None:
        self.folder = folder = artifact / FUNCTIONS[device()]
        self.listed = listed
        if not folder.is_dir():
            raise ArtifactError(
                f"{artifact} has no functions for this device",
                expected=folder.name,
                received="no such folder",
                hint="export the model again on this machine",
            )
        with well_formed(artifact / "program.json", ArtifactError, hint="copy the artifact again"):
            self.loaded = {
                stage: import_function(inside(folder, entry["file"]))
                for stage, entry in listed.items()
            }

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of `stage` by name.

        Raises:
            ArtifactError: these shapes were not traced.
        """
        entry = self.listed[stage]
        try:
            outputs = self.loaded[stage](**arrays)
        except (ValueError, RuntimeError) as error:
            raise ArtifactError(
                f"{self.folder / entry['file']}: the function cannot be called",
                received=str(error).splitlines()[0],
            ) from None
        return dict(zip(entry["outputs"], outputs))


def import_function(path: Path) -> Any:
    """Return a function from its file.

    Raises:
        ArtifactError: it is missing, damaged, or was written by another version of MLX.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            written = file.read(length).decode("ascii") if 0 < length < 32 else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path} cannot be read", received=str(error), hint="copy the artifact again"
        ) from None
    if written != version("mlx"):
        hint = "export the model again"
        if written:
            hint += f", or pip install mlx=={written}"
        raise ArtifactError(
            f"{path} is of another version of MLX",
            expected=f"{version('mlx')}, which is installed here",
            received=written or "no version",
            hint=hint,
        )
    try:
        return mx.import_function(str(path))
    except (ValueError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} is damaged", received=str(error), hint="copy the artifact again"
        ) from None
