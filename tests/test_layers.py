"""Imports go downwards only: the contracts in pyproject.toml hold, and would notice if they did
not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over the checkout or a copy of it in `folder`."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the sources that a test may break."""
    shutil.copy(root / "pyproject.toml", tmp_path)
    for name in ("ondevice", "exporters", "runtime_ops"):
        shutil.copytree(
            root / name,
            tmp_path / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return tmp_path


def test_the_layers_hold(root: Path) -> None:
    done = lint(root)
    assert done.returncode == 0, done.stdout


BROKEN = [
    ("ondevice/nn/__init__.py", "import ondevice.methods", "ondevice.nn -> ondevice.methods"),
    ("runtime_ops/__init__.py", "import ondevice.nn", "ondevice.runtime_ops -> ondevice.nn"),
    ("exporters/__init__.py", "import ondevice.api", "ondevice.exporters -> ondevice.api"),
    (
        "ondevice/methods/__init__.py",
        "import ondevice.exporters",
        "ondevice.methods -> ondevice.exporters",
    ),
    (
        "ondevice/core/errors.py",
        "import ondevice.methods",
        "ondevice.core.errors -> ondevice.methods",
    ),
    ("ondevice/elsewhere.py", "", "exhaustive"),
]


def test_every_upward_import_is_noticed(copy: Path) -> None:
    """In one run, which takes as long for six as for one."""
    for file, line, _ in BROKEN:
        with (copy / file).open("a") as stream:
            stream.write(f"\n{line}\n")
    done = lint(copy)
    assert done.returncode == 1
    assert [message for *_, message in BROKEN if message not in done.stdout] == []
