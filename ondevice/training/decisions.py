"""The choices that a run made for itself: its log records them, and a resumed run takes them from there.

A choice may follow a measurement, the free memory or the installed packages, so making it again could give another
one. Rank 0 decides for all ranks, and the head of the log keeps the choice as a value by dotted key.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.training.events import FILE_NAME, read_start
from ondevice.training.identity import DATE, iso

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig

METHOD_NAME = "method.name"
LENGTH = "data.max_length_tokens"
PLACEMENT = "placement."
"""Prefix of settings that the run file leaves as `auto`. They do not change results, so they are not in an identity."""


def recorded_decisions(out: Path) -> dict[str, Any]:
    """Return what the run in `out` decided, by dotted key; nothing if there is no log."""
    start = read_start(out / FILE_NAME)
    # An older log has no date of its own; its rows were rendered when it began.
    if start is None:
        return {}
    return {DATE: iso(start.time_s), **start.decided}


def with_decisions(config: RunConfig, decided: dict[str, Any]) -> RunConfig:
    """Return the run file with recorded choices in place of those that it leaves open."""
    name = decided.get(METHOD_NAME)
    if config.chosen and name is not None and name != config.method.name:
        config = config.with_method(name)
    for key, value in decided.items():
        section_name, _, field = key.partition(".")
        section = getattr(config, section_name, None)
        if key == METHOD_NAME or section is None or field not in type(section).model_fields:
            continue
        if field not in section.model_fields_set or getattr(section, field) is None:
            config = config.model_copy(
                update={section_name: section.model_copy(update={field: value})}
            )
    return config


def with_placement(config: RunConfig, decided: dict[str, Any]) -> RunConfig | None:
    """Return the run file with the recorded placement in place of `auto`; None if there is nothing to replace."""
    method = config.method
    known = {
        field: decided[PLACEMENT + field]
        for field in type(method).model_fields
        if getattr(method, field) == "auto" and PLACEMENT + field in decided
    }
    if known:
        return config.model_copy(update={"method": method.model_copy(update=known)})
    return None


def placement_of(config: RunConfig, resolved: Any) -> dict[str, Any]:
    """Return what was decided for the settings that `config` leaves as `auto`."""
    open_fields = (
        field
        for field in type(config.method).model_fields
        if getattr(config.method, field) == "auto"
    )
    return {PLACEMENT + field: getattr(resolved, field) for field in open_fields}
