"""How a device stands with its server: for its log, its exit status, `--json` and the daemon's
page."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import FleetError
from ondevice.core.untrusted import read_json
from ondevice.fleet.link import News

log = logging.getLogger("ondevice.fleet")
FILE_NAME = "standing.json"
LOST = {
    News.UNREACHABLE: "cannot be reached",
    News.OTHER_CERTIFICATE: "has no certificate of this device's authority",
    News.NOT_ADMITTED: "does not admit this device: it does not have its public key, or the clocks differ",
    News.REFUSED: "replied with an error",
    News.ENDED: "cannot be reached: the process for the network ended",
}
"""The reasons for a lost connection, after the server's address."""


class Standing:
    """A device's connection, and the rounds that it could not reply to; kept in a file.

    Args:
        folder: the device's.
        address: the server's.
        say: called with a line for the user: one for each outage, and one for its end.

    Attributes:
        is_over: True once the server said that the fleet is over.
        failed: rounds without this device's reply, and the reasons.
    """

    def __init__(self, folder: Path, address: str, say: Callable[[str], None]) -> None:
        self.file = folder / FILE_NAME
        self.address = address
        self.say = say
        self.is_over = False
        self.failed: dict[int, str] = {}
        self.why = f"connecting to {address}"
        self._lost_at: float | None = None
        self._was_connected = False
        self._lock = threading.Lock()
        self._write()

    def hear(self, news: News) -> None:
        """Take a word of the process for the network."""
        if news is News.CONNECTED:
            self._connected()
        elif news in LOST:
            self._lost(LOST[news])

    def _connected(self) -> None:
        line = f"connected to {self.address}"
        if self._lost_at is not None and self._was_connected:
            line += f" again, after {time.monotonic() - self._lost_at:.0f} s"
        if self._lost_at is not None or not self._was_connected:
            self.say(line)
        self._lost_at = None
        self._was_connected = True
        self.why = ""
        self._write()

    def _lost(self, reason: str) -> None:
        why = f"the server at {self.address} {reason}"
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        if why == self.why:
            return
        self.why = why
        self.say(f"{why}; this device tries again until it is stopped (network.log has more)")
        self._write()

    def replied(self, number: int) -> None:
        """Take a round that this device has replied to."""
        if self.failed.pop(number, None) is not None:
            self._write()

    def failed_in(self, number: int, reason: str) -> None:
        """Take a round that this device could not reply to."""
        self.failed[number] = reason
        self._write()

    def check(self) -> None:
        """Check that this device has replied in each round that it was asked in.

        Raises:
            FleetError: it has not.
        """
        if self.failed:
            last = max(self.failed)
            raise FleetError(
                f"this device did not reply in {len(self.failed)} rounds of the fleet",
                expected="a reply in each round that it was asked in",
                received=f"round {last + 1}: {self.failed[last]}",
            )

    def _write(self) -> None:
        failure = None
        if self.failed:
            last = max(self.failed)
            failure = f"round {last + 1} failed: {self.failed[last]}"
        values = {"why": self.why, "failure": failure, "failed_rounds": self.failed}
        try:
            with self._lock:
                atomic_write(self.file, json.dumps(values, ensure_ascii=False))
        except OSError as error:  # a full disk must not end the device
            log.warning("%s cannot be written: %s", self.file, error)


def standing_of(folder: Path) -> dict[str, Any]:
    """Return `why` the device in a folder is not connected, and its last `failure`; empty without
    either."""
    try:
        values = read_json(folder / FILE_NAME)
        return {"why": values["why"] or values["failure"] or ""}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
