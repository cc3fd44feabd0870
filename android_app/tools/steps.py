"""What every step of the build needs: folders, one way to run a program, one kind of error, stamps."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

APP_ROOT = Path(__file__).resolve().parent.parent
BUILD = APP_ROOT / "build"
FETCHED = BUILD / "fetched"

# Program -> the Debian package that brings it.
PACKAGES = {
    "aapt2": "aapt",
    "zipalign": "zipalign",
    "apksigner": "apksigner",
    "dexdump": "dexdump",
    "java": "openjdk-17-jdk-headless",
    "javac": "openjdk-17-jdk-headless",
    "keytool": "openjdk-17-jdk-headless",
    "mvn": "maven",
    "npm": "npm",
}


class BuildError(Exception):
    """A step that cannot go on; the message says what was expected, what was received and what to try."""


def tool(name: str) -> str:
    """The full path of a program of the chain."""
    found = shutil.which(name)
    if found is None:
        raise BuildError(
            f"{name} is missing: expected it on PATH, received nothing\n"
            f"try: apt-get install -y {PACKAGES[name]}    (or .ci/android-tools, which installs all of them)"
        )
    return found


CHAIN = ("aapt2", "zipalign", "apksigner", "java", "javac", "keytool", "mvn")


def missing_tools(names: Iterable[str] = CHAIN) -> list[str]:
    """Those of the chain's programs that are not on PATH."""
    return [name for name in names if shutil.which(name) is None]


def run(command: list[str | Path], *, what: str, cwd: Path | None = None) -> str:
    """Run a program; its output, or a BuildError with the end of it."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-40:])
        raise BuildError(f"{what} failed: {Path(str(command[0])).name} ended with {done.returncode}\n{said}")
    return done.stdout


def maven(*arguments: str | Path, what: str) -> str:
    """Maven, quiet and without questions, in this folder; offline, since `locked` has fetched what it needs."""
    repository = os.environ.get("MAVEN_REPOSITORY")
    place = [f"-Dmaven.repo.local={repository}"] if repository else []
    return run([tool("mvn"), "-q", "-B", "-o", *place, *arguments], what=what, cwd=APP_ROOT)


def digest(paths: Iterable[Path], *words: str) -> str:
    """SHA-256 over names and bytes of files (folders with all they hold) and over `words`."""
    total = hashlib.sha256("\0".join(words).encode())
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                total.update(str(file.relative_to(APP_ROOT) if file.is_relative_to(APP_ROOT) else file.name).encode())
                total.update(file.read_bytes())
    return total.hexdigest()


def is_fresh(stamp: Path, value: str, *outputs: Path) -> bool:
    """Whether a step with this digest has already written its outputs."""
    return all(path.exists() for path in outputs) and stamp.is_file() and stamp.read_text() == value


def write_atomically(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data.encode() if isinstance(data, str) else data)
    os.replace(beside, path)
