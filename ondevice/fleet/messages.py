"""The messages of a fleet, as bytes: little-endian, versioned, and refused with a reason if
incomplete.

develop/fleet-protocol.md has the tables; `VECTORS` in tests/fleet has bytes that every implementation
must give."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar, Self

from ondevice.core.errors import FleetError
from ondevice.fleet.numbers import HIGHEST, LIMIT, LOWEST, Numbers

VERSION = 1
MARK = 0xD7
"""First byte of every message."""
HEADER = struct.Struct("<BBBII")
"""Mark, version, kind, fleet, round."""
HASH_BYTES = 8
"""Of a state's SHA-256 in a message: they name a state among a fleet's, and prove nothing against
its makers."""
UNIT = -32
"""An adapter's elements are whole numbers of 2^-32."""
LARGEST_UNIT = -17
"""Highest exponent of a coefficient: its magnitude stays below 1/4, and every sum below fits 64
bits."""
MOST_NUMBERS = 4096
MOST_DIRECTIONS = 1 << 20
"""In one outcome: beyond any fleet whose devices have their own directions; it bounds the memory of
a reader."""


class Reader:
    """Takes fields from the front of a message.

    Raises:
        FleetError: from `take`, if the message ends early; from `end`, if something is left.
    """

    def __init__(self, data: bytes, what: str) -> None:
        self.data = bytes(data)
        self.what = what
        self.at = 0

    def take(self, fields: struct.Struct) -> tuple:
        """Return the next fields."""
        if self.at + fields.size > len(self.data):
            raise FleetError(
                f"{self.what} is cut off",
                expected=f"{self.at + fields.size} bytes or more",
                received=len(self.data),
            )
        values = fields.unpack_from(self.data, self.at)
        self.at += fields.size
        return values

    def end(self) -> None:
        """Check that nothing is left."""
        if self.at != len(self.data):
            raise FleetError(
                f"{self.what} is too long", expected=f"{self.at} bytes", received=len(self.data)
            )


def _numbers_bytes(numbers: Numbers) -> bytes:
    return struct.pack(
        f"<bH{len(numbers.mantissas)}h",
        numbers.exponent,
        len(numbers.mantissas),
        *numbers.mantissas,
    )


def _read_numbers(reader: Reader, lowest: int, highest: int) -> Numbers:
    exponent, count = reader.take(struct.Struct("<bH"))
    if not 1 <= count <= MOST_NUMBERS:
        raise FleetError(
            f"{reader.what} has {count} numbers", expected=f"1 to {MOST_NUMBERS}", received=count
        )
    if not lowest <= exponent <= highest:
        raise FleetError(
            f"{reader.what}: exponent", expected=f"{lowest} to {highest}", received=exponent
        )
    mantissas = reader.take(struct.Struct(f"<{count}h"))
    if min(mantissas) < -LIMIT:
        raise FleetError(
            f"{reader.what}: a number is out of range",
            expected=f"-{LIMIT} to {LIMIT}",
            received=-32768,
        )
    return Numbers(mantissas, exponent)


@dataclass(frozen=True)
class Message:
    """The fields of every message.

    Attributes:
        fleet: first four bytes of the charter's hash.
        round: counted from 0.
    """

    KIND: ClassVar[int] = 0
    fleet: int
    round: int

    def _header(self) -> bytes:
        return HEADER.pack(MARK, VERSION, self.KIND, self.fleet, self.round)

    @classmethod
    def _open(cls, data: bytes, what: str) -> tuple[Reader, int, int]:
        reader = Reader(data, what)
        mark, version, kind, fleet, number = reader.take(HEADER)
        if mark != MARK:
            raise FleetError(
                f"not a message of a fleet: {what}",
                expected=f"first byte {MARK}",
                received=mark,
            )
        if version != VERSION:
            raise FleetError(
                f"{what} is of another version",
                expected=f"version {VERSION}",
                received=f"version {version}",
                hint="use the same version of ondevice on the server and on every device",
            )
        if kind != cls.KIND:
            raise FleetError(
                f"the message is not {what}", expected=f"kind {cls.KIND}", received=kind
            )
        return reader, fleet, number


@dataclass(frozen=True)
class Task(Message):
    """A server's request to one device in one round.

    Attributes:
        begin: hash of the state to begin from.
        first_step: the generator's step number of the first local step; the next ones follow.
            Devices that share their seeds have the same, others each its own.
        local_steps: steps before the reply.
        learning_rate: of those steps; float32.
    """

    KIND: ClassVar[int] = 1
    begin: bytes
    first_step: int
    local_steps: int
    learning_rate: float
    _FIELDS: ClassVar[struct.Struct] = struct.Struct("<8sQHf")

    def to_bytes(self) -> bytes:
        """Return 33 bytes."""
        return self._header() + self._FIELDS.pack(
            self.begin, self.first_step, self.local_steps, self.learning_rate
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a task.

        Raises:
            FleetError: it is not a task, or of another version.
        """
        reader, fleet, number = cls._open(data, "a task")
        begin, first_step, local_steps, rate = reader.take(cls._FIELDS)
        reader.end()
        if not local_steps or first_step >= 1 << 63 or not (math.isfinite(rate) and rate > 0):
            raise FleetError(
                "the task cannot be done",
                expected="a positive number of steps, a step number below 2^63, a positive learning rate",
                received=f"{local_steps} steps from {first_step} at {rate}",
            )
        return cls(fleet, number, begin, first_step, local_steps, rate)


@dataclass(frozen=True)
class TaskReply(Message):
    """A device's reply after its local steps: one number per query and step, whatever the
    estimator.

    Attributes:
        begin: hash of the state that it began from.
        device: the device's number.
        rows: of its data, its weight in a mean; not more than count.
        loss: mean of its steps' losses, nats a labelled token; float32.
        numbers: projected gradients, local step by local step, query by query.
    """

    KIND: ClassVar[int] = 2
    begin: bytes
    device: int
    rows: int
    loss: float
    numbers: Numbers
    _FIELDS: ClassVar[struct.Struct] = struct.Struct("<8sQIf")

    def to_bytes(self) -> bytes:
        """Return 38 bytes and two a number."""
        fields = self._FIELDS.pack(self.begin, self.device, self.rows, self.loss)
        return self._header() + fields + _numbers_bytes(self.numbers)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a reply.

        Raises:
            FleetError: it is not a reply, or has values that no device can send.
        """
        reader, fleet, number = cls._open(data, "a reply")
        begin, device, rows, loss = reader.take(cls._FIELDS)
        numbers = _read_numbers(reader, LOWEST, HIGHEST)
        reader.end()
        if rows < 1 or not math.isfinite(loss):
            raise FleetError(
                "the reply is not of a training step",
                expected="one row or more, and a finite loss",
                received=f"{rows} rows, loss {loss}",
            )
        return cls(fleet, number, begin, device, rows, loss, numbers)


@dataclass(frozen=True)
class Group:
    """Coefficients of the directions of consecutive steps, all queries of a step before the next
    step's.

    Attributes:
        first_step: the generator's step number of the first.
        coefficients: w becomes w - sum of coefficient times direction; exponent in UNIT ..
            LARGEST_UNIT.
    """

    first_step: int
    coefficients: Numbers


@dataclass(frozen=True)
class Outcome(Message):
    """The update of a round; with the charter, all outcomes in order are the adapter.

    Attributes:
        before: hash of the state that it is applied to.
        after: hash of the state that comes out.
        groups: one if the seeds are shared, else one per device; empty if nobody replied.
    """

    KIND: ClassVar[int] = 3
    before: bytes
    after: bytes
    groups: tuple[Group, ...]
    _FIELDS: ClassVar[struct.Struct] = struct.Struct("<8s8sH")

    def to_bytes(self) -> bytes:
        """Return 29 bytes, and for each group 11 and two a coefficient."""
        parts = [self._header(), self._FIELDS.pack(self.before, self.after, len(self.groups))]
        for group in self.groups:
            parts += [struct.pack("<Q", group.first_step), _numbers_bytes(group.coefficients)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read an outcome.

        Raises:
            FleetError: it is not an outcome.
        """
        reader, fleet, number = cls._open(data, "an outcome")
        before, after, count = reader.take(cls._FIELDS)
        groups = []
        directions = 0
        for _ in range(count):
            (first_step,) = reader.take(struct.Struct("<Q"))
            numbers = _read_numbers(reader, UNIT, LARGEST_UNIT)
            directions += len(numbers.mantissas)
            groups.append(Group(first_step, numbers))
            if directions > MOST_DIRECTIONS or first_step >= 1 << 63:
                raise FleetError(
                    "the outcome is larger than any fleet's", received=f"{directions} directions"
                )
        reader.end()
        return cls(fleet, number, before, after, tuple(groups))


@dataclass(frozen=True)
class Refresh(Message):
    """New frozen tensors, such as a refreshed subspace: the trained vector begins again at zero in
    them.

    Attributes:
        before, after: hashes of the states around it.
        digest: SHA-256 of the frozen tensors, which travel separately and once.
    """

    KIND: ClassVar[int] = 4
    before: bytes
    after: bytes
    digest: bytes
    _FIELDS: ClassVar[struct.Struct] = struct.Struct("<8s8s32s")

    def to_bytes(self) -> bytes:
        """Return 59 bytes."""
        return self._header() + self._FIELDS.pack(self.before, self.after, self.digest)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a refresh.

        Raises:
            FleetError: it is not a refresh.
        """
        reader, fleet, number = cls._open(data, "a refresh")
        before, after, digest = reader.take(cls._FIELDS)
        reader.end()
        return cls(fleet, number, before, after, digest)


Event = Outcome | Refresh
"""A record of a log after its head."""


def read_event(data: bytes) -> Event:
    """Read an entry of a log.

    Raises:
        FleetError: it is neither an outcome nor a refresh.
    """
    kind = None
    if len(data) > 2:
        kind = data[2]
    if kind == Refresh.KIND:
        return Refresh.from_bytes(data)
    return Outcome.from_bytes(data)
