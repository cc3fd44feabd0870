"""Records of a data file, and the limits within which a reader holds them in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
