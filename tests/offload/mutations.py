"""Takes each wait, record and hold out of the engine, one at a time, and looks whether the checker of order notices.

    python -m tests.offload.mutations            all of them (minutes), and writes mutations.json beside this file
    python -m tests.offload.mutations TEXT ...   those whose place contains one of the texts

`tests/methods/slideformer/test_happens_before.py` holds the list against the sources, and tries some of them again.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = (
    "ondevice.offload.transfers", "ondevice.offload.passes", "ondevice.offload.host", "ondevice.offload.window",
    "ondevice.offload.updater", "ondevice.offload.disk", "ondevice.offload.disk_states",
    "ondevice.offload.engine",
    "ondevice.methods.lsp.window", "ondevice.methods.lsp.engine", "ondevice.methods.lsp.bases",
)  # fmt: skip
KINDS = ("hold", "record", "wait", "result")
LIST = Path(__file__).with_name("mutations.json")
CONFIGS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("defaults", {}, False),
    ("small", {"window": 2, "gradient_buffers": 2, "micro_batch_size": 2}, False),
    ("tiles", {"loss_tiles": 4, "micro_batch_size": 1, "window": 2}, False),
    ("converted", {"optimizer": "torch", "window": 2}, False),
    ("resident", {"resident_layers": 2, "resident_tables": True, "micro_batch_size": 1}, False),
    ("clipped", {"max_grad_norm": 0.1, "clip": "previous", "resident_layers": 2, "loss_tiles": 2}, False),
    ("exact norm", {"max_grad_norm": 0.1, "clip": "global", "loss_tiles": 2}, False),
    ("disk", {"disk_fraction": 1.0, "disk_masters": True, "window": 2}, False),
    ("disk for all", {"activations": "disk", "micro_batch_size": 2, "disk_fraction": 0.5, "optimizer": "torch",
                      "disk_masters": True}, False),
    ("experts", {"experts": "used", "window": 2, "max_grad_norm": 0.1, "clip": "global"}, False),
    ("ranks", {"max_grad_norm": 0.1, "clip": "layer", "loss_tiles": 2, "window": 2}, True),
    ("resident ranks", {"max_grad_norm": 0.1, "resident_layers": 2, "window": 2}, True),
    ("resident tables on ranks", {"max_grad_norm": 0.1, "resident_tables": True, "loss_tiles": 2, "window": 2}, True),
)  # fmt: skip
"""Name, settings, and whether several ranks train; the head is not tied."""
LSP_CONFIGS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("defaults", {}, False),
    ("small", {"gradient_buffers": 2, "compute": "float32", "optimizer": "torch"}, False),
    ("zero", {"schedule": "zero"}, False),
    ("host", {"weight_placement": "host", "window": 2}, False),
    ("unprojected", {"project": False, "micro_batch_size": 1}, False),
    ("exact norm", {"max_grad_norm": 0.1, "clip": "global"}, False),
    ("ranks", {"learned": True, "max_grad_norm": 0.1, "micro_batch_size": 1}, True),
    ("unprojected ranks", {"project": False, "micro_batch_size": 1}, True),
)
"""The same for the modules of LSP."""


@dataclass(frozen=True)
class Site:
    """One call: `number` counts those with the same text in one function."""

    module: str
    function: str
    text: str
    number: int

    @property
    def place(self) -> str:
        return (
            f"{self.module.removeprefix('ondevice.')}:{self.function}: {self.text} #{self.number}"
        )


def sites() -> list[Site]:
    """Every call of the modules that waits, records or holds."""
    found: list[Site] = []
    for module in MODULES:
        for function, node in _functions(module):
            texts = [ast.unparse(call) for call in _calls(node)]
            found += [
                Site(module, function, text, texts[:at].count(text))
                for at, text in enumerate(texts)
            ]
    return found


def _source(module: str) -> str:
    file = importlib.import_module(module).__file__
    assert file
    return Path(file).read_text(encoding="utf-8")


def _functions(module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for top in ast.parse(_source(module)).body:
        inside = top.body if isinstance(top, ast.ClassDef) else [top]
        prefix = f"{top.name}." if isinstance(top, ast.ClassDef) else ""
        for node in inside:
            if isinstance(node, ast.FunctionDef):
                yield prefix + node.name, node


def _calls(node: ast.AST) -> list[ast.Call]:
    calls = [
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
    ]
    calls = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in KINDS]
    return sorted(calls, key=lambda one: (one.lineno, one.col_offset, -(one.end_col_offset or 0)))


def early(event: Any) -> Any:
    """An event that knows of nothing: its record was left out."""
    if hasattr(event, "clock"):
        event.clock = {}
    return event


class _Without(ast.NodeTransformer):
    def __init__(self, call: ast.Call) -> None:
        self.call = call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self.call:
            return self.generic_visit(node)
        assert isinstance(node.func, ast.Attribute)
        if node.func.attr == "record":
            return ast.Call(ast.Name("_early", ast.Load()), [node], [])
        return (
            ast.Tuple([*node.args], ast.Load()) if node.func.attr == "hold" else ast.Constant(None)
        )


@contextmanager
def without(site: Site) -> Iterator[None]:
    """The engine without one call."""
    module = importlib.import_module(site.module)
    tree = ast.parse(_source(site.module))
    owner, _, name = site.function.rpartition(".")
    top = next(one for one in tree.body if getattr(one, "name", None) == (owner or name))
    node = next(one for one in top.body if getattr(one, "name", None) == name) if owner else top  # pyright: ignore
    same = [call for call in _calls(node) if ast.unparse(call) == site.text]
    _Without(same[site.number]).visit(node)
    ast.fix_missing_locations(tree)
    space = {**vars(module), "_early": early}
    exec(compile(tree, str(module.__file__), "exec"), space)
    function: Any = vars(getattr(module, owner))[name] if owner else getattr(module, name)
    other: Any = vars(space[owner])[name] if owner else space[name]
    function, other = (getattr(one, "__wrapped__", one) for one in (function, other))
    before, function.__globals__["_early"] = function.__code__, early
    function.__code__ = other.__code__
    try:
        yield
    finally:
        function.__code__ = before
        del function.__globals__["_early"]


def configs_of(site: Site) -> Any:
    """The settings of the engine that the site is in."""
    return LSP_CONFIGS if ".lsp." in site.module else CONFIGS


def noticed(site: Site, configs: Any = CONFIGS) -> str | None:
    """The first settings under which the checker finds a race, or the engine fails; None: nothing happens."""
    import pytest

    from tests.methods.lsp import test_happens_before as lsp
    from tests.methods.slideformer import test_happens_before as slideformer

    races = lsp.races if ".lsp." in site.module else slideformer.races
    for name, config, ranked in configs:
        with pytest.MonkeyPatch.context() as monkeypatch, without(site):
            try:
                if races({"timeout_s": 3.0, **config}, False, ranked, monkeypatch):
                    return name
            except Exception as error:
                return f"{name}: {type(error).__name__}"
    return None


def likely(site: Site) -> Any:
    """The site's settings, those first that use its module most."""
    together = site.function.endswith(("together", "all_reduce", "gather_resident"))
    word = "ranks" if together else ""
    for module in ("disk", "experts"):
        word = module if module in site.module else word
    return sorted(configs_of(site), key=lambda config: not (word and word in config[0]))


def main() -> None:
    chosen = [
        site
        for site in sites()
        if not sys.argv[1:] or any(word in site.place for word in sys.argv[1:])
    ]
    known: dict[str, str] = json.loads(LIST.read_text()) if LIST.exists() else {}
    for site in chosen:
        said = known.get(site.place, "")
        if said.startswith("same: ") and not sys.argv[1:]:
            continue
        found = noticed(site, likely(site))
        known[site.place] = (
            f"noticed: {found}" if found else said if said.startswith("same: ") else "NOT NOTICED"
        )
        print(site.place, "->", known[site.place], flush=True)
        LIST.write_text(json.dumps(known, indent=1) + "\n")
    places = [site.place for site in sites()]
    LIST.write_text(
        json.dumps({place: known[place] for place in places if place in known}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
