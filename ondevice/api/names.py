"""Settings by their plain names: `rank=8` is `method.rank`, `steps=60` is `train.steps`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.core.config import (
    DataConfig,
    ExportConfig,
    ModelConfig,
    StrictConfig,
    TrainConfig,
)
from ondevice.core.errors import ConfigError
from ondevice.core.flags import Flag
from ondevice.core.near import nearest
from ondevice.core.registry import method as method_spec
from ondevice.core.registry import methods

SECTIONS: dict[str, type[StrictConfig]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
}
"""Sections that training reads in addition to the method's."""
ARGUMENTS = {
    "train_dataset": "rows",
    "dataset": "rows",
    "train_data": "rows",
    "eval_dataset": "eval_rows",
    "eval_data": "eval_rows",
    "validation_data": "eval_rows",
}
"""Names that other trainers have for rows that Python holds."""


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key.

    Args:
        settings: values by plain name (`rank`), by a flag's name (`max_length`) or by dotted key
            (`"method.rank"`); a section's name takes a dictionary, `method` also a method's name or
            its settings from `method_config`. Values that are None are left out.

    Raises:
        ConfigError: a name is unknown, is in two sections, or is given twice.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    values: dict[str, Any] = {}

    def put(key: str, value: Any, name: str) -> None:
        if key in values:
            raise ConfigError(
                f"'{key}' is given twice", received=f"{name}={value!r}", hint="give one of them"
            )
        values[key] = value

    for section in ("model", "data", "method", "train", "export"):
        if section in settings and not isinstance(settings[section], str):
            for key, value in _section(section, settings[section]).items():
                put(f"{section}.{key}", value, section)
    chosen = settings.get("method", settings.get("method.name", values.get("method.name")))
    known = _keys(chosen if isinstance(chosen, str) else None)
    for name, value in settings.items():
        if name in ("model", "data", "method", "train", "export") and not isinstance(value, str):
            continue
        if name in ARGUMENTS and not isinstance(value, str):
            raise ConfigError(
                f"unknown setting '{name}', did you mean {ARGUMENTS[name]}?",
                expected=f"{ARGUMENTS[name]}=...",
                received=f"{name}=...",
            )
        put(name if "." in name else _find(name, known), value, name)
    return values


def _section(name: str, value: Any) -> dict[str, Any]:
    """Return the keys of a section that is given as a dictionary or as settings."""
    if isinstance(value, StrictConfig):
        given = value.model_dump(exclude_unset=True)
        if name == "method":
            given = {"name": value.name, **given}  # type: ignore[attr-defined]
        return given
    if isinstance(value, Mapping):
        return dict(value)
    expected = f"a dictionary of the section {name}"
    if name == "method":
        expected = "a method's name, or ondevice.method_config(NAME, {...})"
    if name == "data":
        expected = "a path"
    raise ConfigError(
        f"{name} is of the wrong type", expected=expected, received=type(value).__name__
    )


def _keys(method: str | None) -> dict[str, list[str]]:
    """Map every plain name to the dotted keys that it may mean.

    Args:
        method: the run's; None takes the settings of every method.
    """
    own = [spec.config for spec in methods()] if method is None else [method_spec(method).config]
    sections: list[tuple[str, type[StrictConfig]]] = [
        *SECTIONS.items(),
        *(("method", config) for config in own),
    ]
    keys: dict[str, list[str]] = {}
    by_flag: dict[str, str] = {"method": "method.name"}
    for section, config in sections:
        for name, field in config.model_fields.items():
            key = f"{section}.{name}"
            if (section, name) != ("method", "name") and key not in keys.setdefault(name, []):
                keys[name].append(key)
            for flag in field.metadata:
                if isinstance(flag, Flag):
                    by_flag.setdefault(flag.name.lstrip("-").replace("-", "_"), key)
    for name in ExportConfig.model_fields:  # an export's `batch_size` is not meant if a run has one
        keys.setdefault(name, [f"export.{name}"])
    for name, key in by_flag.items():
        keys.setdefault(name, [key])
    if method is None and "schedule" in keys:  # the choice takes no method with one of its own
        keys["schedule"] = ["train.schedule"]
    return keys


def _find(name: str, known: Mapping[str, list[str]]) -> str:
    """Return the dotted key of a plain name."""
    keys = known.get(name, [])
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise ConfigError(
            f"'{name}' may be {' or '.join(keys)}",
            expected="the dotted key: " + " or ".join(f'**{{"{key}": ...}}' for key in keys),
            received=f"{name}=...",
        )
    owners = [spec.name for spec in methods() if name in spec.config.model_fields]
    if owners:
        raise ConfigError(
            f"'{name}' is not a setting of this method",
            expected=f"method={' or '.join(map(repr, owners))}",
            received=f"{name}=...",
        )
    near = nearest(name, sorted(known))
    guess = f", did you mean {near} ({known[near][0]})?" if near else ""
    raise ConfigError(
        f"unknown setting '{name}'{guess}",
        received=f"{name}=...",
        hint="`ondevice config schema` lists every key with its meaning",
    )
