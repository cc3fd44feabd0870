"""Counts the lines outside a method's own folder that compare a method's name, list methods or import one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ondevice.core.registry import DEFAULT_METHOD, method_names

COMMON_WORDS = ("full", "lora")
"""Names that are also words of the field: alone in a list or a table they mean something else."""
ROOMS = ("ondevice", "exporters", "runtime_ops")
WORD = re.compile(r"[\w-]+")
LITERALS = [re.compile(f"{quote}([^{quote}\n]*){quote}") for quote in "\"'`"]
"""Strings of JavaScript, on one line; one may stand inside another, so each kind of quote is looked for on its own."""


def offences(root: Path) -> list[str]:
    """List `file:line: reason` for every line of the package that knows a method by its name."""
    lines = []
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            place = path.relative_to(root)
            if path.is_symlink() or any(part.is_symlink() for part in path.parents) or _own(place):
                continue
            lines += [f"{place}:{line}: {reason}" for line, reason in named_in(path.read_text())]
    for path in sorted((root / "ondevice/server/page/js").rglob("*.js")):
        lines += [
            f"{path.relative_to(root)}:{line}: {reason}"
            for line, reason in named_in_script(path.read_text())
        ]
    return lines


def _own(place: Path) -> bool:
    """True inside `ondevice/methods/<name>/`."""
    return place.parts[:2] == ("ondevice", "methods") and len(place.parts) > 3


def named_in(source: str) -> list[tuple[int, str]]:
    """List the lines of a module that compare a method's name, list methods, or import one's folder."""
    if not _words(source) and "ondevice.methods" not in source:
        return []  # without parsing
    lines, nodes = [], list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [item.name for item in node.names]
            )
            lines += [(node.lineno, f"imports {name}") for name in modules if _folder(name)]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if not (named := [name for side in sides for name in _names(side)]):
                continue
            asked = any(_asks_a_name(side) for side in sides)
            clear = set(named) - set(COMMON_WORDS) and any(
                isinstance(side, ast.Name) for side in sides
            )
            if asked or clear:
                lines.append((node.lineno, f"compares with {', '.join(named)}"))
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            items = [
                item
                for item in (node.keys if isinstance(node, ast.Dict) else node.elts)
                if item is not None
            ]
            listed = {name for item in items for name in _names(item)}
            if listed - set(COMMON_WORDS) or len(listed) > 1:
                lines.append((node.lineno, f"lists {', '.join(sorted(listed))}"))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            if len(listed := _words(node.value)) > 1:
                lines.append((node.lineno, f"lists {', '.join(sorted(listed))} in one string"))
    return lines


def named_in_script(source: str) -> list[tuple[int, str]]:
    """List the lines of a JavaScript file with a string that is a method's name, or has several of them."""
    lines = []
    for number, line in enumerate(source.splitlines(), 1):
        for text in (text for literal in LITERALS for text in literal.findall(line)):
            if text in method_names() or len(_words(text)) > 1:
                lines.append((number, f"names {text}"))
    return lines


def _words(text: str) -> set[str]:
    """Method names among the words of a text."""
    return set(WORD.findall(text)) & set(method_names())


def _names(node: ast.expr) -> Iterator[str]:
    """Method names among the constants of an expression."""
    constants = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    for item in constants:
        if isinstance(item, ast.Constant) and item.value in method_names():
            yield item.value


def _asks_a_name(node: ast.expr) -> bool:
    """True for `x.name`, `x["name"]` and `x.get("name")`."""
    return ast.unparse(node).endswith((".name", ".method", "['name']", "get('name')"))


def _folder(module: str) -> bool:
    parts = module.split(".")
    return (
        parts[:2] == ["ondevice", "methods"]
        and len(parts) > 2
        and parts[2].replace("_", "-") in method_names()
    )


assert (
    DEFAULT_METHOD in method_names()
)  # the one name that is said elsewhere: what a run takes that names none
