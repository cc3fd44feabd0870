"""A folder is its texts, its shards, or the split that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ondevice.core.errors import DataError
from ondevice.data import encode, read_rows
from ondevice.data.readers.files import hash_files

Write = Callable[..., Path]
ROW = {"prompt": "a", "completion": "b"}


def test_texts_are_documents_of_their_own(write: Write, tokenizer) -> None:
    write("one\n", "texts/b.txt")
    write(b"two\n\xff\n", "texts/deep/a.md")
    write("not a document", "texts/README.md")
    write("hidden", "texts/.git/x.txt")
    write("", "texts/c.txt")
    folder = write("not data", "texts/notes.pdf").parent
    rows = read_rows(folder)
    assert [(row.file, row.pairs[0][1], row.end) for row in rows.items] == [
        ("b.txt", "one\n", True), ("deep/a.md", "two\n\n", True),
    ]  # fmt: skip
    assert [(problem.file, problem.line, problem.reason[:8]) for problem in rows.problems] == [
        ("c.txt", 0, "is empty"), ("deep/a.md", 2, "is not U"),
    ]  # fmt: skip
    dataset = encode(rows, tokenizer, max_length_tokens=64)
    assert [item.file for item in dataset.items] == ["b.txt", "deep/a.md"]
    assert all(item.example.ids[-1] == tokenizer.eos_token_id for item in dataset.items)


def test_shards_are_read_in_the_order_of_their_names(write: Write) -> None:
    for number in (2, 1):
        folder = write(
            [{"prompt": str(number), "completion": "b"}], f"shards/rows-{number}.jsonl"
        ).parent
    rows = read_rows(folder)
    assert [(row.file, row.pairs[0][0]) for row in rows.items] == [
        ("rows-1.jsonl", "1"),
        ("rows-2.jsonl", "2"),
    ]
    assert f"2 files of {folder}" in rows.notes[-1]


def test_a_split_is_named_by_file_or_folder(write: Write) -> None:
    write([ROW], "set/train-00000-of-00001.jsonl")
    write([ROW, ROW], "set/validation/a.jsonl")
    folder = write([ROW] * 3, "set/test.jsonl").parent
    assert [
        len(read_rows(f"{folder}{split}")) for split in ("", "@train", "@valid", "@dev", "@test")
    ] == [
        1,
        1,
        2,
        2,
        3,
    ]
    assert read_rows(folder).notes[0] == "the split 'train' is read, of test, train, validation"
    with pytest.raises(DataError) as caught:
        read_rows(f"{folder}@other")
    assert caught.value.received == "other"


def test_folders_saved_by_datasets_are_read_without_the_package(write: Write) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    write(json.dumps({"splits": ["train", "validation"]}), "saved/dataset_dict.json")
    for split in ("train", "validation"):
        table = pyarrow.table({"prompt": [split], "completion": ["b"]})
        folder = write("{}", f"saved/{split}/state.json").parent
        write("{}", f"saved/{split}/dataset_info.json")
        for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
            with ipc.new_stream(folder / name, table.schema) as writer:
                writer.write_table(table)
    for split in ("train", "validation"):
        rows = read_rows(f"{folder.parent}@{split}")
        assert [row.pairs[0][0] for row in rows.items] == [split]
    assert read_rows(folder.parent).items[0].pairs[0][0] == "train"
    assert read_rows(folder).items[0].pairs[0][0] == "validation"
    with pytest.raises(DataError) as caught:
        read_rows(f"{folder.parent}@test")
    assert caught.value.received == "test"


def test_a_folder_with_several_kinds_or_without_data_is_refused(write: Write) -> None:
    folder = write([ROW], "mixed/a.jsonl").parent
    write("prompt,completion\na,b\n", "mixed/b.csv")
    with pytest.raises(DataError) as caught:
        read_rows(folder)
    assert caught.value.received == "a.jsonl, b.csv"
    with pytest.raises(DataError) as caught:
        read_rows(write("x", "none/notes.pdf").parent)
    assert caught.value.received == "notes.pdf"


def test_the_hash_is_of_names_and_contents_of_the_split(write: Write) -> None:
    folder = write([ROW], "set/train/a.jsonl").parents[1]
    write([ROW], "set/valid/a.jsonl")
    before, other = hash_files(folder), hash_files(Path(f"{folder}@valid"))
    write([ROW, ROW], "set/valid/a.jsonl")
    assert hash_files(folder) == before and hash_files(Path(f"{folder}@valid")) != other
    (folder / "train" / "a.jsonl").rename(folder / "train" / "b.jsonl")
    assert hash_files(folder) != before
