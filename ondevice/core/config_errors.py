"""Errors of settings in words: where each key stands, what an old one has become, which known one is near."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationError

from ondevice.core.errors import ConfigError
from ondevice.core.flags import Flag
from ondevice.core.near import nearest
from ondevice.core.wrong_values import MOST_LETTERS, UNKNOWN, problems_of, shortened

MOST_PROBLEMS = 20
"""Of an error: a document from outside may have thousands of unknown keys."""


class Section(BaseModel):
    """Base of configuration sections: it remembers their old keys.

    Attributes:
        RENAMED: old key to new key. A new key of another section is written with its section (`train.steps`); a
            renamed value is written `key=value` on both sides.
        REMOVED: old key to a clause that says what to do instead.
    """

    RENAMED: ClassVar[dict[str, str]] = {}
    REMOVED: ClassVar[dict[str, str]] = {}


def explain(
    error: ValidationError, model: type[BaseModel], document: Any, where: str,
    elsewhere: Callable[[], dict[str, set[str]]] | None, hint: str,
) -> ConfigError:  # fmt: skip
    """Return pydantic's error in words that name each key by its place in a run file; see `StrictConfig.parse`."""
    problems = []
    found = problems_of(error.errors(), document)
    for problem in found[:MOST_PROBLEMS]:  # to look for near names takes milliseconds for each
        if old := _old_key(model, problem.loc, problem.value):
            message = old
            problem = replace(problem, expected=None, received=shortened(repr(problem.value)))
        elif problem.kind in UNKNOWN:
            # A key that another method has is not misspelt: guessing a near one would send the user the wrong way.
            keys = _all_keys(model)
            key = str(problem.loc[-1])[:MOST_LETTERS]
            for name, owners in (elsewhere() if elsewhere else {}).items():
                keys.setdefault(name, set()).update(owners)
            message = problem.message + _right_name(model, problem.loc, key, keys)
        else:
            message = problem.message + _flag_of(model, problem.loc)
        problems.append(replace(problem, message=message))
    if len(problems) == 1:
        only = problems[0]
        message = f"{where}: {only.headline}"
        if only.meant is not None:
            hint = f"did you mean '{only.meant}'?"
        return ConfigError(message, expected=only.expected, received=only.received, hint=hint)
    texts = [str(problem) for problem in problems]
    if len(found) > MOST_PROBLEMS:
        texts.append(f"and {len(found) - MOST_PROBLEMS} more")
    return ConfigError(f"{where}: {'; '.join(texts)}", hint=hint)


def _flag_of(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Name the flag of the setting at `loc`, a place in pydantic's words; "" if it has none."""
    place = _section(model, loc[:-1]) if loc else None
    field = place[0].model_fields.get(str(loc[-1])) if place else None
    names = [flag.name for flag in (field.metadata if field else []) if isinstance(flag, Flag)]
    return f" ({names[0]})" if names else ""


def _right_name(
    model: type[BaseModel], loc: tuple[int | str, ...], key: str, keys: dict[str, set[str]]
) -> str:
    """Say which key was meant: by its dotted name if it is in another section of the run file."""
    section = str(loc[0]) if len(loc) > 1 else ""

    def dotted(name: str) -> list[str]:
        if "method" not in model.model_fields:  # one section: it knows no others
            return []
        places: Iterable[str] = {
            owner if owner in model.model_fields else "method" for owner in keys[name]
        }
        # `export` comes last: it has a few names of the other sections.
        places = sorted(places, key=lambda place: (place == "export", place))
        return [f"{place}.{name}" for place in places]

    if key in keys:
        elsewhere = [name for name in dotted(key) if name != f"{section}.{key}"]
        if elsewhere:
            sections = ", ".join(name.partition(".")[0] for name in elsewhere)
            return f"; it is a key of {sections}: write '{elsewhere[0]}'"
        owners = ", ".join(sorted(keys[key])) or "other sections"
        return f"; it is a key of {owners}"
    near = nearest(key, sorted(keys))
    if near is None:
        return ""
    names = dotted(near)
    is_section = not section and near in model.model_fields
    if not names or is_section or f"{section}.{near}" in names:
        names = [near]
    return f", did you mean '{names[0]}'?"


def _old_key(model: type[BaseModel], loc: tuple[int | str, ...], value: Any) -> str | None:
    """Say what became of the key or value at `loc`, a place in pydantic's words; None if nothing is known of it."""
    place = None
    if loc:
        place = _section(model, loc[:-1])
    if place is None:
        return None
    section, path = place
    key = str(loc[-1])
    if key in section.REMOVED:
        return f"'{'.'.join([*path, key])}' is no longer a setting: {section.REMOVED[key]}"
    for old in (f"{key}={value}", key):  # one key may have become two, by its value
        if old in section.RENAMED:
            new = section.RENAMED[old]
            elsewhere = "." in new.partition("=")[0]
            return f"'{'.'.join([*path, old])}' is now '{new if elsewhere else '.'.join([*path, new])}'"
    return None


def _section(
    model: type[BaseModel], loc: tuple[int | str, ...]
) -> tuple[type[Section], list[str]] | None:
    """The configuration at `loc`, and its path in a run file."""
    path: list[str] = []
    parts = iter(loc)
    for part in parts:
        field = model.model_fields.get(str(part))
        if field is None:
            return None
        path.append(str(part))
        types: list[Any] = [field.annotation, *get_args(field.annotation)]
        members = [
            member for member in types if isinstance(member, type) and issubclass(member, BaseModel)
        ]
        if (
            len(members) > 1
        ):  # pydantic puts the tag of the member that it took behind a union's key
            tag = next(parts, None)
            key = str(field.discriminator)
            members = [member for member in members if member.model_fields[key].default == tag]
        if len(members) != 1:
            return None
        model = members[0]
    if issubclass(model, Section):
        return (model, path)
    return None


def _all_keys(model: type[BaseModel]) -> dict[str, set[str]]:
    """Every key of `model` and of the sections below it, with the sections and the methods that have it."""
    schema = model.model_json_schema()
    keys: dict[str, set[str]] = {}
    sections = {
        str(part.get("$ref", "")).rpartition("/")[2]: name
        for name, part in schema["properties"].items()
    }
    for title, definition in (("", schema), *schema.get("$defs", {}).items()):
        name = definition.get("properties", {}).get("name", {}).get("const") or sections.get(title)
        for key in definition.get("properties", {}):
            keys.setdefault(key, set()).update({name} if name else ())
    return keys
