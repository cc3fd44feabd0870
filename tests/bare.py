"""A bare environment: the wheel and what it depends on, and no other package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'ondevice'; "
    "from ondevice.cli.app import run; run()"
)


@dataclass(frozen=True)
class Bare:
    """A folder that is all that a process finds in addition to the standard library."""

    site: Path

    def __call__(self, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run `ondevice ARGUMENTS` there."""
        command = [sys.executable, "-I", "-S", "-c", START, str(self.site), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, timeout=200, check=False
        )


def build(site: Path, wheel: Path, dependencies: list[str]) -> Bare:
    """Put the wheel and links to its dependencies, as they are installed here, into `site`."""
    site.mkdir(parents=True)
    zipfile.ZipFile(wheel).extractall(site)
    link(site, dependencies)
    return Bare(site)


def link(site: Path, dependencies: list[str]) -> None:
    """Put links to packages, as they are installed here, into `site`, with all that they depend on."""
    waiting, seen = [_name(line) for line in dependencies], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another system or version of Python
            continue
        waiting += [_name(line) for line in found.requires or () if "extra ==" not in line]
        for top in {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            here, origin = site / top, Path(str(found.locate_file(top)))
            if not here.exists() and origin.exists():
                here.symlink_to(origin)


def build_wheel(root: Path, folder: Path) -> Path:
    """Build a wheel from a copy, so that no old build/ folder and no other test gets into it."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    for name in ("ondevice", "exporters", "runtime_ops"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / name, source / name, symlinks=True, ignore=ignore)
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    (built,) = folder.glob("*.whl")
    return built


def _name(line: str) -> str:
    return re.split(r"[<>=!~\[; (]", line, maxsplit=1)[0]
