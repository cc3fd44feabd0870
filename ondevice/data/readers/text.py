"""Text files: their first bytes, their lines, and a plain text as one record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ondevice.core.errors import DataError
from ondevice.data.readers.source import UNLIMITED, Limits, Record, Source
from ondevice.data.rows import BadRow

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
