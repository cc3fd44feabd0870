"""`import ondevice` and everything the light core holds load no framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "mlx",
    "executorch",
    "transformers",
    "peft",
    "bitsandbytes",
    "fastapi",
    "matplotlib",
)

ROOT = Path(__file__).resolve().parents[1]
LIGHT = (
    "ondevice",
    "ondevice.core.config",
    "ondevice.core.errors",
    "ondevice.data",
    "ondevice.artifact",
    "ondevice.artifact.adapter",
    "ondevice.artifact.files",
    "ondevice.exporters",
    "ondevice.planning",
    "ondevice.core.registry",
    "ondevice.api",
    "ondevice.api.runfile",
    "ondevice.cli",
    "ondevice.fleet.config",
    "ondevice.fleet.log",
    "ondevice.fleet.rounds",
    "ondevice.fleet.store",
)


def loaded_by(statement: str, cwd: Path) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_light_modules_load_no_framework(tmp_path: Path) -> None:
    """All in one process, whose frameworks would be those of any of them."""
    assert all(exists(module) for module in LIGHT)
    assert loaded_by(f"import {', '.join(LIGHT)}", tmp_path).isdisjoint(HEAVY)


def test_the_check_sees_a_framework(tmp_path: Path) -> None:
    assert "matplotlib" in loaded_by("import matplotlib", tmp_path)


def test_listing_the_public_names_loads_no_framework(tmp_path: Path) -> None:
    assert loaded_by("import ondevice\ndir(ondevice)", tmp_path).isdisjoint(HEAVY)


def test_every_public_name_resolves() -> None:
    import ondevice

    names = getattr(ondevice, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(ondevice, name)] == []


@pytest.mark.parametrize("name", ["exporters", "runtime_ops"])
def test_a_second_copy_of_the_registries_cannot_be_imported(name: str, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"import ondevice.{name}, not {name}" in done.stderr.splitlines()[-1]
