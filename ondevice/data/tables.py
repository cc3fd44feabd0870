"""Tables of text cells under a header: CSV with any of the usual separators, and the first sheet of an Excel file."""

from __future__ import annotations

import csv
import datetime
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ondevice.core.errors import DataError
from ondevice.data.records import Record, Source, describe, missing_package
from ondevice.data.rows import BadRow

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
_SAMPLE = 50
"""Rows behind the header that decide between separators that both split it."""

Cells = tuple[int, list[str] | BadRow]
"""(line, cells), or (line, why the line has none)."""


def read_table(path: Path, content: bytes) -> Source:
    """Read CSV in UTF-8; the separator is the one that splits the header and most rows alike.

    Raises:
        DataError: the file holds JSON lines, or the header names a column twice.
    """
    # Bytes that are not UTF-8 survive as lone surrogates, which `check_text` names with their field.
    text = content.decode("utf-8", "surrogateescape")
    if text.lstrip().startswith('{"'):
        raise DataError(f"{path} holds JSON, not a table", expected="a header with the columns' names",
                        received=describe(text.lstrip().partition("\n")[0]), hint="name it .jsonl")  # fmt: skip
    usual = "," if path.suffix.lower() == ".csv" else "\t"
    separator = find_separator(text, usual)
    notes = [] if separator == usual else [f"columns are separated by a {SEPARATORS[separator]}"]
    return Source("table", _records(_csv(io.StringIO(text, newline=""), separator), separator), notes)


def stream_table(path: Path, file: BinaryIO, begin: bytes) -> Source:
    """Read CSV as `read_table` does, from an open file; the rows in `begin`, its first bytes, find the separator."""
    usual = "," if path.suffix.lower() == ".csv" else "\t"
    whole = begin[: begin.rfind(b"\n") + 1] or begin  # not a row that ends in the middle
    separator = find_separator(whole.decode("utf-8-sig", "surrogateescape"), usual)
    notes = [] if separator == usual else [f"columns are separated by a {SEPARATORS[separator]}"]
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    return Source("table", _records(_csv(text, separator), separator), notes)


def find_separator(text: str, usual: str) -> str:
    """Return the separator that splits the header and then the most of the first rows into as many cells."""
    best, most = usual, (0, False)
    for separator in SEPARATORS:
        widths: list[int] = []
        try:
            for cells in csv.reader(io.StringIO(text, newline=""), delimiter=separator):
                if any(cell.strip() for cell in cells):
                    widths.append(len(cells))
                if len(widths) > _SAMPLE:
                    break
        except csv.Error:
            pass
        if widths and widths[0] > 1:
            alike = (1 + sum(width == widths[0] for width in widths[1:]), separator == usual)
            best, most = (separator, alike) if alike > most else (best, most)
    return best


def _csv(text: TextIO, separator: str) -> Iterator[Cells]:
    reader = csv.reader(text, delimiter=separator, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, BadRow("", f"is not CSV: {error}")


def _records(rows: Iterator[Cells], separator: str) -> Iterator[Record]:
    """Give every row the header's names; columns without a name are left out."""
    header: list[str] | None = None
    for line, cells in rows:
        if isinstance(cells, BadRow):
            yield Record(line, cells)
        elif not any(cell.strip() for cell in cells):
            continue
        elif header is None:
            header = [cell.strip() for cell in cells]
            twice = [name for name, count in Counter(header).items() if name and count > 1]
            if twice:
                raise DataError(f"the header names a column twice: {', '.join(sorted(twice))}", hint="rename one")
        elif len(cells) != len(header):
            yield Record(line, BadRow("", _wrong_width(cells, len(header), separator)))
        else:
            yield Record(line, {name: cell for name, cell in zip(header, cells, strict=True) if name})


def _wrong_width(cells: list[str], expected: int, separator: str) -> str:
    """Say what is wrong with a row of too few or too many cells: often it is split by another separator."""
    reason = f"expected {expected} column{'s' * (expected != 1)} as in the header, received {len(cells)}"
    line = separator.join(cells)
    for other, name in SEPARATORS.items():
        if other != separator and other in line and expected > 1:
            if len(next(csv.reader([line], delimiter=other), [])) == expected:
                return f"{reason}; the row is separated by a {name}, the header by a {SEPARATORS[separator]}"
    return f"{reason}; quote a cell that holds a {SEPARATORS[separator]}" if len(cells) > expected else reason


def read_excel(path: Path) -> Source:
    """Read the first sheet that has cells, as the text that they show; formulas as the values they had when saved.

    Raises:
        DataError: it is no Excel file, or has no cells.
        MissingPackageError: openpyxl is not installed.
    """
    try:
        import openpyxl
    except ImportError:
        raise missing_package(path, "openpyxl", "CSV") from None
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        sheets = [sheet for sheet in book.worksheets if hasattr(sheet, "iter_rows")]
        for sheet in sheets:
            rows = [(line, [_shown(cell) for cell in cells])
                    for line, cells in enumerate(sheet.iter_rows(values_only=True), 1)]  # fmt: skip
            if any(cell.strip() for _, cells in rows for cell in cells):
                break
        else:
            raise DataError(f"{path} is empty", expected="a sheet with a header and rows", received="no cell")
        names = book.sheetnames
        book.close()
    except DataError:
        raise
    except Exception as error:  # the package raises KeyError, BadZipFile, InvalidFileException, XML's own and more
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"cannot read {path} as an Excel file: {reason}", hint="save it again, or as CSV") from None
    notes = [f"the sheet '{sheet.title}' is read, of {', '.join(names)}"] if names[1:] else []
    return Source("excel", _records(_even(rows), ","), notes)


def _shown(value: Any) -> str:
    """The cell as text: whole numbers without '.0', dates as ISO 8601, nothing as ''."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 10**15:
        return str(int(value))
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        value = value.date()
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def _even(rows: list[tuple[int, list[str]]]) -> Iterator[Cells]:
    """Fill rows up to the header's width, and cut empty cells behind it."""
    filled = [(line, cells) for line, cells in rows if any(cell.strip() for cell in cells)]
    header = filled[0][1]
    width = max(index for index, cell in enumerate(header, 1) if cell.strip())
    for line, cells in filled:
        while len(cells) > width and not cells[-1].strip():
            cells = cells[:-1]
        yield line, cells + [""] * (width - len(cells))
