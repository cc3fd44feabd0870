"""Benchmarks import what exists, in no circle, and the tests import nothing private of them."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))
OURS = ("ondevice", "benchmarks")


def imported(path: Path, packages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Module and name of every `from ... import` of some packages, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in packages
        ):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_import_of_a_benchmark_exists(path: Path) -> None:
    """Most of a benchmark is imported where it is used, so that nothing else would notice a name
    that moved."""
    for module, name in imported(path, OURS):
        try:
            if not hasattr(importlib.import_module(module), name):
                pkgutil.resolve_name(f"{module}.{name}")
        except ModuleNotFoundError as error:
            if error.name and error.name.split(".")[0] not in OURS:
                continue  # a package that is not installed here
            raise


def test_benchmarks_import_each_other_in_no_circle() -> None:
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SCRIPTS}
    graph = {
        name: {
            part
            for module, leaf in imported(path, ("benchmarks",))
            for part in (module, f"{module}.{leaf}")
        }
        & known.keys()
        for name, path in known.items()
    }
    assert sum(map(len, graph.values())) > 30
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_tests_import_no_private_benchmark() -> None:
    named = [path for path in (ROOT / "tests").rglob("*.py") if "benchmarks" in path.read_text()]
    words = {
        part
        for path in named
        for module, name in imported(path, ("benchmarks",))
        for part in [*module.split("."), name]
    }
    assert (
        "benchmarks" in words
        and [word for word in words if word.startswith("_") and word != "__main__"] == []
    )
