"""The registry of readers: which one reads a file, by the suffix of its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ondevice.core.errors import DataError
from ondevice.data.readers.columnar import read_columnar
from ondevice.data.readers.json_lines import read_json
from ondevice.data.readers.source import UNLIMITED, Limits, Source
from ondevice.data.readers.tables import read_excel, read_table
from ondevice.data.readers.text import read_text


@dataclass(frozen=True, slots=True)
class Reader:
    """A kind of file and the function that reads one; `seeks` if it needs a regular file."""

    kind: str
    suffixes: tuple[str, ...]
    read: Callable[[Path, Limits], Source]
    seeks: bool = False


READERS = (
    Reader("json", (".jsonl", ".ndjson", ".json"), read_json),
    Reader("table", (".csv", ".tsv", ".tab"), read_table),
    Reader("txt", (".txt", ".md"), read_text),
    Reader("excel", (".xlsx", ".xlsm"), read_excel, seeks=True),
    Reader("columnar", (".parquet", ".arrow"), read_columnar, seeks=True),
)
SUFFIXES = {suffix: reader for reader in READERS for suffix in reader.suffixes}
NAMED = ".jsonl, .json, .csv, .tsv, .xlsx, .parquet or .txt"
SAVE_AS = {
    ".xls": ".xlsx",
    ".ods": ".xlsx",
    ".numbers": ".xlsx",
    ".pdf": ".txt",
    ".docx": ".txt",
    ".doc": ".txt",
}
"""Suffixes without a reader, and the suffix that the program they come from can save as."""


def read_file(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Open one file whose suffix is in `SUFFIXES`; its records are read when they are iterated.

    Raises:
        DataError: the file cannot be read, is empty or is damaged; damage further on is raised when
            iteration reaches it.
        MissingPackageError: the package for this kind is not installed.
    """
    reader = SUFFIXES[path.suffix.lower()]
    if reader.seeks and not path.is_file():
        raise DataError(
            f"cannot read {path}", expected="a file", received="a folder, a pipe or a device"
        )
    return reader.read(path, limits)
