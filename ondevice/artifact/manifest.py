"""The artifact's table of contents: what the program takes, gives and keeps, and what everything
must hash to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from ondevice.artifact.files import sha256_file
from ondevice.core.errors import ArtifactError
from ondevice.core.manifest import SCHEMA_VERSION, Manifest
from ondevice.core.process import path_of
from ondevice.core.untrusted import inside, read_object
from ondevice.core.wrong_values import problems_of

MANIFEST_NAME = "manifest.json"
ANSWERS_FILE = "answers.json"
"""Describes a program that answers, in a folder without a manifest or in an artifact's."""
ANSWERS = "answers"
"""Folder of an artifact that holds such a program."""


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
        ArtifactError: when the folder is not an artifact, is of another schema version, lacks a file,
            or a file's SHA-256 is not the recorded one.
    """
    path = path_of(folder, "the artifact") / MANIFEST_NAME
    if not path.is_file():
        raise ArtifactError(
            f"{folder} is not an artifact",
            expected=MANIFEST_NAME,
            received="no such file",
            hint="`ondevice export` writes one",
        )
    values = read_object(path, ArtifactError, hint="export the artifact again")
    # The version first: fields of another one would be reported as mistakes of this file.
    version = values.get("schema_version")
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
        first = problems_of(error.errors(), values)[0]
        raise ArtifactError(
            f"{path}: {first.headline}",
            expected=first.expected,
            received=first.received,
            hint="export the artifact again",
        ) from None
    _check_places(manifest, Path(folder))
    if check_files:
        _check_files(manifest, Path(folder))
    return manifest


def _named_files(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield each field that names a file, with the name: all that a session opens."""
    spec = manifest.program_spec
    yield "program", manifest.program
    for field, name in (("weights", spec.weights), ("frozen", spec.frozen)):
        if name is not None:
            yield f"program_spec.{field}", name
    for tensor in spec.state:
        if tensor.first is not None:
            yield f"program_spec.state.{tensor.name}.first", tensor.first
    for method, entry in spec.methods.items():
        if entry.program is not None:
            yield f"program_spec.methods.{method}.program", entry.program


def _check_places(manifest: Manifest, folder: Path) -> None:
    """Refuse a file that is outside the artifact: the manifest decides what a session opens."""
    for field, name in [*(("files", name) for name in manifest.files), *_named_files(manifest)]:
        try:
            inside(folder, name)
            if name.replace("{layer}", "0") not in manifest.files:
                raise ValueError("the manifest has no hash of this file")
        except ValueError as error:
            raise ArtifactError(
                f"{folder / MANIFEST_NAME}: field '{field}': {error}",
                expected="files inside the artifact",
                received=name[:200],
                hint="do not use this artifact; export the model again",
            ) from None


def _check_files(manifest: Manifest, folder: Path) -> None:
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(
                f"artifact {folder} lacks a file", expected=name, hint="copy the whole folder again"
            )
        received = sha256_file(path)
        if received != expected:
            raise ArtifactError(
                f"artifact {folder}: {name} has changed",
                expected=f"SHA-256 {expected}",
                received=f"SHA-256 {received}",
                hint="copy or export it again",
            )
