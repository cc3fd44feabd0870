"""The plan of an artifact: its own dimensions, method and precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.core.config import ExportConfig
from ondevice.core.dims import ModelDims
from ondevice.core.errors import ArtifactError
from ondevice.core.registry import method_config, target
from ondevice.core.untrusted import read_object, well_formed
from ondevice.planning.estimate import Plan, plan

if TYPE_CHECKING:
    from ondevice.core.manifest import Manifest


def plan_artifact(folder: Path, manifest: Manifest, memory_limit_bytes: int | None = None) -> Plan:
    """Plan a run of the artifact on this machine, at its longest rows.

    Args:
        folder: of the artifact.
        manifest: read from it.
        memory_limit_bytes: as for `plan`.
    """
    runtime = target(manifest.target).runtime
    dtype = "float32"
    if runtime == "torch":
        dtype = _dtype(Path(folder) / manifest.program)
    export = ExportConfig.parse(
        {
            "target": manifest.target,
            "quantize": manifest.quantize if runtime != "mlx" else "none",
            "lengths_tokens": manifest.lengths_tokens,
            "batch_size": manifest.batch_size,
            "loss": manifest.loss,
        },
        "manifest.json",
    )
    planned = plan(
        ModelDims.from_manifest(manifest.model.dims),
        method_config(manifest.method["name"], manifest.method),
        batch_size=manifest.batch_size,
        length_tokens=max(manifest.lengths_tokens),
        dtype=dtype,
        export=export,
        runtime=runtime,
        device="this-cpu" if runtime != "torch" else "this",
        memory_limit_bytes=memory_limit_bytes,
    )
    return replace(planned, model=manifest.model.source)


def _dtype(program: Path) -> str:
    with well_formed(program, ArtifactError, hint="copy the artifact again"):
        return str(read_object(program, ArtifactError)["dtype"])
