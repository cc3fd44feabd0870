"""Status of a fleet: its charter, rounds, losses, bytes and hash, from its store or its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ondevice.core.errors import MissingPackageError, OndeviceError
from ondevice.fleet.averaging.arrays import digest
from ondevice.fleet.averaging.store import FILE_NAME as ADAPTERS
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.charter import Charter, CommonCharter
from ondevice.fleet.device import traffic_of
from ondevice.fleet.failures import failed_rounds
from ondevice.fleet.log import replay
from ondevice.fleet.privacy import DELTA, epsilon
from ondevice.fleet.standing import standing_of
from ondevice.fleet.store import FILE_NAME, Store, read_file


def status(path: Path, delta: float = DELTA) -> dict[str, Any]:
    """Return the object that `ondevice fleet status --json` prints; `rounds_table` is empty for a
    log.

    `epsilon` is of the device with the most replies, if the charter has noise and the accountant
    exists.

    Raises:
        FleetError: the path has no fleet.
    """
    path = Path(path)
    folder = path.parent
    if path.is_dir():
        folder = path
    if (path.is_dir() or path.name == ADAPTERS) and (folder / ADAPTERS).is_file():
        return _adapters(folder)
    if (path.is_dir() or path.name == FILE_NAME) and (folder / FILE_NAME).is_file():
        with Store.open(folder) as store:
            state = store.state()
            charter = store.charter
            table = store.table()
            most = store.count() if charter.fleet.secure else store.most_answers()
            devices = json.loads(store.fact("devices") or "{}")
            failed = failed_rounds(store)
    else:
        log = read_file(path)
        state = replay(log)
        charter = log.charter
        table = []
        devices = {}
        failed = {}
        most = len(log.events)
    own = {
        "rounds": state.round,
        "failed_rounds": failed,
        "hash": state.digest().hex(),
        "elements": charter.size,
    }
    return _values(charter, own, table, devices, _privacy(charter, most, delta))


def progress(folder: Path) -> dict[str, Any] | None:
    """Return how far a device is: `fleet`, `model`, `rounds`, `hash` and `bytes`, and `why` it is
    not connected or could not reply; only the last before its first message."""
    standing = standing_of(folder)
    try:
        values = status(folder)
    except OndeviceError:
        return standing or None
    found = {key: values[key] for key in ("fleet", "model", "rounds", "hash")}
    return found | {"bytes": traffic_of(folder)} | standing


def _adapters(folder: Path) -> dict[str, Any]:
    """Return the same of a first-order fleet."""
    with AdapterStore.open(folder) as store:
        charter = store.charter
        table = store.table()
        arrays = store.tensors()
        devices = json.loads(store.fact("devices") or "{}")
        failed = failed_rounds(store)
    elements = sum(value.size for value in arrays.values())
    own = {
        "rounds": len(table),
        "failed_rounds": failed,
        "hash": digest(arrays),
        "elements": elements,
    }
    return _values(charter, own, table, devices, {})


def _values(
    charter: CommonCharter,
    own: dict[str, Any],
    table: list[dict[str, Any]],
    devices: dict[str, bool],
    privacy: dict[str, Any],
) -> dict[str, Any]:
    replies = sum(row["answers"] for row in table)
    return {
        "fleet": f"{charter.id:08x}",
        "model": charter.model_source,
        **own,
        "loss": table[-1]["loss"] if table else None,
        "bytes_per_device_round": sum(row["bytes"] for row in table) / replies if replies else None,
        "devices": len(devices) or None,
        "hashes_equal": all(devices.values()) if devices else None,
        **privacy,
        "charter": charter.model_dump(mode="json"),
        "rounds_table": table,
    }


def _privacy(charter: Charter, answers: int, delta: float) -> dict[str, Any]:
    if not charter.fleet.noise_multiplier:
        return {}
    try:
        return {"epsilon": epsilon(charter.fleet.noise_multiplier, answers, delta), "delta": delta}
    except MissingPackageError as error:
        return {"epsilon": None, "delta": delta, "epsilon_note": error.message}
