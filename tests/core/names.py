"""Counts the lines outside a method's own folder that compare a method's name, list methods or import one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ondevice.core.registry import DEFAULT_METHOD, method_names

COMMON_WORDS = ("full", "lora")
"""Names that are also words of the field: alone in a list or a table they mean something else."""
ROOMS = ("ondevice", "exporters", "runtime_ops")


def offences(root: Path) -> list[str]:
    """`file:line: what` for every line of the package that knows a method by its name."""
    found = []
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            place = path.relative_to(root)
            if path.is_symlink() or any(part.is_symlink() for part in path.parents) or _own(place):
                continue
            found += [f"{place}:{line}: {what}" for line, what in named_in(path.read_text())]
    return found


def _own(place: Path) -> bool:
    """True inside `ondevice/methods/<name>/`."""
    return place.parts[:2] == ("ondevice", "methods") and len(place.parts) > 3


def named_in(source: str) -> list[tuple[int, str]]:
    """Lines of a module that compare a method's name, list methods, or import one's folder."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            found += [(node.lineno, f"imports {name}") for name in modules if _folder(name)]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = [name for side in sides for name in _names(side)]
            asked = any(_asks_a_name(side) for side in sides)
            clear = set(named) - set(COMMON_WORDS) and any(isinstance(side, ast.Name) for side in sides)
            if named and (asked or clear):
                found.append((node.lineno, f"compares with {', '.join(named)}"))
                found.append((node.lineno, f"compares with {', '.join(named)}"))
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            items = [one for one in (node.keys if isinstance(node, ast.Dict) else node.elts) if one is not None]
            listed = {name for item in items for name in _names(item)}
            if listed - set(COMMON_WORDS) or len(listed) > 1:
                found.append((node.lineno, f"lists {', '.join(sorted(listed))}"))
    return found


def _names(node: ast.expr) -> Iterator[str]:
    """Method names among the constants of an expression."""
    constants = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    for one in constants:
        if isinstance(one, ast.Constant) and one.value in method_names():
            yield one.value


def _asks_a_name(node: ast.expr) -> bool:
    """True for `x.name`, `x["name"]` and `x.get("name")`."""
    return ast.unparse(node).endswith((".name", ".method", "['name']", "get('name')"))


def _folder(module: str) -> bool:
    parts = module.split(".")
    return parts[:2] == ["ondevice", "methods"] and len(parts) > 2 and parts[2].replace("_", "-") in method_names()


assert DEFAULT_METHOD in method_names()  # the one name that is said elsewhere: what a run takes that names none
