"""A target is known through its spec alone: outside its folder no line compares a target's name or lists targets."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ondevice.core.registry import target_names

SOURCES = ("ondevice", "exporters", "runtime_ops")
DEFAULT = ("ondevice/core/config.py", "AnnAssign")
"""The default of `export.target`, as there is one of the method."""


def mentions(source: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and kind of every string, docstrings aside, that is a target's name or has several of them."""
    if not any(name in source for name in names):  # most files: parsing all took 12 CPU seconds
        return
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    owners = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            if node.value in names or sum(name in node.value for name in names) > 1:
                yield node.lineno, type(owners[id(node)]).__name__


def mentioned(root: Path) -> list[str]:
    names, listed = {*target_names()}, []
    folders = {
        spec_folder
        for spec_folder in (root / "exporters").iterdir()
        if (spec_folder / "target.py").is_file()
    }
    for top in SOURCES:
        for path in sorted((root / top).rglob("*.py")):
            inside = path.relative_to(root)
            own = any(folder in path.parents for folder in folders if folder.name != "executorch")
            if own or inside.parts[:2] in (("ondevice", "exporters"), ("ondevice", "runtime_ops")):
                continue
            for line, kind in mentions(path.read_text(encoding="utf-8"), names):
                if (inside.as_posix(), kind) != DEFAULT:
                    listed.append(f"{inside}:{line} ({kind})")
    return listed


def test_no_line_names_a_target(root: Path) -> None:
    assert mentioned(root) == []


@pytest.mark.parametrize(
    "line",
    [
        'if target == "jetson": pass',
        'TARGETS = {"android-npu": 1}',
        'error = "for jetson or cuda-server"',
    ],
)
def test_a_line_that_does_is_found(line: str) -> None:
    assert list(mentions(line, {*target_names()}))
    assert not list(
        mentions('"""For jetson or cuda-server."""\nword = "jetsons"', {*target_names()})
    )
