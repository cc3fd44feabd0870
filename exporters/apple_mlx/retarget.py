"""The device that each operation of a `.mlxfn` names, changed: a file that was exported on a CPU,
for Metal.

MLX writes before every operation the index of its stream, the type and the index of its device, and
its name. A file from Linux says CPU everywhere, and an app on a phone would compute there. With the
stream index -1 and the type GPU an importer takes its own default stream of the GPU. That was read
in MLX, and could not be run here: if a Mac is at hand, export there.
"""

from __future__ import annotations

import re
import struct

from ondevice.core.errors import VerificationError

CPU = 0
GPU = 1
CAVEAT = (
    "functions-gpu/ was not made by MLX: it is functions/, exported on a CPU, with the device of every operation "
    "changed. It was not run on Metal; export on a Mac if you can"
)
_TAG = re.compile(
    rb"(?P<stream>.{4})(?P<type>[\x00\x01]\0\0\0)(?P<index>\0\0\0\0)(?P<length>.\0{7})(?=(?P<name>[A-Z][A-Za-z0-9]*))",
    re.DOTALL,
)
SHORTEST = 3
"""Letters of MLX's shortest names (Abs, Add). The number of an array, of which a process counts
all, may look like two: 0x6D50 lies in the file as `Pm`."""


def tags(data: bytes) -> list[tuple[int, int, int, str]]:
    """Return place, stream index, device type and operation of every tag in a file."""
    operations = []
    for match in _TAG.finditer(data):
        (length,) = struct.unpack("<Q", match["length"])
        if SHORTEST <= length <= len(match["name"]):
            stream, kind = struct.unpack("<ii", match["stream"] + match["type"])
            operations.append((match.start(), stream, kind, match["name"][:length].decode()))
    return operations


def retarget(data: bytes) -> bytes:
    """Return the file for the GPU's default stream.

    Raises:
        VerificationError: an operation is on a GPU already.
    """
    operations = tags(data)
    if any(kind != CPU for _, _, kind, _ in operations):
        raise VerificationError(
            "the exported function cannot be given another device",
            expected="operations of a CPU",
            received=f"{len(operations)} operations, types {sorted({kind for _, _, kind, _ in operations})}",
        )
    changed = bytearray(data)
    for place, _, _, _ in operations:
        changed[place : place + 8] = struct.pack("<ii", -1, GPU)
    return bytes(changed)
