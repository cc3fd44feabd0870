"""Errors and notes in the words of the API, for people who have no command line in front of them.

Hints name flags (`--steps 40`), because most errors are read in a terminal. Here a flag becomes the
field of a request; what no request can do, such as `--overwrite`, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from ondevice.api.runfile import RunConfig
from ondevice.core.flags import Flag
from ondevice.core.registry import methods

FIELDS = {
    "--model": "model",
    "--adapter": "adapter",
    "--artifact": "artifact",
    "--data": "dataset",
    "--eval-data": "eval_dataset",
    "--memory-limit": "limits.memory_bytes",
    "--force": "force",
    "--method": "method.name",
    "--to": "to",
    "--column": "columns",
    "--task": "task",
    "--set": "",
}
"""Fields of requests whose names differ from the setting's, and flags that no setting has."""
_FLAG = re.compile(r"`?(?<![\w-])(--[a-z][a-z0-9-]*)`?(?P<gap> ?)")
_REPEATED = re.compile(r"(--[a-z-]+) ((?:'[^']*'|[^\s'])+) \1 ")
_COMMAND = re.compile(r"^(?!.*pip install).*(?<![\w-])--[a-z]|`ondevice (?!serve)")
_ASIDE = re.compile(r"\([^)]*\)")
_CLAUSE = re.compile(r"(; |, or |, and | or )(?![^(]*\))")


@cache
def fields() -> dict[str, str]:
    """Return the field of a request for each flag."""
    found: dict[str, str] = {}
    for section in ("model", "data", "train"):
        config = RunConfig.model_fields[section].annotation
        for flag, name in _flags(config):
            found.setdefault(flag, f"{section}.{name}")
    for spec in methods():
        for flag, name in _flags(spec.config):
            found.setdefault(flag, f"method.{name}")
    return found | FIELDS


def _flags(config: Any) -> Iterator[tuple[str, str]]:
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        return
    for name, field in config.model_fields.items():
        for flag in field.metadata:
            if isinstance(flag, Flag):
                yield from ((one, name) for one in (flag.name, flag.also) if one)


def for_api(text: str) -> str:
    """Replace the flags that a request has a field for."""

    def field(match: re.Match[str]) -> str:
        name = fields().get(match[1])
        if name is None:
            return match[0]
        return f"`{name}`{match['gap']}" if name else ""

    return _FLAG.sub(field, _REPEATED.sub(r"\1 \2, ", text))


def hint_for_api(hint: str | None) -> str | None:
    """Replace flags, and leave out the alternatives that only a command line has.

    None is returned if nothing is left.
    """
    if hint is None:
        return None
    pieces = _CLAUSE.split(for_api(hint))
    kept = ""
    for index in range(0, len(pieces), 2):
        if _COMMAND.search(_ASIDE.sub("", pieces[index])):
            continue
        kept += (pieces[index - 1] if kept else "") + pieces[index]
    return kept.strip(", ") or None


def error_for_api(values: dict[str, Any]) -> dict[str, Any]:
    """Return an error's fields, with its hint as `hint` or `try`, in the words of the API."""
    changed = dict(values)
    for key in ("message", "expected"):
        if isinstance(values.get(key), str):
            changed[key] = for_api(values[key])
    for key in ("hint", "try"):
        if isinstance(values.get(key), str):
            changed[key] = hint_for_api(values[key])
    return changed
