"""Records of a data file, the limits within which a reader holds them in memory, and the lines of a text file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ondevice.core.errors import DataError, MissingPackageError
from ondevice.data.rows import BadRow


class Record(NamedTuple):
    """One record of a file: its fields, or why it cannot be used."""

    line: int
    fields: dict[str, Any] | BadRow
    file: str = ""
    """The file inside a folder of files; empty if the data is one file."""


@dataclass(slots=True)
class Source:
    """The records of a file, read lazily.

    `kind` is a kind of `files.READERS`, "texts" for a folder of text files, or "hub".
    """

    kind: str
    records: Iterator[Record]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """Size limits for files from outside; what exceeds one is refused before it is in memory."""

    row_bytes: int = sys.maxsize
    """One line, or one element of a JSON list. A plain text, which is one row, is cut there."""

    whole_bytes: int = sys.maxsize
    """A part that is read in one piece: a JSON object, the shared texts of an Excel file."""

    unpacked_bytes: int = sys.maxsize
    """A compressed file, uncompressed."""

    def check_unpacked(self, path: Path, unpacked_bytes: int, instead: str) -> None:
        """Raise DataError if a file grows too much; `instead` is a kind it could be saved as."""
        if self.unpacked_bytes == sys.maxsize:
            return
        packed_bytes = path.stat().st_size
        allowed = min(self.unpacked_bytes, FREE_BYTES + MOST_TIMES * packed_bytes)
        if unpacked_bytes > allowed:
            raise DataError(
                f"{path} is too large unpacked",
                expected=f"at most {allowed >> 20} MiB from a file of {packed_bytes} bytes",
                received=f"{unpacked_bytes >> 20} MiB or more",
                hint=f"save it as {instead}",
            )


UNLIMITED = Limits()


FROM_OUTSIDE = Limits(row_bytes=16 << 20, whole_bytes=32 << 20, unpacked_bytes=4 << 30)
"""Limits for uploaded files; they keep a reader below 512 MiB."""


FREE_BYTES = 64 << 20
MOST_TIMES = 200
"""A compressed file may grow to `FREE_BYTES` plus `MOST_TIMES` its size; real data stays far below."""


def missing_package(path: Path, package: str, instead: str) -> MissingPackageError:
    """Build the error for a missing package of the extra `tables`; `instead` is as in `Limits`."""
    return MissingPackageError(
        f"reading {path} needs the package '{package}'",
        expected="the extra 'tables'",
        hint=f"pip install 'ondevice-train[tables]', or save it as {instead}",
    )


def needs_memory(name: str | Path) -> DataError:
    """Build the error for rows that do not fit into memory; raise it from the MemoryError, without
    its traceback, whose frames hold them."""
    return DataError(
        f"{name} needs more memory than there is",
        expected="rows that fit into memory; a text and a JSON object are read in one piece",
        hint="save it as JSON lines, one row a line, or split it",
    )


BEGIN_BYTES = 1 << 18
"""Bytes that decide what kind of text a file is."""


_BOM = b"\xef\xbb\xbf"
"""The byte-order mark that Windows editors write."""


_BINARY = {
    b"PK\x03\x04": ("an Excel file or another zip", ".xlsx"),
    b"PAR1": ("Parquet", ".parquet"),
}


def read_begin(path: Path) -> bytes:
    """Return the first bytes of a text file, without the byte-order mark and leading white space.

    Raises:
        DataError: the file cannot be read, is empty, or is not UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(BEGIN_BYTES)
            check_text_file(path, content)
            content = content.removeprefix(_BOM)
            begin, size = content.lstrip(), len(content)
            while content and not begin:
                content = file.read(BEGIN_BYTES)
                begin, size = content.lstrip(), size + len(content)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", hint="check the file's permissions"
        ) from None
    if not begin:
        raise DataError(f"{path} is empty", expected="at least one row", received=f"{size} bytes")
    return begin


def read_lines(path: Path, limits: Limits = UNLIMITED) -> Iterator[bytes | BadRow]:
    """Yield a file's lines with their line ends, without the byte-order mark.

    A line longer than `limits.row_bytes` becomes a BadRow, and the rest of it is skipped.
    """
    most = limits.row_bytes
    with path.open("rb") as file:
        number = 0
        while line := file.readline(most):
            number += 1
            if len(line) == most and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(BEGIN_BYTES)
                yield BadRow("", f"the line is longer than {most >> 20} MiB")
            else:
                yield line.removeprefix(_BOM * (number == 1))


def check_text_file(path: Path, begin: bytes) -> None:
    """Raise DataError if the first bytes are those of UTF-16 or of a binary file."""
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(
            f"{path} is UTF-16", expected="UTF-8", received="UTF-16", hint="save it as UTF-8"
        )
    for magic, (what, suffix) in _BINARY.items():
        if begin.startswith(magic):
            raise DataError(
                f"{path} is {what}",
                expected="text in UTF-8",
                hint=f"a name that ends with {suffix}",
            )


def utf8(line: bytes) -> str:
    """Decode a line; BadRow names the first byte that is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(
            "", f"is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1}"
        ) from None


def read_text(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Read a plain text as one record; of a text longer than `limits.row_bytes`, its beginning.

    Raises:
        DataError: as `read_begin`.
    """
    read_begin(path)
    most_bytes, notes = limits.row_bytes, []
    if path.stat().st_size > most_bytes:
        notes = [f"only the first {most_bytes >> 20} MiB of the text are read"]
    return Source("txt", _text_record(read_lines(path, limits), most_bytes), notes)


def _text_record(lines: Iterable[bytes | BadRow], most_bytes: int) -> Iterator[Record]:
    """Yield a problem for each bad line, which becomes blank, and then the text as one record."""
    parts: list[str] = []
    left = most_bytes
    for number, line in enumerate(lines, 1):
        end = "" if isinstance(line, BadRow) or not line.endswith(b"\n") else "\n"
        try:
            if isinstance(line, BadRow):
                raise line
            if b"\0" in line:
                raise BadRow("", "contains a NUL byte")
            text = utf8(line.removesuffix(b"\n").removesuffix(b"\r")) + end
        except BadRow as problem:
            yield Record(number, problem)
            text = end
        if left > 0:
            parts.append(text)
            left -= len(text)
    yield Record(1, {"text": "".join(parts)})
