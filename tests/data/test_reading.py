"""A file that is read a row at a time says what it says when it is read whole, and what a piece may take is limited."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import DataError, OndeviceError
from ondevice.data import length_of, preview_rows, read_rows
from ondevice.data.readers import json_files
from ondevice.data.readers.files import read_records
from ondevice.data.readers.source import Limits, Record, Source
from ondevice.data.reading import check_rows, open_reading, rows_of

Write = Callable[..., Path]
CHAT = [
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": f"y{n}"}]}
    for n in range(4)
]
CLASSES = [
    {"text": f"t{n} \u6771\u4eac", "label": label}
    for n, label in enumerate(["no", "yes", "", 3, "no", None])
]
TABLE = 'Review;Label\r\nfine;1\r\n"two\r\nlines";0\r\na;b;c\r\n\r\nbad;\r\n'
FILES: dict[str, Any] = {
    "chat.jsonl": [*CHAT, {"messages": []}, {"text": "another kind"}],
    "pairs.jsonl": [{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}] * 3,
    "classes.jsonl": CLASSES,
    "broken.jsonl": b'{"prompt": "a", "completion": "b"}\nno\n\n{"prompt": 1}\n\xff\n{"prompt": "c", "completion": ""}',
    "list.json": json.dumps(
        [*CLASSES, 7, {"text": 1.25, "label": -12.5e3}], indent=1, ensure_ascii=False
    ),
    "one_line.json": json.dumps([{"prompt": "a", "completion": "b"}, {"prompt": 1}, 3.25, 17]),
    "object.json": json.dumps({"version": 1, "data": CLASSES}, indent=1),
    "row.json": json.dumps(CHAT[0], indent=1),
    "preference.jsonl": [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "", "rejected": "b"},
    ],
    "thumbs.jsonl": [{"prompt": "p", "completion": "a", "label": n % 2 == 0} for n in range(3)],
    "case.jsonl": [{"Text": "a", "LABEL": "x"}, {"Other": "b"}, {"Text": "c", "LABEL": "y"}],
    "table.csv": TABLE,
    "text.txt": b"one\ntwo\xff\r\nthree\n",
    "nothing.jsonl": b"no\nrow\n",
}
"""Files with good rows, with bad ones, and with both."""


@pytest.fixture(params=sorted(FILES))
def path(request: pytest.FixtureRequest, write: Write) -> Path:
    return write(FILES[request.param], request.param)


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OndeviceError as error:
        return error.to_dict()


@pytest.mark.parametrize("options", [{}, {"task": "sst2"}, {"columns": {"text": "Review"}}])
def test_a_check_counts_what_reading_finds(path: Path, options: dict[str, Any]) -> None:
    def whole() -> Any:
        rows = read_rows(path, allow_empty=True, **options)
        return rows.format, len(rows.items), len(rows.problems), rows.problems[:2]

    def by_row() -> Any:
        checked = check_rows(path, most_problems=2, **options)
        return checked.format, checked.rows, checked.bad_rows, checked.problems

    assert outcome(by_row) == outcome(whole)


def test_a_preview_of_a_file_is_that_of_its_rows(path: Path, tokenizer: Any) -> None:
    whole = outcome(lambda: preview_rows(read_rows(path, allow_empty=True), tokenizer).to_dict())
    assert outcome(lambda: preview_rows(open_reading(path), tokenizer).to_dict()) == whole
    if "error" not in whole:
        first = preview_rows(open_reading(path), tokenizer, most_problems=1)
        assert [problem.to_dict() for problem in first.problems] == list(whole["problems"])[:1]
        assert first.rows == whole["rows"]


@pytest.mark.parametrize("piece_bytes", [1, 7, 64])
@pytest.mark.parametrize("name", ["list.json", "one_line.json", "object.json"])
def test_a_list_is_the_same_wherever_its_text_is_cut(
    name: str, piece_bytes: int, write: Write, monkeypatch
) -> None:
    path = write(FILES[name], name)
    whole = list(read_records(path).records)
    monkeypatch.setattr(json_files, "PIECE_BYTES", piece_bytes)
    cut = list(read_records(path).records)
    assert [str(record) for record in cut] == [str(record) for record in whole]
    path.write_text('[{"text": "a"},\n {"text": "b"}\n {"text": "c"}]')
    with pytest.raises(DataError) as caught:
        list(read_records(path).records)
    assert caught.value.message.endswith("Expecting ',' or ']' in line 3, column 2")


def test_a_line_over_the_limit_is_a_problem_and_the_rest_is_read(write: Write) -> None:
    limits = Limits(row_bytes=1 << 20, whole_bytes=1 << 20)
    long, good = json.dumps({"text": "a" * (2 << 20)}), json.dumps({"text": "b"})
    checked = check_rows(write(f"{good}\n{long}\n{good}\n", "a.jsonl"), limits=limits)
    assert (checked.rows, checked.problems[0].line) == (2, 2)
    assert checked.problems[0].reason == "the line is longer than 1 MiB"
    for content, name, part in (
        (f"[{good},\n{long}]", "a.json", "the element in line 2 is too long"),
        (f"text\nb\n{'a' * (2 << 20)}\n", "a.csv", "line 3 is too long"),
        (
            json.dumps({"data": [{"text": "a" * (2 << 20)}]}, indent=1),
            "b.json",
            "the first line is not a JSON object",
        ),
    ):
        with pytest.raises(DataError) as caught:
            check_rows(write(content, name), limits=limits)
        assert part in caught.value.message
        assert check_rows(write(content, name)).rows


def test_a_column_that_one_row_lacks_is_a_problem_of_that_row(write: Write) -> None:
    checked = check_rows(write(FILES["case.jsonl"], "case.jsonl"))
    assert (checked.rows, [problem.line for problem in checked.problems]) == (2, [2])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_checking_and_previewing_store_no_rows(name: str, write: Write, tokenizer: Any) -> None:
    rows = [
        {"text": f"{number} " + "text " * 40, "label": ["a", "b"][number % 2]}
        for number in range(4000)
    ]
    content = {"rows.jsonl": rows, "rows.json": json.dumps(rows)}.get(name)
    path = write(
        content or "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows), name
    )
    check_rows(write(rows[:2], "warm.jsonl"))
    assert peak(lambda: read_rows(path)) > 4 << 20
    assert (
        peak(lambda: check_rows(path)) < 4 << 20
    )  # a list has a piece of 1 MiB, as bytes and as text
    if name == "rows.json":  # of the forms the one that is read by another library
        reading = open_reading(path)
        assert peak(lambda: length_of(reading, tokenizer)) < 4 << 20


def peak(run: Callable[[], Any]) -> int:
    tracemalloc.start()
    kept = run()
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept is not None
    return size


def test_a_preview_of_the_first_rows_says_that_there_are_more(write: Write, tokenizer: Any) -> None:
    path = write(CLASSES * 20, "a.jsonl")
    shown = preview_rows(open_reading(path, most_records=12), tokenizer)
    assert shown.rows == 12 and shown.notes[-1] == "only the first 12 rows are read"
    whole = preview_rows(open_reading(path, most_records=120), tokenizer)
    assert whole.rows == 120 and "of more" not in str(whole.notes)


def test_classes_are_counted_up_to_a_limit(write: Write, monkeypatch) -> None:
    monkeypatch.setattr("ondevice.data.tasks.formats.MOST_LABEL_CHARACTERS", 1000)
    path = write([{"text": "a", "label": f"label {number}"} for number in range(5000)])
    with pytest.raises(DataError) as caught:
        check_rows(path)
    assert caught.value.message.startswith("more than ")


def test_signs_of_life_come_while_a_file_is_read(write: Write, monkeypatch) -> None:
    monkeypatch.setattr("ondevice.data.reading.REPORT_RECORDS", 10)
    signs: list[int] = []
    check_rows(write([{"text": "a"}] * 95), alive=lambda: signs.append(1))
    assert len(signs) == 9


def test_records_that_need_more_memory_than_there_is_are_refused_by_the_name_of_their_file() -> (
    None
):
    """The list of a file's records may be what the system refuses, and not one of them."""

    def records() -> Iterator[Any]:
        yield from [Record(n, {"text": "a", "label": "b"}) for n in range(3)]
        raise MemoryError

    with pytest.raises(DataError) as caught:
        rows_of(Source("JSON", records()), "rows.json")
    assert "rows.json needs more memory" in str(caught.value)
