"""Data files: whole examples, and how a user reads them."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = [{"prompt": f"Question {n}: ß?", "completion": f"answer {n}"} for n in range(12)]
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                  {"role": "assistant", "content": None,
                   "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
                  {"role": "tool", "content": "1"}, {"role": "assistant", "content": "Yes"}]},
]  # fmt: skip


# Rows


def write_lines(name: str, rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows)) and None
    )


def build_json(folder: Path) -> None:
    (folder / "rows.json").write_text(json.dumps({"version": 1, "data": ROWS}, indent=1))


def build_csv(folder: Path) -> None:
    lines = ["text;label", *(f'"a ""quoted"" text {n}";{n % 2}' for n in range(12))]
    (folder / "rows.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())


def build_text(folder: Path) -> None:
    (folder / "rows.txt").write_text("A line.\n\nAnother ß.\n")


def build_xlsx(folder: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    sheet: Any = book.active
    for row in (["prompt", "completion"], *([one["prompt"], one["completion"]] for one in ROWS)):
        sheet.append(row)
    book.create_sheet("more").append([1, 2.5, None, True])
    book.save(folder / "rows.xlsx")
    # Without the time of its making: the same mutations are the same files in every run.
    with zipfile.ZipFile(folder / "rows.xlsx") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "rows.xlsx", "w") as archive:
        for name, content in files.items():
            fixed = re.sub(rb"\d{4}-\d\d-\d\dT[\d:]+Z", b"2026-01-01T00:00:00Z", content)
            archive.writestr(zipfile.ZipInfo(name), fixed)


def xlsx_member(draw: Any, data: bytes) -> bytes:
    """Change the bytes of one of the files inside, and pack all again."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    chosen = draw.choice(list(files))
    from tests.untrusted.mutations import flip_bytes

    files[chosen] = flip_bytes(draw, files[chosen])
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target.getvalue()


def table() -> Any:
    import pyarrow as pa

    count = 24
    return pa.table({
        "text": ["abc", "de", None, "ßü"] * 6, "label": list(range(count)), "score": [0.5] * count,
        "messages": [[{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y"}]
                     for n in range(count)],
        "kind": pa.array(["a", "b", "a", None] * 6).dictionary_encode(), "flag": [True, False] * 12,
        "tags": pa.array([["a", "b"], [], None, ["c"]] * 6, pa.large_list(pa.large_string())),
        "pair": pa.array([[1, 2]] * count, pa.list_(pa.int32(), 2)), "at": pa.array([0] * count, pa.timestamp("us")),
        "price": pa.array([1] * count, pa.decimal128(5, 2)), "view": pa.array(["a" * 20, "b"] * 12, pa.string_view()),
        "nothing": pa.nulls(count), "map": pa.array([[("k", 1)]] * count, pa.map_(pa.string(), pa.int32())),
    })  # fmt: skip


def build_arrow(*, stream: bool, compression: str | None) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        from pyarrow import ipc

        rows, options = table(), ipc.IpcWriteOptions(compression=compression)
        new = ipc.new_stream if stream else ipc.new_file
        with new(folder / "rows.arrow", rows.schema, options=options) as writer:
            writer.write_table(rows, max_chunksize=10)

    return build


def build_parquet(folder: Path) -> None:
    import pyarrow.parquet as parquet

    rows = table().drop_columns(["view", "nothing"])
    parquet.write_table(rows, folder / "rows.parquet", row_group_size=10, compression="snappy")


def build_saved(folder: Path) -> None:
    (folder / "rows").mkdir()
    (folder / "rows" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        (folder / "rows" / split).mkdir()
        write_lines("a.jsonl", ROWS[:3])(folder / "rows" / split)


def read_data(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from ondevice.data.readers.files import read_records
        from ondevice.data.reading import read_rows

        for _ in read_records(folder / name).records:
            pass
        read_rows(folder / name)

    return read
