"""Just enough of two binary formats to say what is in an APK: class names of a dex file, header of an ELF file."""

from __future__ import annotations

import struct
from dataclasses import dataclass


def dex_classes(data: bytes) -> set[str]:
    """Names of the classes that a dex file defines (`org.ondevice.app.MainActivity`)."""
    if data[:4] != b"dex\n" or data[7:8] != b"\0":
        raise ValueError(f"expected a dex file, received {data[:8]!r}")
    strings_at, types_at, classes, classes_at = (
        struct.unpack_from("<I", data, offset)[0] for offset in (0x3C, 0x44, 0x60, 0x64)
    )
    names = set()
    for index in range(classes):
        (type_index,) = struct.unpack_from("<I", data, classes_at + 32 * index)
        (string_index,) = struct.unpack_from("<I", data, types_at + 4 * type_index)
        (at,) = struct.unpack_from("<I", data, strings_at + 4 * string_index)
        while data[at] & 0x80:  # the length in UTF-16 units, ULEB128
            at += 1
        at += 1
        names.add(data[at : data.index(b"\0", at)].decode("utf-8")[1:-1].replace("/", "."))
    return names


@dataclass(frozen=True)
class Elf:
    """The part of a file that a phone's loader looks at first."""

    machine: int
    needed: tuple[str, ...]
    alignment: int


def elf(data: bytes) -> Elf:
    """Machine, needed libraries and smallest alignment of loaded segments of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"expected a 64-bit little-endian ELF file, received {data[:6]!r}")
    (machine,) = struct.unpack_from("<H", data, 18)
    (headers_at,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = [
        struct.unpack_from("<IIQQQQQQ", data, headers_at + size * index) for index in range(count)
    ]
    loads = [segment for segment in segments if segment[0] == 1]

    def file_offset(address: int) -> int:
        return next(s[2] + address - s[3] for s in loads if s[3] <= address < s[3] + s[5])

    dynamic = next(segment for segment in segments if segment[0] == 2)
    entries = list(struct.iter_unpack("<qQ", data[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16]))
    strings = file_offset(next(value for tag, value in entries if tag == 5))
    needed = [
        data[strings + value : data.index(b"\0", strings + value)].decode()
        for tag, value in entries
        if tag == 1
    ]
    return Elf(machine, tuple(needed), min(segment[7] for segment in loads))


def symbols(data: bytes) -> tuple[set[str], set[str]]:
    """Names that an ELF library takes from others and names that it gives, from its dynamic symbol table."""
    (sections_at,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections_at + size * index)
        for index in range(count)
    ]
    table = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
    strings = sections[table[6]][4]
    taken, given = set(), set()
    for name, _info, _other, section, _value, _size in struct.iter_unpack(
        "<IBBHQQ", data[table[4] : table[4] + table[5]]
    ):
        text = data[strings + name : data.index(b"\0", strings + name)].decode()
        (given if section else taken).add(text)
    return taken - {""}, given
