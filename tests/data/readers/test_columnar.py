"""Parquet and Arrow files are read with the names of their class labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import DataError
from ondevice.data import read_rows
from ondevice.data.readers.files import read_records

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ipc = pytest.importorskip("pyarrow.ipc")

FEATURES = {"info": {"features": {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}}}


def labelled(rows: int = 3) -> Any:
    """A table as the package `datasets` writes it: numbers of labels, and their names beside the schema."""
    columns = {
        "text": [f"row {number}" for number in range(rows)],
        "label": [number % 2 for number in range(rows)],
    }
    return pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(FEATURES)})


def test_class_labels_have_their_names(tmp_path: Path) -> None:
    parquet.write_table(labelled(), tmp_path / "a.parquet")
    rows = read_rows(tmp_path / "a.parquet")
    assert (rows.format, [row.label for row in rows.items]) == (
        "classification",
        ["neg", "pos", "neg"],
    )
    assert [row.line for row in rows.items] == [1, 2, 3]


def test_nested_values_stay_nested(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    parquet.write_table(pyarrow.table({"messages": turns}), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet").items[0].messages == (
        ("user", "a"),
        ("assistant", "b"),
    )


@pytest.mark.parametrize("make", [ipc.new_stream, ipc.new_file])
def test_arrow_is_read_in_pieces(make: Any, tmp_path: Path) -> None:
    table = labelled(3000)
    with make(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    records = list(read_records(tmp_path / "a.arrow").records)
    assert [record.line for record in records] == list(range(1, 3001))
    assert records[2999].fields == {"text": "row 2999", "label": "pos"}


@pytest.mark.parametrize(
    ("name", "content"), [("a.parquet", b"PAR1"), ("a.arrow", b"ARROW1"), ("a.arrow", b"\1\2")]
)
def test_a_damaged_file_is_a_data_error(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / name)
    assert caught.value.expected == "a Parquet or Arrow file"


def test_a_file_without_rows_is_a_data_error(tmp_path: Path) -> None:
    parquet.write_table(labelled(0), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "a.parquet")
    assert caught.value.expected == "at least one row"
