"""A first-order fleet's messages as Flower's records, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ondevice.fleet import replies
from ondevice.fleet.averaging.arrays import from_bytes, to_bytes
from ondevice.fleet.averaging.rules import Arrays, check_alike
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.replies import Finite, Reply, Rows, checked

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
MOST_HEADER_BYTES = 4096
"""Of numpy's header before a tensor's numbers."""


class Metrics(Reply):
    """The numbers that come with an adapter."""

    rows: Rows
    loss: Finite


def request_of(content: RecordDict) -> dict[str, Any]:
    """Return what a device's process is asked (`device.Device`) for a message of this server."""
    config = dict(content[CONFIG])
    return {
        "charter": config["charter"], "adapter": to_bytes(arrays_of(content[ARRAYS])), "last": config["last"],
        "round": int(config.get("server-round", 1)) - 1, "over": bool(config.get("over", False)),
    }  # fmt: skip


def content_of(reply: dict[str, Any]) -> RecordDict:
    """Return a device's reply as Flower's strategies read it; an error, or a hash, has no
    arrays."""
    if "adapter" not in reply:
        return RecordDict({CONFIG: ConfigRecord(reply)})
    metrics = MetricRecord({"num-examples": int(reply["rows"]), "loss": float(reply["loss"])})
    return RecordDict({ARRAYS: record_of(from_bytes(reply["adapter"])), METRICS: metrics})


def reply_of(content: Any, expected: Arrays) -> Reply | tuple[Arrays, int, float]:
    """Return a device's reply: its tensors, rows and loss, or a reply without tensors.

    Args:
        expected: the fleet's tensors, of which a device may send some.

    Raises:
        Refusal: it has another form; nothing that is larger than the fleet's tensors is read.
    """
    with malformed():
        if ARRAYS not in content:
            return replies.reply_of(dict(content[CONFIG]))
        metrics = dict(content[METRICS])
        said = checked(Metrics, {"rows": metrics.get("num-examples"), "loss": metrics.get("loss")})
        given = {}
        for name, value in content[ARRAYS].items():
            if name not in expected or len(value.data) > expected[name].nbytes + MOST_HEADER_BYTES:
                raise Refusal(Code.NUMBERS, "the reply has other tensors than the fleet")
            given[name] = value.numpy()
    check_alike(given, {name: expected[name] for name in given})
    if not given:
        raise Refusal(Code.NUMBERS, "the reply has no tensors")
    return given, said.rows, said.loss


@contextmanager
def malformed() -> Iterator[None]:
    """Refuse whatever Flower's records or numpy cannot read."""
    try:
        yield
    except Refusal:
        raise
    except Exception:
        raise Refusal(Code.MALFORMED, "the reply cannot be read") from None


def record_of(arrays: Arrays) -> ArrayRecord:
    """Return an adapter's tensors as Flower carries them."""
    return ArrayRecord({name: Array(value) for name, value in sorted(arrays.items())})


def arrays_of(record: Any) -> Arrays:
    """Return what `record_of` was given."""
    return {name: value.numpy() for name, value in record.items()}
