"""Write records as a table: CSV, JSON lines or Excel, by the file's suffix."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ondevice.core.errors import ConfigError
from ondevice.data.readers.files import SUFFIXES
from ondevice.data.readers.source import missing_package
from ondevice.data.readers.tables import separator_of, usual_separator

TABLES = (".csv", ".tsv")
LINES = (".jsonl", ".ndjson")
EXCEL = ".xlsx"
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d{1,15})?")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""Characters that Excel's files cannot hold."""
_BOM = b"\xef\xbb\xbf"


def check_suffix(path: Path) -> None:
    """Refuse a file that cannot be written, by its suffix.

    Raises:
        ConfigError: the suffix is of another kind.
        MissingPackageError: Excel's package is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in (*TABLES, *LINES, EXCEL):
        raise ConfigError(
            f"cannot write {path}",
            expected=f"a name that ends with {', '.join((*TABLES, *LINES))} or {EXCEL}",
            received=path.suffix or "no suffix",
        )
    if suffix == EXCEL:
        try:
            import openpyxl  # noqa: F401
        except ImportError:
            raise missing_package(path, "openpyxl", "CSV") from None


def write_records(
    partial: Path,
    target: Path,
    names: Sequence[str],
    records: Iterable[dict[str, Any]],
    *,
    like: Path | None = None,
) -> None:
    """Write records to `partial` as the kind of file that `target` names.

    Args:
        names: the columns, in order.
        like: the file that the records came from: a table keeps its separator and byte order mark,
            and numbers of an Excel sheet stay numbers.
    """
    suffix = target.suffix.lower()
    if suffix in LINES:
        with partial.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return
    kind = SUFFIXES.get(like.suffix.lower()) if like is not None else None
    if suffix == EXCEL:
        has_numbers = kind is not None and kind.kind == "excel"
        _write_excel(partial, names, records, has_numbers)
        return
    separator = usual_separator(target)
    encoding = "utf-8"
    if like is not None and like.is_file() and kind is not None and kind.kind == "table":
        if like.suffix.lower() == suffix:
            separator = separator_of(like)
        with like.open("rb") as file:
            if file.read(len(_BOM)) == _BOM:  # Excel reads UTF-8 only with it
                encoding = "utf-8-sig"
    with partial.open("w", encoding=encoding, newline="", errors="surrogateescape") as file:
        writer = csv.writer(file, delimiter=separator, lineterminator="\n")
        writer.writerow(names)
        for record in records:
            writer.writerow([_text(record.get(name)) for name in names])


def _write_excel(
    partial: Path, names: Sequence[str], records: Iterable[dict[str, Any]], has_numbers: bool
) -> None:
    import openpyxl
    from openpyxl.cell import WriteOnlyCell

    book = openpyxl.Workbook(write_only=True)
    sheet: Any = book.create_sheet("predictions")

    def cell(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        text = str(_text(value))
        if has_numbers and _NUMBER.fullmatch(text):
            return float(text) if "." in text else int(text)
        made = WriteOnlyCell(sheet, _CONTROL.sub("", text))
        made.data_type = "s"  # a text that begins with "=" is not a formula
        return made

    sheet.append([cell(name) for name in names])
    for record in records:
        sheet.append([cell(record.get(name)) for name in names])
    book.save(partial)


def _text(value: Any) -> Any:
    """Return a cell: nothing as an empty one, lists and objects as JSON."""
    if value is None:
        return ""
    if isinstance(value, dict | list | tuple | bool):
        return json.dumps(value, ensure_ascii=False)
    return value
