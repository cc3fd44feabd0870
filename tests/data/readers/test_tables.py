"""Tables are read with the separator they have, from Excel as their cells show, and what does not fit is named."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ondevice.core.errors import DataError, MissingPackageError
from ondevice.data import read_rows
from ondevice.data.readers.files import read_records
from ondevice.data.readers.tables import _even, find_separator

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("text", "suffix", "separator"),
    [
        ("text,label\na,b\n", ",", ","),
        ("text;label\na, b, c;d\n", ",", ";"),
        ("text\tlabel\na, b\tc\n", ",", "\t"),
        ("text|label\na|b\n", ",", "|"),
        ("text,label\na\tb,c\n", "\t", ","),
        ("text, long;label\na;b\nc;d\n", ",", ";"),  # both split the header: the rows decide
        ("text; long,label\na,b\nc,d\n", ";", ","),
        ("text\none column\n", ",", ","),
        ("a,b\tc\n", "\t", "\t"),  # both alike: the name's decides, then the more common one
        ("a;b|c\n", ",", ";"),
        ('text;label\n"two\nlines; and more";b\n', ",", ";"),
    ],
)
def test_the_separator_is_the_files_own(text: str, suffix: str, separator: str) -> None:
    assert find_separator(text, suffix) == separator


@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t"), ("a.tsv", ",")]
)
def test_rows_arrive_whatever_separates_them(name: str, separator: str, write: Write) -> None:
    rows = read_rows(write(f'prompt{separator}completion\n"2 + 2;\t,"{separator}4\n', name))
    assert rows.items[0].pairs == (("2 + 2;\t,", "4"),)
    usual = separator == ("," if name == "a.csv" else "\t")
    assert bool(rows.notes) is not usual and ("semicolon" in "".join(rows.notes)) is (
        separator == ";"
    )


def test_rows_of_another_separator_than_the_header_are_named(write: Write) -> None:
    rows = read_rows(write("prompt,completion\na;b\na,b,c\nc,d\n", "a.csv"))
    assert [problem.reason for problem in rows.problems] == [
        "expected 2 columns as in the header, received 1; the row is separated by a semicolon, the header by a comma",
        "expected 2 columns as in the header, received 3; quote a cell that holds a comma",
    ]
    assert [row.line for row in rows.items] == [4]


def test_an_unknown_separator_is_reported(write: Write) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write("text^label\ngood^1\n", "a.csv"))
    assert "'^' separates the columns" in (caught.value.hint or "")


def test_columns_without_a_name_are_left_out(write: Write) -> None:
    source = read_records(write("a,b,,\n1,2,,\n", "a.csv"))
    assert [record.fields for record in source.records] == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("content", "name", "part"),
    [
        (b'{"text": "x"}\n', "a.csv", "holds JSON, not a table"),
        (b"PK\x03\x04rest", "a.csv", "is an Excel file or another zip"),
        (b"PAR1rest", "a.jsonl", "is Parquet"),
        (b"no zip", "a.xlsx", "cannot read"),
        (b"old", "a.xls", "save it as .xlsx"),
    ],
)
def test_a_file_of_another_kind_than_its_suffix_is_refused(
    content: bytes, name: str, part: str, write: Write
) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write(content, name))
    assert part in str(caught.value)


def test_cells_of_excel_are_read_as_they_show(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.title = "empty"
    sheet = book.create_sheet("tickets")
    for row in (
        [],
        ["text", "label", "when", None],
        ["東京 was great", 1, datetime.datetime(2026, 11, 22), None],
        [2.5, 0.0, datetime.datetime(2026, 11, 22, 9, 30), None],
        [None, None, None, None],
        ["short"],
        ["long", "x", "y", "z"],
    ):
        sheet.append(row)
    book.save(tmp_path / "a.xlsx")
    source = read_records(tmp_path / "a.xlsx")
    records = list(source.records)
    assert [record.fields for record in records[:3]] == [
        {"text": "東京 was great", "label": "1", "when": "2026-11-22"},
        {"text": "2.5", "label": "0", "when": "2026-11-22T09:30:00"},
        {"text": "short", "label": "", "when": ""},
    ]
    assert [record.line for record in records] == [3, 4, 6, 7]
    assert "expected 3 columns as in the header, received 4" in str(records[3].fields)
    assert source.notes == ["the sheet 'tickets' is read, of empty, tickets"]


def test_rows_are_filled_up_to_the_header() -> None:
    rows = _even(
        [
            (1, ["", ""]),
            (2, ["a", "b", ""]),
            (3, ["x"]),
            (4, ["x", "y", "", ""]),
            (5, ["x", "y", "z"]),
        ]
    )
    assert list(rows) == [(2, ["a", "b"]), (3, ["x", ""]), (4, ["x", "y"]), (5, ["x", "y", "z"])]


def test_an_empty_book_is_a_data_error(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    openpyxl.Workbook().save(tmp_path / "a.xlsx")
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "a.xlsx")
    assert caught.value.received == "no cell"


@pytest.mark.parametrize(("name", "package"), [("a.xlsx", "openpyxl"), ("a.parquet", "pyarrow")])
def test_the_error_of_a_missing_package_names_it(
    name: str, package: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as caught:
        read_rows(write(b"PAR1", name))
    assert package in str(caught.value) and "ondevice-train[tables]" in str(caught.value)
