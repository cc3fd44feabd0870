"""Reference pages and lists from the code: the text between the markers of docs.

    python docs/generate.py            rewrite every generated part
    python docs/generate.py --check    exit 1 and name the pages that differ

A part stands between `<!-- generated: NAME -->` and `<!-- /generated -->`; PARTS lists the names.
The daemon's openapi.json is written whole.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- /generated -->)", re.DOTALL)
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):$")
HEADINGS = {"Args": "Arguments"}


FEW = 3
"""Flags of a section of the run file that are named one by one."""
SHARED = 2
"""From so many sections on, a flag or key with the same words is explained once, at the top."""


def commands() -> str:
    """Every verb of the command line with its arguments and flags; shared flags stand once."""
    import typer.main

    from ondevice.cli.app import app

    verbs = _walk(typer.main.get_command(app), "ondevice")
    keys = _flags_of_keys()
    lines = {name: [(_flag(p), p) for p in command.params] for name, command in verbs}
    uses = Counter(line for listed in lines.values() for line, _ in listed)
    shared = [line for line, n in uses.items() if n >= SHARED and line.startswith("- `-")]
    flags = {line: p.opts[0] for listed in lines.values() for line, p in listed}
    rest = [line for line in shared if flags[line] not in keys]
    about_keys = "Flags of the run file's keys are explained [there](config.md), each with its key."
    parts = ["## Flags of several commands", "", about_keys, "", "\n".join(rest), ""]
    for name, command in verbs:
        arguments = [p for p in command.params if not p.opts[0].startswith("-")]
        names = [(p.metavar or p.name.upper()).strip("[]") for p in arguments]
        usage = " ".join([name, *(n if p.required else f"[{n}]" for n, p in zip(names, arguments))])
        about = inspect.cleandoc(command.help or "")
        parts += [f"## {name}", "", about, "", f"```text\n{usage} [FLAGS]\n```", ""]
        own = [line for line, _ in lines[name] if line not in shared]
        parts += ["\n".join(own), ""] if own else []
        others = _shared(
            dict.fromkeys(p.opts[0] for line, p in lines[name] if line in shared), keys
        )
        parts += [f"Also: {', '.join(others)}.", ""] if others else []
    return "\n".join(parts)


def _shared(names: Iterable[str], keys: dict[str, str]) -> list[str]:
    """Name a command's shared flags: together those of a section of the run file that it mostly
    has, with those that it lacks."""
    sections: dict[str, set[str]] = {}
    for flag, key in keys.items():
        sections.setdefault(key.strip("`").partition(".")[0], set()).add(flag)
    left = list(names)
    told = []
    for section, flags in sections.items():
        found = [flag for flag in left if flag in flags]
        if len(found) < FEW or 2 * len(found) < len(flags):
            continue
        left = [flag for flag in left if flag not in found]
        lacks = [f"`{flag}`" for flag in sorted(flags.difference(found))]
        told.append(f"flags of `{section}`" + f" (not {', '.join(lacks)})" * bool(lacks))
    return told + [f"`{flag}`" for flag in left]


def _flags_of_keys() -> dict[str, str]:
    """Each flag that sets a key of a run file, with the key."""
    from ondevice.api.runfile import RunConfig
    from ondevice.core.flags import Flag
    from ondevice.core.registry import methods as specs

    sections = [
        (key, field.annotation) for key, field in RunConfig.model_fields.items() if key != "method"
    ]
    sections += [("method", spec.config) for spec in specs()]
    return {
        flag.name: f"`{section}.{name}`"
        for section, config in sections
        for name, field in config.model_fields.items()
        for flag in field.metadata
        if isinstance(flag, Flag) and flag.name
    }


def _flag(parameter: Any) -> str:
    """A flag or an argument as one bullet."""
    if not parameter.opts[0].startswith("-"):
        name = (parameter.metavar or parameter.name.upper()).strip("[]")
        return f"- `{name}`: {_cell(parameter.help)}"
    name = ", ".join(f"`{flag}`" for flag in parameter.opts) + _value(parameter)
    default = _default(parameter)
    return f"- {name}: {_cell(parameter.help)}" + (f" Default: {default}." if default else "")


def _walk(group: Any, name: str) -> list[tuple[str, Any]]:
    collected = []
    for word, command in group.commands.items():
        deeper = getattr(command, "commands", None)
        if not deeper or getattr(command, "invoke_without_command", False):
            collected.append((f"{name} {word}", command))
        if deeper:
            collected += _walk(command, f"{name} {word}")
    return collected


def _value(parameter: Any) -> str:
    if parameter.is_flag:
        return ""
    kind = typing.get_args(parameter.type_descriptor.annotation) or (
        parameter.type_descriptor.annotation,
    )
    return f" {kind[0].__name__.upper().replace('STR', 'TEXT')}"


def _default(parameter: Any) -> str:
    value = parameter.default
    return "" if parameter.is_flag or value is None else f"`{value}`"


def settings() -> str:
    """Every key of a run file, section by section; one section for each method."""
    from ondevice.api.runfile import RunConfig
    from ondevice.core.registry import methods as specs

    uses = Counter(line for spec in specs() for line, _, _ in _key_lines(spec.config))
    shared = [line for line, count in uses.items() if count >= SHARED]
    parts = []
    for key, field in RunConfig.model_fields.items():
        if key != "method":
            section: Any = field.annotation
            parts += [f"## {key}", "", _cell(inspect.getdoc(section)), "", _keys(section), ""]
            continue
        parts += ["## Keys of several methods", "", "\n".join(shared), ""]
        for spec in specs():
            parts += [f"## method: {spec.name}", "", _cell(inspect.getdoc(spec.config)), ""]
            listed = _key_lines(spec.config)
            parts += [line + _ends(default) for line, _, default in listed if line not in shared]
            also = [f"`{name}` ({default})" for line, name, default in listed if line in shared]
            parts += ["", f"Also: {', '.join(also)}.", ""]
    return "\n".join(parts)


def fleet_charter() -> str:
    """The fields of a fleet's charter."""
    from ondevice.fleet.charter import Charter

    return _keys(Charter)


def fleet_adapter_charter() -> str:
    """The fields of a first-order fleet's charter."""
    from ondevice.fleet.averaging.charter import AdapterCharter

    return _keys(AdapterCharter)


def fleet_settings() -> str:
    """The sections that a fleet's run file has in addition to an ordinary one's."""
    from ondevice.api.runfile import RunConfig
    from ondevice.fleet.config import FleetRun

    parts = []
    for key in sorted(set(FleetRun.model_fields) - set(RunConfig.model_fields)):
        section: Any = FleetRun.model_fields[key].annotation
        parts += [f"### {key}", "", _cell(inspect.getdoc(section)), "", _keys(section), ""]
    return "\n".join(parts)


def _keys(section: Any) -> str:
    return "\n".join(line + _ends(default) for line, _, default in _key_lines(section))


def _ends(default: str) -> str:
    if default == "`null`":  # the type says that it is optional
        return ""
    return f" Default: {default}." if default else " Needed."


def _key_lines(section: Any) -> list[tuple[str, str, str]]:
    """Each key of a section: its bullet without the default, its name, its default."""
    from ondevice.core.flags import Flag

    lines, described = [], section.descriptions()
    for name, field in section.model_fields.items():
        if name == "name" and typing.get_origin(field.annotation) is typing.Literal:
            continue  # the method's own name
        default = ""
        if not field.is_required():
            default = f"`{_plain(field.get_default(call_default_factory=True))}`"
        flags = [(flag.name, flag.also) for flag in field.metadata if isinstance(flag, Flag)]
        line = f"- `{name}` ({_type(field.annotation)}): {_cell(described.get(name))}"
        if flags:
            line += f" Flag: {', '.join(f'`{name}`' for name in flags[0] if name)}."
        lines.append((line, name, default))
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) is typing.Annotated:
        return _type(typing.get_args(annotation)[0])
    arguments = [a for a in typing.get_args(annotation) if a not in (type(None), Ellipsis)]
    if typing.get_origin(annotation) is tuple:
        return f"list of {_type(arguments[0])}"
    if typing.get_origin(annotation) is dict:
        return "mapping"
    if arguments:
        words = any(
            typing.get_origin(one) is typing.Literal for one in arguments
        )  # `auto` is the null
        return ", ".join(map(_type, arguments)) + ("" if words else ", optional")
    return {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
        "Path": "path",
    }.get(annotation.__name__, annotation.__name__)


def methods() -> str:
    """Every method in a line."""
    from ondevice.core.registry import methods as specs
    from ondevice.core.registry import targets

    rows = [
        (
            f"`{spec.name}`",
            {"adapter": "an adapter", "all": "all parameters"}[spec.trains],
            spec.summary,
            spec.keeps,
            ", ".join(
                {"torch": "PyTorch", "mlx": "MLX"}.get(backend, backend)
                for backend in spec.sessions
            ),
            ", ".join(f"`{target.name}`" for target in targets() if target.kind in spec.programs),
            f"[{spec.page.removesuffix('.md')}]({spec.page})" if spec.page else "",
        )
        for spec in specs()
    ]
    return _table(
        (
            "Method",
            "Trains",
            "How",
            "Keeps in addition to the weights",
            "Runs in",
            "Exports to",
            "Page",
        ),
        rows,
    )


def errors() -> str:
    """Every error with its exit code."""
    from ondevice.core import errors as module

    kinds = [
        k
        for k in vars(module).values()
        if isinstance(k, type) and issubclass(k, module.OndeviceError)
    ]
    rows = [
        (str(k.exit_code), f"`{k.__name__}`", _cell((inspect.getdoc(k) or "").splitlines()[0]))
        for k in kinds
    ]
    rows.append(
        (
            str(module.INTERRUPTED_EXIT_CODE),
            "",
            "Stopped by Ctrl-C, SIGTERM or SIGHUP; the state is saved.",
        )
    )
    return _table(("Exit code", "Error", "When"), sorted(rows, key=lambda row: int(row[0])))


def events() -> str:
    """Every event with its fields."""
    from ondevice.core.config import attribute_docstrings
    from ondevice.training import events as module

    notes, parts = attribute_docstrings(module.__name__), []
    for kind, event in module.KINDS.items():
        fields = [
            f"- `{item.name}` ({item.type}): {_cell(notes.get((event.__name__, item.name), ''))}"
            for item in dataclasses.fields(event)
            if item.name != "time_s"
        ]
        parts += [
            f"## {kind}",
            "",
            _cell(inspect.getdoc(event)),
            "",
            "\n".join(fields),
            "",
        ]
    return "\n".join(parts)


def manifest() -> str:
    """Every field of an artifact's manifest."""
    from ondevice.core import manifest as module
    from ondevice.core.config import attribute_docstrings

    sections = [
        module.Manifest,
        module.ModelInfo,
        module.GeneratorInfo,
        module.ProgramSpec,
        module.ProgramMethod,
    ]
    sections += [module.TensorPort, module.StateTensor, module.Counter, module.Constant]
    notes, parts = attribute_docstrings(module.__name__), []
    for section in [*sections, module.AdapterEntry]:
        fields = [
            f"- `{name}` (`{_short(field.annotation)}`): "
            + _cell(notes.get((section.__name__, name), ""))
            for name, field in section.model_fields.items()
        ]
        title, about = f"### {section.__name__}", _cell(inspect.getdoc(section))
        parts += [title, "", about, "", "\n".join(fields), ""]
    return "\n".join(parts)


def _short(annotation: Any) -> str:
    text = str(annotation) if typing.get_args(annotation) else annotation.__name__
    return re.sub(r"\b(ondevice\.core\.manifest|typing)\.", "", text)


def interface() -> str:
    """Every public name of the package with its signature and docstring."""
    import ondevice

    parts = []
    for name in ondevice.__all__:
        thing = getattr(importlib.import_module(f"ondevice.{ondevice._WHERE[name]}"), name)
        parts += [f"## {name}", ""]
        if not inspect.isclass(thing):
            parts += [f"```python\n{_signature(name, thing)}\n```", ""]
        parts += [_docstring(inspect.getdoc(thing) or ""), ""]
        for member, function in vars(thing).items() if inspect.isclass(thing) else ():
            if isinstance(function, (types.FunctionType, classmethod)) and not member.startswith(
                "_"
            ):
                called = f"{name}.{member}"
                parts += [
                    f"### {called}",
                    "",
                    f"```python\n{_signature(called, getattr(thing, member))}\n```",
                    "",
                ]
                parts += [_docstring(inspect.getdoc(function) or ""), ""]
    return "\n".join(parts)


def _signature(name: str, function: Any) -> str:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(node, ast.FunctionDef):
        raise TypeError(f"{name} is no function")
    listed, gives = _parameters(node.args), ast.unparse(node.returns) if node.returns else "None"
    args = ", ".join(listed)
    if len(name + args + gives) > 85:
        args = "\n    " + ",\n    ".join(listed) + ",\n"
    return f"ondevice.{name}({args}) -> {gives}"


def _parameters(node: ast.arguments) -> list[str]:
    """Every parameter of a function as source, without `self` and `cls`."""

    def one(argument: ast.arg, default: ast.expr | None) -> str:
        return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")

    plain = [*node.posonlyargs, *node.args]
    padded = [None] * (len(plain) - len(node.defaults)) + list(node.defaults)
    listed = [one(*pair) for pair in zip(plain, padded) if pair[0].arg not in ("self", "cls")]
    listed += [f"*{ast.unparse(node.vararg)}"] if node.vararg else ["*"] if node.kwonlyargs else []
    listed += [one(*pair) for pair in zip(node.kwonlyargs, node.kw_defaults)]
    return listed + ([f"**{ast.unparse(node.kwarg)}"] if node.kwarg else [])


def _docstring(text: str) -> str:
    """A docstring of this project as Markdown: its sections become lists; `Raises` is left to
    `help()` and the page of errors."""
    out, section = [], ""
    text = re.sub(r"^Raises:\n(?:(?: .*)?\n?)*", "", text, flags=re.MULTILINE)
    for line in text.splitlines():
        if match := SECTION.match(line):
            section = match[1]
            out += [f"**{HEADINGS.get(section, section)}**", ""]
        elif section and line.strip():
            item = re.match(r"    (\w[\w., ]*): (.*)", line)
            out.append(
                f"- `{item[1]}`: {item[2]}"
                if item
                else f"  {line.strip()}"
                if out[-1]
                else line.strip()
            )
        else:
            section = "" if line and not line.startswith(" ") else section
            out.append(line)
    return "\n".join(out)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return (
        "\n".join(
            [
                *lines,
                *("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows),
            ]
        )
        + "\n"
    )


def families() -> str:
    """Each family of models with the methods and places that the conformance table runs it with."""
    sys.path.insert(0, str(ROOT))
    from tests.conformance.table import families_markdown

    return families_markdown()


def supported() -> str:
    """Each method and place that the conformance table claims."""
    sys.path.insert(0, str(ROOT))
    from tests.conformance.table import markdown

    return markdown()


def golden() -> str:
    """Each implementation of MeSP with the golden gradients that it meets."""
    sys.path.insert(0, str(ROOT))
    from tests.golden.cases import markdown

    return markdown()


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        commands, settings, methods, errors, events, manifest, interface, fleet_charter,
        fleet_adapter_charter, fleet_settings, families, supported, golden,
    )
}  # fmt: skip


def update(text: str) -> str:
    """`text` with every generated part written anew."""
    return MARKED.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]().strip()}\n\n{match[4]}", text)


def main(arguments: list[str]) -> int:
    """Rewrite the pages, or with --check only compare; returns the exit status."""
    status = 0
    folder = ROOT / "docs" / "reference"
    others = (
        *(
            "docs/methods/index.md",
            "docs/results/models.md",
            "docs/results/conformance.md",
            "develop/artifact.md",
            "develop/fleet-protocol.md",
            "develop/events.md",
        ),
    )
    pages = [*sorted(folder.glob("*.md")), *(ROOT / name for name in others)]
    for path in [*pages, folder / "openapi.json"]:
        text = path.read_text() if path.exists() else ""
        new = update(text) if path.suffix == ".md" else openapi()
        if new == text:
            continue
        name = path.relative_to(ROOT)
        if "--check" in arguments:
            print(f"{name} differs from the code; try: make docs", file=sys.stderr)
            status = 1
        else:
            path.write_text(new)
            print(f"{name}: rewritten")
    return status


def openapi() -> str:
    """The daemon's OpenAPI document."""
    from ondevice.server.app import openapi as document

    return document()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
