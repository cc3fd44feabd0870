"""A streamed file: bounded memory, the rows of the file whatever its kind, and an order that a resume finds again."""

from __future__ import annotations

import csv
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.data import Batches, read_dataset, read_rows
from ondevice.data.encode import encode
from ondevice.data.stream import Stream, StreamBatches, first_rows
from ondevice.training.rows import RunRows
from tests.data.public_templates import tokenizer_for

LENGTH = 48


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {n}:", "completion": f" {n % 7} foo" if n % 5 else ""}
        for n in range(count)
    ]


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(
        "\ufeff" + "".join(json.dumps(record) + "\n\n" for record in records), encoding="utf-8"
    )
    return path


def table(path: Path, records: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter=";")
        writer.writeheader()
        writer.writerows(records)
    return path


def columnar(path: Path, records: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def stream(path: Path, tokenizer: Any, window: int = 8, seed: int = 3) -> Stream:
    def encoded(found: Any) -> Any:
        return encode(found, tokenizer, max_length_tokens=LENGTH, allow_empty=True)

    return Stream(path, encoded, task=None, columns=None, window_records=window, seed=seed)


KINDS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "jsonl": lines,
    "csv": table,
    "parquet": columnar,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_comes_once_an_epoch_and_the_figures_are_those_of_the_file(
    kind, tokenizer, tmp_path
) -> None:
    path = KINDS[kind](tmp_path / f"my rows.{kind}", rows(37))
    whole = read_dataset(path, tokenizer, task=None, max_length_tokens=LENGTH)
    opened = stream(path, tokenizer)
    count = len(whole.items)
    assert count == 29 and len(opened.first.items) == 6
    epochs = [
        [opened.example(place).ids for place in range(count * n, count * (n + 1))] for n in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == sorted(item.example.ids for item in whole.items)
    assert epochs[0] != epochs[1] != epochs[2]
    told, expected = opened.figures(), whole.figures()
    assert {key: told[key] for key in ("sequences", "left_out", "cut", "cut_tokens")} == {
        key: expected[key] for key in ("sequences", "left_out", "cut", "cut_tokens")
    }
    assert told["left_out"] == {"completion: is empty": 8}
    assert told["notes"] == [
        *expected["notes"],
        "streamed: 5 windows of 8 records, the entire file",
    ]


def test_one_window_has_the_order_of_rows_in_memory(tokenizer, tmp_path) -> None:
    path = lines(tmp_path / "rows.jsonl", rows(20))
    whole = Batches(
        read_dataset(path, tokenizer, task=None, max_length_tokens=LENGTH), 3, None, 3, 0
    )
    streamed = StreamBatches(stream(path, tokenizer, window=100), 3, None, 0)
    for step in range(12):
        assert (whole.at(step).ids == streamed.at(step).ids).all()


def test_a_stream_returns_the_same_row_for_an_index_in_any_order(tokenizer, tmp_path) -> None:
    path = lines(tmp_path / "rows.jsonl", rows(37))
    forward, kept = stream(path, tokenizer), tmp_path / "stream.json"
    forward.keep(kept, {"sha256": "one"}, recall=False)
    places = [forward.example(place).ids for place in range(70)]
    assert stream(path, tokenizer).example(65).ids == places[65]  # counted again
    resumed = stream(path, tokenizer)
    resumed.keep(kept, {"sha256": "one"}, recall=True)
    reads: list[int] = []
    read, resumed._read = resumed._read, lambda window: (reads.append(window), read(window))[1]  # type: ignore
    assert [resumed.example(place).ids for place in range(60, 70)] == places[60:70]
    assert reads == [1], (
        reads
    )  # places 60 to 69 are rows 2 to 11 of the third epoch; the first window is there
    assert resumed.figures() == forward.figures()
    other = stream(path, tokenizer)
    other.keep(kept, {"sha256": "another file"}, recall=True)
    assert len(other.ends) == 1
    other = stream(path, tokenizer, seed=4)
    assert [other.example(place).ids for place in range(6)] != places[:6]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_of_any_size_takes_the_memory_of_its_windows(kind, tokenizer, tmp_path) -> None:
    count, notes = 600, "x" * 20_000
    records = [{"prompt": f"{n}", "completion": " Yes", "notes": notes} for n in range(count)]
    path = KINDS[kind](tmp_path / f"large.{kind}", records)
    size = path.stat().st_size
    tracemalloc.start()
    opened = stream(path, tokenizer, window=16)
    for place in range(0, count, 5):
        opened.example(place)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened.ends[-1] >= count - 16 and len(opened._windows) == 2
    assert peak < 4 * 16 * 20_000 + 1e6 < size / 5, (peak, size)


def test_a_row_of_another_kind_at_a_window_s_beginning_does_not_change_the_format(
    tokenizer, tmp_path
) -> None:
    records = rows(16)
    records[8] = {"text": "not a prompt"}
    opened = stream(lines(tmp_path / "rows.jsonl", records), tokenizer)
    opened.example(11)
    assert opened.left_out["completion: is missing; the keys are text"] == 1, opened.left_out


@pytest.mark.parametrize(("name", "content", "why"), [
    ("list.json", '[{"prompt": "a", "completion": "b"}]', "a JSON list is read at once"),
    ("text.txt", "running text", "a txt is read at once"),
    ("none.jsonl", "", "is empty"),
    ("bad.jsonl", '{"prompt": 1, "completion": ""}\n', "no usable row"),
])  # fmt: skip
def test_the_error_of_a_file_that_cannot_be_streamed_gives_the_reason(
    name, content, why, tokenizer, tmp_path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        stream(tmp_path / name, tokenizer)
    assert why in caught.value.message


def test_the_length_is_measured_on_the_first_window(tokenizer, tmp_path) -> None:
    assert (
        len(first_rows(lines(tmp_path / "rows.jsonl", rows(37)), 8, task=None, columns=None)) == 6
    )


def test_leading_windows_without_a_usable_row_are_skipped(tokenizer, tmp_path) -> None:
    bad, good = [{"note": n} for n in range(11)], rows(20)
    path = lines(tmp_path / "rows.jsonl", [*bad, *good])
    opened = stream(path, tokenizer, window=4)
    assert len(opened.first.items) == len(first_rows(path, 4, task=None, columns=None)) == 4
    wanted = sorted(
        item.example.ids
        for item in read_dataset(path, tokenizer, task=None, max_length_tokens=LENGTH).items
    )
    assert sorted(opened.example(place).ids for place in range(len(wanted))) == wanted
    opened.example(len(wanted))
    assert opened.ended and sum(opened.figures()["left_out"].values()) == 11 + 4
    lines(path, bad * 9)
    for read in (
        lambda: stream(path, tokenizer, window=4),
        lambda: first_rows(path, 4, task=None, columns=None),
    ):
        with pytest.raises(DataError) as caught:
            read()
        assert str(caught.value.expected).startswith("the keys messages")


def test_a_loss_over_answers_takes_the_labels_of_the_first_window(tokenizer, tmp_path) -> None:
    labels = ["foo", "bar", "foo", "bar", "foo", "new", "bar"]
    path = lines(
        tmp_path / "rows.jsonl",
        [{"text": f"{n} foo", "label": label} for n, label in enumerate(labels)],
    )
    opened = stream(path, tokenizer, window=4)
    answers, why = RunRows(opened.first, None, 0, opened).label_tokens()
    assert len(answers) == 2, why
    opened.label_tokens = frozenset(answers)
    for place in range(12):
        assert {*opened.example(place).labels} <= {*answers, IGNORE}
    (reason,) = opened.figures()["left_out"].items()
    assert (
        reason[0].startswith("label: is not among the labels of the first window")
        and reason[1] == 1
    )
    sorted_ = stream(path, tokenizer, window=1)
    _, why = RunRows(sorted_.first, None, 0, sorted_).label_tokens()
    assert why == "the first window has only one label"


def test_a_file_that_changes_under_a_run_ends_it(tokenizer, tmp_path) -> None:
    path = lines(tmp_path / "rows.jsonl", rows(37))
    opened = stream(path, tokenizer)
    count = opened.ends[-1]
    while not opened.ended:
        count += 1
        opened.example(count)
    lines(path, rows(10) + [{"prompt": "x", "completion": ""}] * 27)
    with pytest.raises(DataError) as caught:
        for index in range(opened.ends[-1], 2 * opened.ends[-1]):
            opened.example(index)
    assert caught.value.expected == "the same token ids and labels"


def test_conversations_of_several_sequences_are_streamed_as_they_are_read(tmp_path) -> None:
    tokenizer = tokenizer_for("qwen3")
    turns = [
        ("user", "Name a fruit."),
        ("assistant", "Apple."),
        ("user", "Another?"),
        ("assistant", "Pear."),
    ]
    path = lines(tmp_path / "rows.jsonl", [
        {"id": n, "messages": [{"role": role, "content": f"{text} {n}"} for role, text in turns[: 2 + 2 * (n % 2)]]}
        for n in range(11)])  # fmt: skip
    whole = encode(read_rows(path), tokenizer, max_length_tokens=200)

    def opened() -> Stream:
        return Stream(path, lambda rows: encode(rows, tokenizer, max_length_tokens=200, allow_empty=True), task=None,
                      columns=None, window_records=4, seed=1)  # fmt: skip

    first = opened()
    first.keep(tmp_path / "windows.json", {}, recall=False)
    count = len(whole.items)
    epoch = [first.example(place).ids for place in range(count)]
    assert count == 16 and sorted(epoch) == sorted(item.example.ids for item in whole.items)
    first.example(count)
    told, expected = first.figures(), whole.figures()
    assert (
        told["unread"] == expected["unread"] == {"id": 11}
        and told["notes"][:-1] == expected["notes"]
    )
    again = opened()
    again.keep(tmp_path / "windows.json", {}, recall=True)
    assert again.figures()["unread"] == {"id": 11}
