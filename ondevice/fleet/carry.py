"""A round as a file below 2 kB, for a device without a network: through a share sheet, on a stick,
as a QR code.

    "ODCARRY1"  then for each entry: its kind, u16 its bytes, the entry; at the end the CRC-32 of all before
    kinds: C charter (zlib), N device u64, E outcome or refresh, T task, A reply, K and S of a signed reply: its
    signer's public key and the signature

A `Desk` is a server that waits for nobody: its open round is in the store, so each call is a
process of its own."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ondevice.core.errors import FleetError
from ondevice.fleet.charter import Charter
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.keys import REPLY_DOMAIN, Signed, verify
from ondevice.fleet.messages import Outcome, Task, TaskReply
from ondevice.fleet.rounds import OpenRound, Rounds
from ondevice.fleet.store import Store

MAGIC = b"ODCARRY1"
SUFFIX = ".odfleet"
MOST_BYTES = 2000
MOST_CHARTER_BYTES = 1 << 16
_ENTRY = struct.Struct("<cH")
_CRC = struct.Struct("<I")


@dataclass
class Parcel:
    """The content of a file; see `ondevice.fleet.device.Device`."""

    charter: bytes | None = None
    device: int | None = None
    events: list[bytes] = field(default_factory=list)
    task: bytes | None = None
    answer: bytes | None = None
    signed: Signed | None = None


def files_of(parcel: Parcel) -> list[bytes]:
    """Return the files of a parcel, each below 2 kB, to be taken in order; usually one.

    Raises:
        FleetError: a single entry is larger, as an outcome of many devices' own seeds is.
    """
    entries = list(_entries(parcel))
    files = []
    current = MAGIC
    for kind, data in entries:
        entry = b""
        if len(data) < 1 << 16:
            entry = _ENTRY.pack(kind, len(data)) + data
        if not entry or len(MAGIC) + len(entry) + _CRC.size > MOST_BYTES:
            raise FleetError(
                "a message is too large to be carried as a file",
                expected=f"{MOST_BYTES} bytes",
                received=f"{len(data)} bytes",
                hint="seeds: shared keeps an outcome as small as one reply",
            )
        if len(current) + len(entry) + _CRC.size > MOST_BYTES:
            files.append(current)
            current = MAGIC
        current += entry
    return [data + _CRC.pack(zlib.crc32(data)) for data in [*files, current]]


def _entries(parcel: Parcel) -> Iterator[tuple[bytes, bytes]]:
    if parcel.charter is not None:
        yield b"C", zlib.compress(parcel.charter, 9)
    if parcel.device is not None:
        yield b"N", struct.pack("<Q", parcel.device)
    for event in parcel.events:
        yield b"E", event
    if parcel.task is not None:
        yield b"T", parcel.task
    if parcel.answer is not None:
        yield b"A", parcel.answer
    if parcel.signed is not None:
        yield b"K", parcel.signed.signer
        yield b"S", parcel.signed.signature


def parcel_of(data: bytes, name: str = "the file") -> Parcel:
    """Read a file.

    Raises:
        FleetError: it is not a fleet's file, or damaged.
    """
    if not data.startswith(MAGIC) or len(data) < len(MAGIC) + _CRC.size:
        raise FleetError(f"{name} is not a round of a fleet", expected=f"a *{SUFFIX} file")
    body = data[: -_CRC.size]
    if zlib.crc32(body) != _CRC.unpack_from(data, len(body))[0]:
        raise FleetError(f"{name} is damaged", hint="send it again")
    parcel = Parcel()
    at = len(MAGIC)
    signer = b""
    signature = b""
    while at < len(body):
        kind, size = _ENTRY.unpack_from(body, at) if at + _ENTRY.size <= len(body) else (b"", 0)
        entry = body[at + _ENTRY.size : at + _ENTRY.size + size]
        at += _ENTRY.size + size
        if at > len(body) or not kind:
            raise FleetError(f"{name} is damaged", hint="send it again")
        if kind == b"C":
            parcel.charter = _unpacked(entry, name)
        elif kind == b"N" and size == 8:
            (parcel.device,) = struct.unpack("<Q", entry)
        elif kind == b"E":
            parcel.events.append(entry)
        elif kind == b"T":
            parcel.task = entry
        elif kind == b"A":
            parcel.answer = entry
        elif kind == b"K":
            signer = entry
        elif kind == b"S":
            signature = entry
        else:
            raise FleetError(f"{name} is of a newer version", received=f"entry {kind!r}")
    if signer or signature:
        parcel.signed = Signed(signer, signature)
    return parcel


def _unpacked(data: bytes, name: str) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MOST_CHARTER_BYTES)
    except zlib.error:
        raise FleetError(f"{name} is damaged", hint="send it again") from None
    if not unpacker.eof:
        raise FleetError(
            f"{name}: the charter is too large", expected=f"{MOST_CHARTER_BYTES} bytes at most"
        )
    return text


class Desk:
    """A fleet's server whose rounds wait in its store for files.

    Args:
        store: the fleet's; nobody else may be running its rounds.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        if store.charter.fleet.secure:
            raise FleetError(
                "a secure fleet's rounds need a network: its devices talk four times in each"
            )
        if store.charter.subspace == "given":
            raise FleetError(
                "this fleet's subspaces need a network: each is a file of megabytes",
                hint="begin with method.subspace=random for rounds as files",
            )
        self.rounds = Rounds(store.charter, store.state())
        for number, begin, tasks in store.asked():
            answers = {answer.device: answer for answer in store.answers(number)}
            self.rounds.open[number] = OpenRound(number, begin, tasks, answers)
            self.rounds.next = max(self.rounds.next, number + 1)

    def out(self, device: int, last: bool = False) -> list[bytes]:
        """Return the files for a device: the charter at first, the missing events, and its task of the
        open round.

        Args:
            last: only the missing events.

        Raises:
            FleetError: the device has already replied to its task.
        """
        known = self.store.fact(f"carried {device}")
        place = int(known or 0)
        charter: Charter = self.store.charter
        parcel = Parcel(None if known else charter.to_bytes(), device, self.store.events(place))
        if not last:
            task = self._task(device)
            parcel.task = task.to_bytes()
        return files_of(parcel)

    def _task(self, device: int) -> Task:
        current = max(self.rounds.open.values(), key=lambda item: item.number, default=None)
        if current is None:
            current = self.rounds.begin([device])
        elif device not in current.tasks:
            self.rounds.invite(current.number, device)
        elif device in current.answers:
            raise FleetError(
                f"device {device} has replied in round {current.number}",
                hint="`ondevice fleet carry in FLEET --close` ends the round",
            )
        self.store.ask(current.begin, {device: current.tasks[device]}, self.store.count())
        return current.tasks[device]

    def take(self, data: bytes, name: str = "the file") -> TaskReply:
        """Take a device's reply from its file.

        Raises:
            FleetError: it is refused, with the reason.
        """
        parcel = parcel_of(data, name)
        if parcel.answer is None:
            raise FleetError(
                f"{name} carries no reply", hint="it is a round on its way to a device"
            )
        key = self._signer(parcel, name)
        answer = self.rounds.receive(parcel.answer, parcel.device)
        if key is not None:
            self.store.set_fact(f"key {answer.device}", key)
        self.store.take(answer)
        return answer

    def _signer(self, parcel: Parcel, name: str) -> str | None:
        """Return the key that signed a reply; None if the charter names no devices.

        Raises:
            Refusal: it is not signed by a device of the charter, or by another one than this
                device's earlier replies.
        """
        allowed = self.store.charter.device_keys
        signed = parcel.signed
        if not allowed:
            return None
        if signed is None or signed.fingerprint() not in allowed:
            raise Refusal(
                Code.SIGNATURE,
                f"{name} is not signed by a device of this fleet",
                expected=f"one of {len(allowed)} keys",
                received="no signature" if signed is None else signed.fingerprint(),
                hint="`ondevice fleet carry answer --key FILE` signs it",
            )
        verify(signed, REPLY_DOMAIN + (parcel.answer or b""))
        known = {fact.removeprefix("key "): value for fact, value in self.store.facts("key ")}
        number = str(parcel.device)
        key = signed.fingerprint()
        if known.get(number, key) != key or any(
            value == key for other, value in known.items() if other != number
        ):
            raise Refusal(
                Code.SIGNATURE, f"{name} is signed by another key than the device's earlier replies"
            )
        return key

    def close(self) -> Outcome:
        """End the open round with the replies so far.

        Raises:
            FleetError: no round is open.
        """
        if not self.rounds.open:
            raise FleetError(
                "no round is open", hint="`ondevice fleet carry out FLEET --device N` opens one"
            )
        number = min(self.rounds.open)
        current = self.rounds.open[number]
        loss = current.loss
        answers = list(current.answers.values())
        outcome = self.rounds.close(number)
        sent = sum(
            len(current.tasks[answer.device].to_bytes()) + len(answer.to_bytes())
            for answer in answers
        )
        sent += len(answers) * len(outcome.to_bytes())
        self.store.add(outcome, self.rounds.state, answers=answers, loss=loss, sent_bytes=sent)
        return outcome
