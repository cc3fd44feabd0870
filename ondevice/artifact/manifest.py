"""The artifact's table of contents: what the program takes and gives, and what everything must hash to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ondevice.artifact.files import sha256_file
from ondevice.config import Section
from ondevice.errors import ArtifactError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"


class TensorPort(Section):
    """One input or output of a program method."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    unit: str = ""


class ProgramMethod(Section):
    """One method of the program."""

    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    planned_bytes: int
    """Memory the runtime plans for intermediate tensors, without what delegates take."""
    ops: tuple[str, ...]
    """Kernels the runtime must have; one that is missing shows on a device as error 0x14."""
    delegates: int
    instructions: int


class Share(Section):
    """What one backend runs of a program method."""

    backend: str
    """`QnnBackend` (NPU), `XnnpackBackend` (CPU), or `portable`: the runtime's own kernels."""
    calls: int
    """Delegate calls, or kernel calls of the portable part."""
    operators: int
    """Operators of the exported graph that it runs."""
    bytes: int
    """Constants and compiled code that it holds; what several methods share is counted in each."""


class AdapterEntry(Section):
    """One LoRA B matrix in the flat adapter vector: float32 [rank, outputs], row-major, at `offset` elements."""

    a_offset: int | None = None
    """Where its A is, float32 [rank, inputs]; None where A is frozen and drawn from the generator."""

    linear: str
    layer: int
    target: str
    offset: int
    rank: int
    inputs: int
    outputs: int


class ModelInfo(Section):
    """Which model the program was made from."""

    source: str
    revision: str | None = None
    sha256: str
    dims: dict[str, Any]


class GeneratorInfo(Section):
    """The noise: scheme, lowering and default seed."""

    scheme: str = "splitmix64-counter"
    distribution: str
    lowering: str
    seed: int


class Manifest(Section):
    """`manifest.json` of an artifact."""

    schema_version: int = SCHEMA_VERSION
    ondevice_version: str
    runtime: str
    """The runtime the program needs, with its version."""
    target: str
    method: dict[str, Any]
    """The training method's whole configuration."""
    model: ModelInfo
    program: str = "program.pte"
    form: str
    """`functional`: the adapter goes in and comes out. `stateful`: the program holds it."""
    quantize: str
    loss: str
    methods: dict[str, ProgramMethod]
    lengths_tokens: tuple[int, ...]
    batch_size: int
    eval_batch_size: int
    generator: GeneratorInfo
    adapter_size: int
    adapter: tuple[AdapterEntry, ...]
    custom_ops: tuple[str, ...] = ()
    """Ops of this project that the runtime must link; empty for a stock runtime."""
    soc: str | None = None
    """The Qualcomm chip that the NPU's part was compiled for; None for a program without one."""
    partition: dict[str, tuple[Share, ...]] = Field(default_factory=dict)
    """Which backend runs how much, by method."""
    tokenizer_sha256: str
    chat_template_sha256: str | None = None
    task: str | None = None
    caveats: tuple[str, ...] = ()
    """What could not be tried where the program was exported."""
    check: dict[str, Any] = Field(default_factory=dict)
    """What the export measured against eager PyTorch before the artifact was written."""
    files: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of every file but this one."""


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Hash every file in `folder` and write `manifest.json` there."""
    files = {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }
    manifest = manifest.model_copy(update={"files": files})
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """Read and check an artifact's manifest.

    Raises:
        ArtifactError: when the folder is no artifact, is of another schema version, lacks a file, or a file's
            SHA-256 is not the recorded one.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        raise ArtifactError(
            f"{folder} is not an artifact",
            expected=MANIFEST_NAME,
            received="no such file",
            hint="`ondevice export` writes one",
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path} is not readable JSON", received=str(error), hint="export the artifact again"
        ) from None
    version = values.get("schema_version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path} is of another version",
            expected=f"schema_version {SCHEMA_VERSION}",
            received=version,
            hint="export the model again with this version of ondevice",
        )
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{path}: field '{field}': {first['msg']}", hint="export the artifact again") from None
    if check_files:
        _check_files(manifest, Path(folder))
    return manifest


def _check_files(manifest: Manifest, folder: Path) -> None:
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"artifact {folder} lacks a file", expected=name, hint="copy the whole folder again")
        received = sha256_file(path)
        if received != expected:
            raise ArtifactError(
                f"artifact {folder}: {name} has changed",
                expected=f"SHA-256 {expected}",
                received=f"SHA-256 {received}",
                hint="copy or export it again",
            )
