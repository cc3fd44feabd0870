"""Errors of settings in words: where each key stands, what an old one has become, which known one is near."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationError

from ondevice.core.errors import ConfigError
from ondevice.core.near import nearest

MOST_PROBLEMS, MOST_LETTERS = 20, 300
"""Of an error: a document from outside may have thousands of unknown keys, or one of a million letters."""


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
    error: ValidationError, model: type[BaseModel], where: str, elsewhere: Callable[[], dict[str, set[str]]] | None,
    hint: str,
) -> ConfigError:  # fmt: skip
    """Return pydantic's error in words that name each key by its place in a run file; see `StrictConfig.parse`."""
    found = error.errors()
    problems = []
    first = found[0]
    for item in found[:MOST_PROBLEMS]:
        path = ".".join(str(part) for part in item["loc"])[:MOST_LETTERS]
        if old := _old_key(model, item["loc"], item["input"]):
            problems.append(f"{where}: {old}")
        elif item["type"] == "extra_forbidden":
            # A key that another method has is not misspelt: guessing a near one would send the user the wrong way.
            keys = _all_keys(model)
            key = str(item["loc"][-1])[:MOST_LETTERS]
            for name, owners in (elsewhere() if elsewhere else {}).items():
                keys.setdefault(name, set()).update(owners)
            right = _right_name(model, item["loc"], key, keys)
            problems.append(f"{where}: unknown key '{path}'{right}")
        else:
            problems.append(f"{where}: '{path}': {item['msg']} (received {_short(item['input'])})")
    if len(found) > MOST_PROBLEMS:
        problems.append(f"and {len(found) - MOST_PROBLEMS} more")
    return ConfigError("; ".join(problems), received=_short(first["input"]), hint=hint)


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


def _short(value: Any) -> str:
    text = repr(value)
    if len(text) <= MOST_LETTERS:
        return text
    return f"{text[:MOST_LETTERS]}..."


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
