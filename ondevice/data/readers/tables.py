"""Tables of text cells under a header: CSV with any usual separator, and Excel's first sheet."""

from __future__ import annotations

import csv
import datetime
import io
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ondevice.core.errors import DataError
from ondevice.data.readers.source import (
    UNLIMITED,
    Limits,
    Record,
    Source,
    missing_package,
    read_begin,
)
from ondevice.data.rows import BadRow, describe

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
_SAMPLE = 50
"""Rows after the header that decide between separators that both split it."""

Cells = tuple[int, list[str] | BadRow]
"""(line, cells), or (line, the reason why it has none)."""


def read_table(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Read CSV in UTF-8; the separator is the one that splits the header and most first rows alike.

    Raises:
        DataError: as `read_begin`, or the file holds JSON lines; while iterating: the header names
            a column twice, or a line is too long.
    """
    begin = read_begin(path)
    if begin.startswith(b'{"'):
        first = begin.partition(b"\n")[0].decode("utf-8", "surrogateescape")
        raise DataError(
            f"{path} holds JSON, not a table",
            expected="a header with the columns' names",
            received=describe(first),
            hint="name it .jsonl",
        )
    separator = _separator(path, begin)
    notes = []
    if separator != usual_separator(path):
        notes.append(f"columns are separated by a {SEPARATORS[separator]}")
    return Source("table", _records(_csv(_text_lines(path, limits), separator), separator), notes)


def separator_of(path: Path) -> str:
    """Return the separator of a table that can be read."""
    return _separator(path, read_begin(path))


def usual_separator(path: Path) -> str:
    """Return the separator that a table's suffix stands for."""
    return {".csv": ","}.get(path.suffix.lower(), "\t")


def _separator(path: Path, begin: bytes) -> str:
    lines = begin[: begin.rfind(b"\n") + 1] or begin  # without a row that is cut
    # Bytes that are not UTF-8 survive as lone surrogates, which `check_text` reports by field.
    return find_separator(lines.decode("utf-8", "surrogateescape"), usual_separator(path))


def _text_lines(path: Path, limits: Limits) -> Iterator[str]:
    """Yield the lines of a file with their line ends, of any kind; DataError if one is too long."""
    most = limits.row_bytes
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        number = 0
        while line := file.readline(most):
            number += 1
            if len(line) == most and line[-1] not in "\r\n":
                raise DataError(
                    f"{path}: line {number} is too long",
                    expected=f"at most {most >> 20} MiB",
                    received="more",
                    hint="check the file's line ends",
                )
            yield line


def find_separator(text: str, usual: str) -> str:
    """Return the separator that splits the header and most of the first rows into equal cells."""
    best = usual
    most = (0, False)
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
            if alike > most:
                best = separator
                most = alike
    return best


def _csv(lines: Iterable[str], separator: str) -> Iterator[Cells]:
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, BadRow("", f"is not CSV: {error}")


def _records(rows: Iterator[Cells], separator: str) -> Iterator[Record]:
    """Give each row the header's names, without columns that have no name."""
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
                message = f"the header names a column twice: {', '.join(sorted(twice))}"
                raise DataError(message, hint="rename one")
        elif len(cells) != len(header):
            yield Record(line, BadRow("", _wrong_width(cells, len(header), separator)))
        else:
            named = zip(header, cells, strict=True)
            yield Record(line, {name: cell for name, cell in named if name})


def _wrong_width(cells: list[str], expected: int, separator: str) -> str:
    """Explain a row with too few or too many cells; often another separator splits it."""
    columns = f"{expected} column{'s' * (expected != 1)}"
    reason = f"expected {columns} as in the header, received {len(cells)}"
    line = separator.join(cells)
    for other, name in SEPARATORS.items():
        if other != separator and other in line and expected > 1:
            if len(next(csv.reader([line], delimiter=other), [])) == expected:
                ours = SEPARATORS[separator]
                return f"{reason}; the row is separated by a {name}, the header by a {ours}"
    if len(cells) > expected:
        return f"{reason}; quote a cell that holds a {SEPARATORS[separator]}"
    return reason


MOST_ROWS = 1 << 20
"""Excel's own limit on rows; a file may name a row far beyond it, and every row would be read."""


def read_excel(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Read the first sheet with cells, as the text that they show; formulas as their saved values.

    Raises:
        DataError: it is not an Excel file, has no cells, or is too large uncompressed.
        MissingPackageError: openpyxl is not installed.
    """
    try:
        import openpyxl
    except ImportError:
        raise missing_package(path, "openpyxl", "CSV") from None
    try:
        _check_parts(path, limits)
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        for sheet in book.worksheets:
            if not hasattr(sheet, "iter_rows"):
                continue
            # The stated size of the sheet may be wrong, and would be filled with empty cells.
            sheet.reset_dimensions()
            rows = _sheet_rows(path, sheet)
            if (first := next(filter(_has_cells, rows), None)) is not None:
                break
        else:
            expected = "a sheet with a header and rows"
            raise DataError(f"{path} is empty", expected=expected, received="no cell")
    except (DataError, MemoryError):
        raise
    except Exception as error:  # KeyError, BadZipFile, InvalidFileException, XML's own and more
        raise _not_excel(path, error) from None
    names = book.sheetnames
    notes = [f"the sheet '{sheet.title}' is read, of {', '.join(names)}"] * bool(names[1:])
    return Source("excel", _records(_even(chain([first], rows)), ","), notes)


def _check_parts(path: Path, limits: Limits) -> None:
    """Refuse a book whose parts are too large by its directory: zipfile reads no more than that."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size_bytes = path.stat().st_size
    for entry in entries:
        # zipfile allocates the stated size before it reads an uncompressed part.
        stored = entry.file_size * (entry.compress_type == zipfile.ZIP_STORED)
        if max(entry.compress_size, stored) > size_bytes:
            reason = f"{entry.filename} states more bytes than the file has"
            raise DataError(f"{path} is damaged: {reason}")
    limits.check_unpacked(path, sum(entry.file_size for entry in entries), "CSV")
    for entry in entries:
        if entry.file_size > limits.whole_bytes and not entry.filename.startswith("xl/worksheets/"):
            raise DataError(
                f"{path}: {entry.filename} is too large to be read at once",
                expected=f"at most {limits.whole_bytes >> 20} MiB",
                received=f"{entry.file_size >> 20} MiB",
                hint="save it as CSV",
            )


def _sheet_rows(path: Path, sheet: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each row."""
    try:
        for line, cells in enumerate(sheet.iter_rows(values_only=True), 1):
            if line > MOST_ROWS:
                raise DataError(
                    f"{path} has too many rows",
                    expected=f"at most {MOST_ROWS}",
                    received="more",
                    hint="save it as CSV",
                )
            yield line, [_shown(cell) for cell in cells]
    except (DataError, MemoryError):
        raise
    except Exception as error:  # as in `read_excel`
        raise _not_excel(path, error) from None


def _not_excel(path: Path, error: Exception) -> DataError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    message = f"cannot read {path} as an Excel file: {reason}"
    return DataError(message, hint="save it again, or as CSV")


def _shown(value: Any) -> str:
    """Return a cell as text: integers without '.0', dates as ISO 8601, nothing as ''."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 10**15:
        return str(int(value))
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        value = value.date()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def _even(rows: Iterable[tuple[int, list[str]]]) -> Iterator[Cells]:
    """Fill rows up to the header's width, and cut empty cells beyond it."""
    width = 0
    for line, cells in filter(_has_cells, rows):
        # The first row is the header, which ends with its last name.
        width = width or max(index for index, cell in enumerate(cells, 1) if cell.strip())
        while len(cells) > width and not cells[-1].strip():
            cells = cells[:-1]
        yield line, cells + [""] * (width - len(cells))


def _has_cells(row: tuple[int, list[str]]) -> bool:
    return any(cell.strip() for cell in row[1])
