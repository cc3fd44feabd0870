"""What somebody uploads takes a bounded memory: files that grow are refused, and large ones are read by piece.

Each file is checked by a helper process as the daemon starts it, whose peak is read from the kernel.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import DataError
from ondevice.server.helper import Helper

MIB = 1 << 20
MOST_MIB = 512
SHEET = b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'
HEADER = b'<row r="1"><c r="A1" t="inlineStr"><is><t>text</t></is></c></row>'
SHEET_END = b"</sheetData></worksheet>"


class Checked:
    """A helper, and the peak of its process."""

    def __init__(self) -> None:
        self.helper = Helper("data")

    def __call__(self, path: Path, **options: Any) -> dict[str, Any]:
        return self.helper("validate", file=str(path), task=None, columns={}, **options)

    def refusal(self, path: Path) -> DataError:
        """Check a file that is refused; the daemon's end of the pipe stays as it was."""
        process = self.helper._started()
        with pytest.raises(DataError) as caught:
            self(path)
        assert caught.value.hint, "a refusal says what to do"
        if process.poll() is None:
            assert peak_mib(process.pid) <= MOST_MIB
        return caught.value

    def peak_mib(self) -> int:
        assert self.helper._process is not None
        return peak_mib(self.helper._process.pid)


def peak_mib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    pytest.fail("no peak")


@pytest.fixture
def checked() -> Iterator[Checked]:
    made = Checked()
    yield made
    made.helper.close()


def parquet_file(path: Path, texts: Any, **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    # Without Arrow's own schema beside it: it is read as plain texts, not as numbers of a dictionary.
    parquet.write_table(
        pyarrow.table({"text": texts}), path, compression="zstd", store_schema=False, **options
    )
    assert path.stat().st_size < 512 << 10
    return path


def same(text: str, rows: int) -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), [text])


def book(path: Path, replaced: str, parts: Iterator[bytes]) -> Path:
    """Write an Excel file with another content of one of its parts."""
    openpyxl = pytest.importorskip("openpyxl")
    plain, saved = openpyxl.Workbook(), io.BytesIO()
    plain.active.append(["text"])
    plain.save(saved)
    with (
        zipfile.ZipFile(saved) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            with target.open(entry.filename, "w") as file:
                for part in parts if entry.filename == replaced else [source.read(entry)]:
                    file.write(part)
    assert path.stat().st_size < 2 * MIB
    return path


def test_a_parquet_file_of_a_few_kilobytes_that_grows_to_gigabytes_is_refused(
    checked: Checked, tmp_path
) -> None:
    one_long_text = parquet_file(tmp_path / "long.parquet", same("a" * MIB, 2600))
    assert "needs too much memory" in checked.refusal(one_long_text).message
    one_value = parquet_file(tmp_path / "value.parquet", ["a" * (200 * MIB)], use_dictionary=False)
    assert "too large unpacked" in checked.refusal(one_value).message
    many_rows = parquet_file(tmp_path / "rows.parquet", same("a" * 10_000, 260_000))
    assert "too large unpacked" in checked.refusal(many_rows).message
    assert checked(lines(tmp_path / "after.jsonl", 10))["rows"] == 10, (
        "the next file is checked as ever"
    )


def test_an_excel_file_of_two_megabytes_that_grows_to_gigabytes_is_refused(
    checked: Checked, tmp_path
) -> None:
    cell = [b"<row><c t='inlineStr'><is><t>", *[b"a" * MIB] * 1200, b"</t></is></c></row>"]
    path = book(
        tmp_path / "cell.xlsx", "xl/worksheets/sheet1.xml", iter([SHEET, HEADER, *cell, SHEET_END])
    )
    assert "too large unpacked" in checked.refusal(path).message
    path = book(
        tmp_path / "styles.xlsx", "xl/styles.xml", iter([b"<styleSheet>", b"<font/>" * 6_000_000])
    )
    assert "too large to be read at once" in checked.refusal(path).message
    far = [
        SHEET,
        HEADER,
        b'<row r="900000000"><c t="inlineStr"><is><t>x</t></is></c></row>',
        SHEET_END,
    ]
    path = book(tmp_path / "far.xlsx", "xl/worksheets/sheet1.xml", iter(far))
    assert "too many rows" in checked.refusal(path).message


def test_what_passes_the_checks_of_sizes_is_stopped_by_the_kernel(
    checked: Checked, tmp_path
) -> None:
    nested = tmp_path / "nested.jsonl"
    nested.write_text('{"text": [' + "[]," * (5 * MIB) + "[]]}\n")
    assert "needs too much memory" in checked.refusal(nested).message
    whole = tmp_path / "whole.json"
    whole.write_text('{"text":\n[' + "{}," * (10 * MIB) + "{}]}\n")
    assert "needs too much memory" in checked.refusal(whole).message
    assert checked(lines(tmp_path / "after.jsonl", 10))["rows"] == 10


def lines(path: Path, count: int, text: str = "a") -> Path:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"{number}: {text}", "completion": text}) + "\n")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet"])
def test_the_peak_does_not_grow_with_the_rows(kind: str, checked: Checked, tmp_path) -> None:
    peaks = []
    for count in (2_000, 60_000):  # some 1 and 36 MB
        path = many(tmp_path / f"{count}.{kind}", count)
        result = checked(path)
        assert (result["rows"], result["bad_rows"]) == (1 if kind == "txt" else count, 0)
        peaks.append(checked.peak_mib())
    assert peaks[1] - peaks[0] <= (64 if kind == "txt" else 24), (
        "of a text, which is one row, its beginning is kept"
    )


def many(path: Path, count: int) -> Path:
    text = "a text of some length " * 25
    rows = ({"prompt": f"{number} {text}", "completion": "yes"} for number in range(count))
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=count)
        return path
    with path.open("w") as file:
        file.write({".json": "[\n", ".csv": "prompt,completion\n"}.get(path.suffix, ""))
        for number, row in enumerate(rows):
            before = ",\n" if path.suffix == ".json" and number else ""
            cells = f"{row['prompt']},yes" if path.suffix in (".csv", ".txt") else json.dumps(row)
            file.write(before + cells + ("" if path.suffix == ".json" else "\n"))
        file.write("\n]" if path.suffix == ".json" else "")
    return path


def test_a_file_of_bad_rows_alone_is_counted_and_its_first_are_named(
    checked: Checked, tmp_path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' + "bad\n" * 300_000)
    result = checked(path)
    assert (result["rows"], result["bad_rows"]) == (1, 300_000)
    assert [problem["line"] for problem in result["problems"]] == list(range(2, 102))
    assert checked.peak_mib() <= 128
