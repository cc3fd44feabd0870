"""A read or a write of one record of a tier file, and the trailer that says whether the record is the right one."""

from __future__ import annotations

import hashlib
import struct
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch

from ondevice.offload.gds import BLOCK_BYTES, buffer

_TRAILER = struct.Struct("<8sIIQQ16s")
_FIELDS = ("magic", "version", "record number", "generation", "payload length in bytes", "payload checksum")
_MAGIC, _VERSION = b"ODTIER\r\n", 1


@dataclass(eq=False)
class Job:
    """One read or write of one record. `ready` is when the GPU is done with the payload; `left` counts pieces."""

    record: int
    payload: torch.Tensor
    write: bool
    ready: torch.cuda.Event | None
    future: Future[None] = field(default_factory=Future)
    trailer: torch.Tensor = field(default_factory=lambda: buffer(BLOCK_BYTES, pin=False))
    checksums: dict[int, bytes] = field(default_factory=dict)
    generation: int = 0
    left: int = 0
    error: BaseException | None = None

    def seal(self, payload_bytes: int) -> bytes:
        """The trailer block that belongs to what was moved."""
        pieces = b"".join(self.checksums[start] for start in sorted(self.checksums))
        digest = hashlib.blake2b(pieces, digest_size=16).digest()
        fields = _TRAILER.pack(_MAGIC, _VERSION, self.record, self.generation, payload_bytes, digest)
        return fields.ljust(BLOCK_BYTES, b"\0")

    def compare(self, block: bytes) -> tuple[Any, ...] | None:
        """What is wrong with the trailer that was read, which should be `block`: words, expected and received."""
        found = self.trailer.numpy().tobytes()
        for name, expected, received in zip(_FIELDS, _TRAILER.unpack_from(block), _TRAILER.unpack_from(found)):
            if expected != received:
                show = [value.hex() if isinstance(value, bytes) else value for value in (expected, received)]
                return f"came back damaged or not as last written: its {name}", *show
        return None if found == block else ("came back with a damaged trailer",)

    def resolve(self, error: BaseException | None) -> None:
        """Give the future its result, unless it has one: `close` was faster, or its owner cancelled it."""
        try:
            self.future.set_result(None) if error is None else self.future.set_exception(error)
        except InvalidStateError:
            pass
