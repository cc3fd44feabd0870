"""What goes wrong while a fleet's server runs, for its log, its exit status and `--json`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ondevice.core.errors import FleetError
from ondevice.core.untrusted import parse_json
from ondevice.fleet.file import FleetFile

FACT = "failed_rounds"
SILENT = "no_reply"
"""A device that was asked did not reply in time."""
AGAIN_S = 60.0


class Failures:
    """The rounds that changed nothing, with the reasons; those of earlier servers too.

    Args:
        store: keeps them.

    Attributes:
        own: rounds that failed while this server ran.
    """

    def __init__(self, store: FleetFile) -> None:
        self.store = store
        self.own: dict[int, dict[str, int]] = {}
        self.reasons: Counter[str] = Counter()

    def note(self, reason: str) -> None:
        """Count a reason of the round under way."""
        self.reasons[reason] += 1

    def close(self, number: int, replies: int, asked: int) -> str:
        """End a round; return what its line says of it."""
        reasons = self.reasons
        self.reasons = Counter()
        silent = asked - replies - reasons.total()
        if silent > 0:
            reasons[SILENT] += silent
        said = shown(reasons)
        if replies:
            return f"{replies} replies" + (f" ({said})" if said else "")
        self.own[number] = dict(reasons)
        self.store.set_fact(FACT, json.dumps(failed_rounds(self.store) | {number: dict(reasons)}))
        return f"failed: {said or 'no device was asked'}"


def failed_rounds(store: FleetFile) -> dict[int, dict[str, int]]:
    """Return the rounds of a fleet that changed nothing, with the number of each reason."""
    found = parse_json(store.fact(FACT) or "{}")
    return {int(number): reasons for number, reasons in found.items()}


def shown(reasons: dict[str, int]) -> str:
    """Return reasons as a line says them."""
    return ", ".join(f"{reason} {count} times" for reason, count in sorted(reasons.items()))


class Patience:
    """How long a server waits for devices; it says so, once in a while.

    Args:
        wait_s: after so long it gives up.
        least: as many devices are needed.
    """

    def __init__(self, wait_s: float, least: int) -> None:
        self.wait_s = wait_s
        self.least = least
        self.renew()

    def renew(self) -> None:
        """Begin to wait from now on: the fleet has moved."""
        self.since = time.monotonic()
        self.said: tuple[int, float] | None = None

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.since + self.wait_s

    def wait(self, nodes: Iterable[int]) -> None:
        """Say whom the server waits for, if that is news."""
        count = len(set(nodes))
        now = time.monotonic()
        if self.said is not None and self.said[0] == count and now < self.said[1] + AGAIN_S:
            return
        self.said = (count, now)
        left = max(0.0, self.since + self.wait_s - now)
        say(
            f"waiting for devices: {count} connected, {self.least} needed; "
            f"gives up in {left:.0f} s without them"
        )

    def gave_up(self, connected: int, taking_part: int) -> FleetError:
        """Return the error of a server with too few devices to serve."""
        return FleetError(
            f"too few devices take part: gave up after {self.wait_s:g} s",
            expected=self.least,
            received=f"{taking_part} of {connected} that are connected",
            hint="a device's own log says why it does not; --wait is the longest wait",
        )


class ServerError(FleetError):
    """A server that failed in its purpose; `--json` has the fleet's status too."""

    def __init__(self, message: str, values: dict[str, Any], **more: Any) -> None:
        super().__init__(message, **more)
        self.values = values

    @classmethod
    def of(cls, error: FleetError, values: dict[str, Any]) -> ServerError:
        """Return an error together with the fleet's status."""
        return cls(
            error.message,
            values,
            expected=error.expected,
            received=error.received,
            hint=error.hint,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**self.values, **super().to_dict()}


def say(text: str) -> None:
    """Print a line to the user of a server; `flower.serve` hands it on."""
    print(f"fleet: {text}", flush=True)
