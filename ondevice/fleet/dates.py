"""The date that a chat template sees: one for all devices of a fleet, from its charter."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ondevice.data.encode import is_dated
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.config import FleetRun
from ondevice.fleet.store import Store


def with_date(config: FleetRun, resume: bool) -> FleetRun:
    """Return the run file with its fleet's date: the one it names, or that of the fleet in its
    folder if `resume`, or the present."""
    kind = Store
    if config.averages:
        kind = AdapterStore
    when = config.fleet.date
    if when is None and resume and (config.train.out / kind.file_name).is_file():
        with kind.open(config.train.out) as store:
            when = store.charter.date
    return _dated(config, (when or datetime.now()).replace(microsecond=0))


def without_date(config: FleetRun, tokenizer: Any) -> FleetRun:
    """Return the run file without a date if the tokenizer's chat template writes none."""
    if is_dated(tokenizer):
        return config
    return _dated(config, None)


def _dated(config: FleetRun, when: datetime | None) -> FleetRun:
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"date": when})})
