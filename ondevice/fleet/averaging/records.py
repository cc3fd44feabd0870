"""A first-order fleet's messages as Flower's records, and back."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ondevice.fleet.averaging.arrays import from_bytes, to_bytes
from ondevice.fleet.averaging.rules import Arrays

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"


def request_of(content: RecordDict) -> dict[str, Any]:
    """Return what a device's process is asked (`device.Device`) for a message of this server."""
    config = dict(content[CONFIG])
    return {
        "charter": config["charter"], "adapter": to_bytes(arrays_of(content[ARRAYS])), "last": config["last"],
        "round": int(config.get("server-round", 1)) - 1,
    }  # fmt: skip


def reply_of(reply: dict[str, Any]) -> RecordDict:
    """Return a device's answer as Flower's strategies read it; a mistake, or a hash, has no arrays."""
    if "adapter" not in reply:
        return RecordDict({CONFIG: ConfigRecord(reply)})
    metrics = MetricRecord({"num-examples": int(reply["rows"]), "loss": float(reply["loss"])})
    return RecordDict({ARRAYS: record_of(from_bytes(reply["adapter"])), METRICS: metrics})


def record_of(arrays: Arrays) -> ArrayRecord:
    """Return an adapter's tensors as Flower carries them."""
    return ArrayRecord({name: Array(value) for name, value in sorted(arrays.items())})


def arrays_of(record: Any) -> Arrays:
    """Return what `record_of` was given."""
    return {name: value.numpy() for name, value in record.items()}
