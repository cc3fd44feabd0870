"""The list of modules whose mutants are counted names what the checkout has."""

from __future__ import annotations

import ast
import re

import pytest

from tests.mutation.equivalents import EQUIVALENT
from tests.mutation.run import MODULES, RESULTS, ROOT

ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
LEAST_OPERATIONS = 3
"""A module with fewer has handed its mathematics to another file, which the list should name."""


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("module", MODULES)
def test_a_listed_module_has_mathematics_and_tests(module: str) -> None:
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    operations = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ARITHMETIC)
    ]
    assert len(operations) >= LEAST_OPERATIONS
    assert MODULES[module]
    for test in MODULES[module]:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists(), f"{test}: not in the checkout"
        if function:
            assert function.partition("[")[0] in functions_of(path), test


def test_the_results_are_of_listed_modules() -> None:
    """Rows and survivors of a module that has left the list say nothing about today's code."""
    text = RESULTS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)(?::\d+)?` \|", text, re.MULTILINE)
    assert rows
    assert set(rows) | {module for module, *_ in EQUIVALENT} <= set(MODULES)
    for module in set(MODULES) - set(rows):
        assert f"`{module}`" in text, f"{module}: neither run nor said not to be"
