"""A fleet's frozen tensors of a gradient: the file of a subspace, and a session that goes through
all.

A refresh in the log names the file by its SHA-256. The file travels once to each device, and in a
log."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from ondevice.core.errors import FleetError
from ondevice.core.session import Preparing, require
from ondevice.fleet.messages import Event, Refresh

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.fleet.charter import Charter

MAGIC = b"ODFROZEN1"
NAME = re.compile(rb"[a-z]{1,32}-[0-9]{1,18}\.safetensors")


@dataclass(frozen=True)
class Frozen:
    """A subspace's file.

    Attributes:
        name: that the method gave it; a replay looks for it.
        data: its bytes.
    """

    name: str
    data: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of the file, 32 bytes: what a refresh names."""
        return hashlib.sha256(self.data).digest()

    def check(self) -> None:
        """Check that the file holds finite tensors, before every device of a fleet gets it.

        Raises:
            FleetError: it does not.
        """
        try:
            finite = all(np.isfinite(value).all() for value in load(self.data).values())
        except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise FleetError("not a subspace's file", received=str(error)[:200]) from None
        if not finite:
            raise FleetError("a subspace has values that are not finite")

    def to_bytes(self) -> bytes:
        """Return name and file as they travel."""
        return MAGIC + self.name.encode() + b"\0" + self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` gave.

        Raises:
            FleetError: it is not a subspace's file, or has another name.
        """
        if data.startswith(MAGIC):
            name, found, rest = data[len(MAGIC) :].partition(b"\0")
        else:
            name = b""
            found = b""
            rest = b""
        if not found or not NAME.fullmatch(name):
            raise FleetError(
                "not frozen tensors of a fleet",
                received=name[:40].decode(errors="replace"),
            )
        return cls(name.decode(), rest)


def matched(events: Sequence[Event], given: Sequence[Frozen]) -> dict[bytes, Frozen]:
    """Return the files by digest.

    Raises:
        FleetError: a refresh has no file.
    """
    files = {file.digest: file for file in given}
    for event in events:
        if isinstance(event, Refresh) and event.digest not in files:
            raise FleetError(
                f"the frozen tensors of round {event.round} are missing",
                expected=event.digest.hex(),
            )
    return files


class Space:
    """Takes a session through the subspaces of a fleet, in the order of its log.

    Args:
        charter: the fleet's; one whose subspaces are given.
        session: at its beginning.
        name: of its trained vector.
        folder: for the subspaces' files.
    """

    def __init__(self, charter: Charter, session: Session, name: str, folder: Path) -> None:
        self.charter = charter
        self.session = session
        self.name = name
        self.folder = folder
        self.state = charter.state()
        self.place = 0

    def enter(self, events: Sequence[Event], file_of: Callable[[bytes], Frozen]) -> None:
        """Go on through the events from `place`, which are given; the session is then in the last
        subspace.

        Raises:
            FleetError: a refresh is not due by the charter.
        """
        for event in events:
            if isinstance(event, Refresh):
                if not self.charter.due(self.state):
                    raise FleetError(f"round {event.round} brings frozen tensors that are not due")
                file = file_of(event.digest)
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / file.name).write_bytes(file.data)
                self._load()
                require(self.session, Preparing).before_replay(
                    event.round * self.charter.fleet.local_steps, self.folder
                )
            self.state.apply(event, check=False)
        self.place += len(events)

    def measure(self, batch_at: Callable[[int], Any]) -> Frozen:
        """Return the subspace of an exact gradient of this device's rows; the session stays as it
        was.

        Raises:
            FleetError: the session gives none.
        """
        kept = self.session.state()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._load()
        path = require(self.session, Preparing).before_step(
            self.state.round * self.charter.fleet.local_steps, batch_at, self.folder
        )
        self.session.load_state(kept)
        if path is None:
            raise FleetError("this device computes no gradient", hint="a device over PyTorch does")
        return Frozen(path.name, path.read_bytes())

    def _load(self) -> None:
        flat = np.ascontiguousarray(self.state.flat(), dtype=np.float32)
        self.session.load_state({**self.session.state(), self.name: flat})
