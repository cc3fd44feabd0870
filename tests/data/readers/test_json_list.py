"""One JSON document is read as rows with their lines, and a broken one is named by line and column."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ondevice.core.errors import DataError
from ondevice.data import read_rows

Write = Callable[..., Path]
ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "東京"}]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_is_read_with_its_lines(indent: int | None, name: str, write: Write) -> None:
    rows = read_rows(write(json.dumps(ROWS, indent=indent), name))
    assert [row.pairs[0] for row in rows.items] == [("a", "b"), ("c", "東京")]
    assert [row.line for row in rows.items] == ([1, 1] if indent is None else [2, 6])


def test_the_only_list_of_an_object_is_read(write: Write) -> None:
    rows = read_rows(write(json.dumps({"tags": ["a", "b"], "data": ROWS}, indent=1), "a.json"))
    assert [row.line for row in rows.items] == [7, 11]
    with pytest.raises(DataError) as caught:
        read_rows(write(json.dumps({"train": ROWS, "test": ROWS}, indent=1), "a.json"))
    assert (caught.value.expected, caught.value.received) == ("one list", "train, test")


def test_the_list_of_an_object_on_one_line_is_read_and_a_row_stays_a_row(write: Write) -> None:
    rows = read_rows(write(json.dumps({"version": "1.1", "data": ROWS}), "a.json"))
    assert [row.pairs[0] for row in rows.items] == [("a", "b"), ("c", "東京")]
    row = {"question": "?", "choices": ["a", "b"], "answer": "A", "tools": [{"data": [1]}]}
    assert read_rows(write(json.dumps(row) + "\n", "b.jsonl")).format == "multiple_choice"


def test_one_row_over_many_lines_is_a_row(write: Write) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = read_rows(write(json.dumps(row, indent=2), "a.json"))
    assert rows.items[0].messages == (("user", "a"), ("assistant", "b"))


def test_lines_in_a_json_file_stay_lines(write: Write) -> None:
    rows = read_rows(write('{"prompt": "a", "completion": "b"}\n{"prompt":\n', "a.json"))
    assert [row.line for row in rows.items] == [1] and [
        problem.line for problem in rows.problems
    ] == [2]


def test_a_list_element_that_is_not_an_object_is_a_problem(write: Write) -> None:
    rows = read_rows(
        write(
            '[{"prompt": "a", "completion": "b"},\n7,\n{"prompt": "a", "prompt": "b"}\n]', "a.json"
        )
    )
    assert [(problem.line, problem.field) for problem in rows.problems] == [(2, ""), (3, "prompt")]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b'[{"prompt": "a"}\n{"prompt": "b"}]', "line 2, column 1"),
        (b'[{"prompt": "a"},\n', "line 2"),
        (b'[{"prompt": "a", }]', "line 1, column 18"),
        (b'[\n{"prompt": "\xff"}]', "byte 0xff in line 2"),
        (b"[" * 100_000, "RecursionError"),
        (b'[{"prompt": ' + b"9" * 5000 + b"}]", "ValueError"),
    ],
)
def test_the_error_of_a_broken_list_names_line_and_column(
    content: bytes, part: str, write: Write
) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write(content, "a.json"))
    assert part in str(caught.value) and "a.json" in str(caught.value)
