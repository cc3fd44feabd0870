"""A fleet's log: its charter and every outcome. It is the whole run; an adapter is rebuilt from it
without a model.

    "ODFLEET1"  u32 bytes of the charter, the charter (JSON), its CRC-32
    then for each event: u32 its bytes, the event, its CRC-32; before a refresh, in the same way, the file that it names

If the last event is cut off, the server was killed while writing: it is left out and reported.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import FleetError
from ondevice.fleet.charter import MOST_CHARTER_BYTES, Charter
from ondevice.fleet.frozen import MAGIC as FROZEN
from ondevice.fleet.frozen import Frozen
from ondevice.fleet.messages import Event, Outcome, Refresh, read_event
from ondevice.fleet.state import State

MAGIC = b"ODFLEET1"
SUFFIX = ".fleetlog"
_HEAD = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
_CRC = struct.Struct("<I")
CHECK_EVERY = 100
"""A replay checks the state's hash after so many events, and after the last."""


@dataclass(frozen=True)
class FleetLog:
    """A log that was read.

    Attributes:
        charter: its head.
        events: outcomes and refreshes, in the order in which they are applied.
        unfinished: bytes of an incomplete last event.
        frozen: files that refreshes name, by digest.
    """

    charter: Charter
    events: tuple[Event, ...]
    unfinished: int = 0
    frozen: dict[bytes, Frozen] = field(default_factory=dict)

    def events_until(self, rounds: int | None = None) -> tuple[Event, ...]:
        """Return the events of the first so many rounds; None for all.

        Raises:
            FleetError: the log has fewer.
        """
        outcomes = [
            place for place, event in enumerate(self.events, 1) if isinstance(event, Outcome)
        ]
        count = len(outcomes) if rounds is None else rounds
        if not 0 <= count <= len(outcomes):
            raise FleetError(
                f"the log has fewer than {count} rounds",
                expected=f"0 to {len(outcomes)}",
                received=count,
            )
        return self.events if rounds is None else self.events[: outcomes[count - 1] if count else 0]


def log_bytes(
    charter: Charter, events: Sequence[bytes], frozen: Mapping[bytes, Frozen] | None = None
) -> bytes:
    """Return a log of events that are encoded already, and of the files that refreshes among them
    name."""
    files = []
    if frozen:
        files = [read_event(event) for event in events]
    before = {place: frozen[event.digest].to_bytes() for place, event in enumerate(files)
              if frozen and isinstance(event, Refresh)}  # fmt: skip
    head = charter.to_bytes()
    parts = [MAGIC, _HEAD.pack(len(head)), head, _CRC.pack(zlib.crc32(head))]
    for place, event in enumerate(events):
        for entry in (*([before[place]] if place in before else []), event):
            parts += [_LENGTH.pack(len(entry)), entry, _CRC.pack(zlib.crc32(entry))]
    return b"".join(parts)


def write_log(
    path: Path,
    charter: Charter,
    events: Sequence[bytes],
    frozen: Mapping[bytes, Frozen] | None = None,
) -> None:
    """Write a log, all at once."""
    atomic_write(path, log_bytes(charter, events, frozen))


def read_log(data: bytes, name: str = "the log") -> FleetLog:
    """Read a log.

    Raises:
        FleetError: it is not a log, of another version, or damaged before its end.
    """
    if not data.startswith(MAGIC):
        raise FleetError(
            f"{name} is not a log of a fleet", expected=f"a file that begins with {MAGIC.decode()}"
        )
    at = len(MAGIC)
    if len(data) < at + _HEAD.size:
        raise FleetError(f"{name} is cut off in its charter")
    (length,) = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    if length > MOST_CHARTER_BYTES or len(data) < at + length + _CRC.size:
        raise FleetError(
            f"{name} is cut off in its charter", expected=f"{length} bytes", received=len(data) - at
        )
    head = data[at : at + length]
    at += length
    if zlib.crc32(head) != _CRC.unpack_from(data, at)[0]:
        raise FleetError(f"{name}: the charter is damaged", hint="copy the log again")
    at += _CRC.size
    charter = Charter.from_bytes(head)
    events = []
    frozen = {}
    while at < len(data):
        rest = len(data) - at
        size = 0
        if rest >= _LENGTH.size:
            size = _LENGTH.unpack_from(data, at)[0]
        if rest < _LENGTH.size + size + _CRC.size:
            return FleetLog(charter, tuple(events), rest, frozen)
        event = data[at + _LENGTH.size : at + _LENGTH.size + size]
        if zlib.crc32(event) != _CRC.unpack_from(data, at + _LENGTH.size + size)[0]:
            raise FleetError(f"{name}: event {len(events)} is damaged", hint="copy the log again")
        if event.startswith(FROZEN):
            file = Frozen.from_bytes(event)
            frozen[file.digest] = file
        else:
            events.append(checked(read_event(event), charter))
        at += _LENGTH.size + size + _CRC.size
    return FleetLog(charter, tuple(events), frozen=frozen)


def checked(event: Event, charter: Charter) -> Event:
    """Return an event of this fleet.

    Raises:
        FleetError: it is of another.
    """
    if event.fleet != charter.id:
        raise FleetError(
            "an event is of another fleet",
            expected=f"{charter.id:08x}",
            received=f"{event.fleet:08x}",
        )
    return event


def replay(log: FleetLog, *, rounds: int | None = None) -> State:
    """Return the state after the log's events: no model, no data, no forward pass.

    Args:
        rounds: only the first so many events; None for all.

    Raises:
        FleetError: the log has fewer rounds, or a state differs from the server's.
    """
    state = log.charter.state()
    events = log.events_until(rounds)
    for place, event in enumerate(events, 1):
        state.apply(event, check=place % CHECK_EVERY == 0 or place == len(events))
    return state
