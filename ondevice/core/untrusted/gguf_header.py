"""The header of a GGUF file, walked before a library reads it.

The library believes every length that the file states: a wrong one makes it loop for hours or
read beyond the file. Here each length is held against the rest of the file.
"""

from __future__ import annotations

import mmap
import os
import struct
from math import prod
from pathlib import Path

from ondevice.core.untrusted import Refused, open_plain

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by the number of its type."""
_STRING, _ARRAY = 8, 9
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_ITEMS = 1 << 22
"""Of an array; the largest vocabularies have some 300,000 tokens."""
_MOST_DIMENSIONS = 8
_MOST_NAME_BYTES = 1 << 16


def check_gguf(path: Path) -> frozenset[int]:
    """Check that all that the header of a GGUF file states lies inside the file.

    Returns: the numbers of its tensors' types, known or not.

    Raises:
        Refused: it is not a GGUF file of version 2 or 3, damaged, or beyond a limit.
        OSError: as `open` raises it.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise Refused(f"it has {size} bytes only")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            walk = _Walk(data, size)
            walk.file()
    return frozenset(walk.types)


class _Walk:
    """Goes through the bytes of a file from the front."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data, self.size, self.at = data, size, 0
        self.order = "<"
        self.types: set[int] = set()

    def file(self) -> None:
        if self.data[:4] != b"GGUF":
            raise Refused("GGUF magic invalid")
        self.at = 4
        version = self.number("I")
        if version & 0xFFFF == 0:  # of a machine with the other order of bytes
            self.order = ">"
            version = struct.unpack(">I", struct.pack("<I", version))[0]
        if version not in (2, 3):
            raise Refused(f"it is of version {version}")
        tensors = self.number("Q")
        keys = self.number("Q")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise Refused(f"it states {tensors} tensors and {keys} keys")
        for _ in range(keys):
            self.name()
            self.value(self.number("I"))
        for _ in range(tensors):
            self.tensor()

    def number(self, kind: str) -> int:
        layout = struct.Struct(self.order + kind)
        start = self.skip(layout.size)
        return layout.unpack_from(self.data, start)[0]

    def skip(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        if count > self.size - self.at:
            raise Refused(f"truncated: {count} bytes are stated at byte {self.at} of {self.size}")
        start = self.at
        self.at += count
        return start

    def name(self) -> None:
        length = self.number("Q")
        if length > _MOST_NAME_BYTES:
            raise Refused(f"a name of {length} bytes is stated at byte {self.at}")
        start = self.skip(length)
        try:
            self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise Refused(f"a name at byte {start} is not UTF-8: {error.reason}") from None

    def value(self, kind: int) -> None:
        if kind in _WIDTHS:
            self.skip(_WIDTHS[kind])
        elif kind == _STRING:
            self.skip(self.number("Q"))
        elif kind == _ARRAY:
            self.array()
        else:
            raise Refused(f"a value at byte {self.at} is of unknown type {kind}")

    def array(self) -> None:
        kind = self.number("I")
        count = self.number("Q")
        if count > _MOST_ITEMS:
            raise Refused(f"a list of {count} values is stated at byte {self.at}")
        if kind in _WIDTHS:
            self.skip(count * _WIDTHS[kind])
        elif kind == _STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:  # lists of lists are in no file that we know, and the library flattens them
            raise Refused(f"a list at byte {self.at} holds values of type {kind}")

    def tensor(self) -> None:
        self.name()
        count = self.number("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise Refused(f"a tensor at byte {self.at} has {count} dimensions")
        shape = [self.number("Q") for _ in range(count)]
        # The smallest types have some 1.5 bits an element.
        if prod(shape) > 8 * self.size:
            raise Refused(f"a tensor at byte {self.at} of shape {shape} is larger than the file")
        self.types.add(self.number("I"))
        if self.number("Q") > self.size:
            raise Refused(f"a tensor's data begin behind the file's end, stated at byte {self.at}")
