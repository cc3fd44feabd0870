"""Every format is read from its keys, and a bad row is a problem with file, line, field and reason."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ondevice.core.errors import ConfigError, DataError, MissingPackageError, OndeviceError
from ondevice.data import read_rows

Write = Callable[..., Path]

FORMATS = {
    "chat": [
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ]
        },
    ],
    "instruct": [
        {"instruction": "Add.", "input": "1 + 1", "output": "2"},
        {"instruction": "Greet.", "context": "", "response": "hi"},
        {"prompt": "Greet.", "response": "hi"},
        {"question": "2 + 2?", "answer": "4"},
    ],
    "completion": [{"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "", "completion": "free"}],
    "text": [{"text": "東京 is a city."}],
    "preference": [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}],
    "thumbs": [{"prompt": "2 + 2?", "completion": "4", "label": True}],
    "classification": [{"text": "so good", "label": "pos"}, {"sentence": "so bad", "label": "neg"}],
    "multiple_choice": [
        {"question": "2 + 2?", "choices": ["3", "5", "four"], "answer": "four"},
        {"question": "2 + 2?", "choices": ["3", "5", "four"], "answer": "C"},
        {"prompt": "2 + 2?", "choices": ["3", "5", "four"], "answer": 2},
    ],
}


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_inferred_from_the_keys(name: str, write: Write) -> None:
    rows = read_rows(write(FORMATS[name]))
    assert (rows.format, rows.problems, len(rows)) == (name, [], len(FORMATS[name]))
    assert [row.line for row in rows.items] == list(range(1, len(FORMATS[name]) + 1))


def test_values_arrive_unchanged(write: Write) -> None:
    chat = read_rows(write(FORMATS["chat"])).items[0]
    assert chat.messages == (("user", "hi"), ("assistant", "hello"))
    added = read_rows(write(FORMATS["instruct"])).items[0]
    assert added.messages == (("user", "Add.\n\n1 + 1"), ("assistant", "2"))
    assert added.pairs[0] == ("### Instruction:\nAdd.\n\n### Input:\n1 + 1\n\n### Response:\n", "2")
    assert read_rows(write(FORMATS["completion"])).items[0].pairs == (("1 + 1 =", " 2"),)
    good = read_rows(write(FORMATS["classification"])).items[0]
    assert (
        good.pairs == (("so good\nLabel:", " neg"), ("so good\nLabel:", " pos")) and good.gold == 1
    )
    assert [row.gold for row in read_rows(write(FORMATS["multiple_choice"])).items] == [2, 2, 2]


def test_turns_after_the_last_assistant_turn_are_left_out(write: Write) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    rows = read_rows(
        write([{"messages": [{"role": role, "content": text} for role, text in turns]}])
    )
    assert rows.items[0].messages == (("user", "a"), ("assistant", "b"))


BAD_LINES: dict[str, tuple[bytes, str, str]] = {
    "not json": (b"{oops", "", "is not JSON"),
    "not an object": (b"[1, 2]", "", "expected a JSON object, received a list"),
    "not utf-8": (b'{"prompt": "\xff", "completion": "x"}', "", "is not UTF-8: byte 0xff"),
    "nul byte": (b'{"prompt": "\x00", "completion": "x"}', "", "NUL"),
    "nul escape": (b'{"prompt": "\\u0000", "completion": "x"}', "prompt", "NUL"),
    "half a surrogate": (b'{"prompt": "\\ud800", "completion": "x"}', "prompt", "surrogate"),
    "duplicate key": (b'{"prompt": "a", "prompt": "b", "completion": "x"}', "prompt", "twice"),
    "wrong type": (
        b'{"prompt": 7, "completion": "x"}',
        "prompt",
        "expected a text, received a number 7",
    ),
    "null": (b'{"prompt": "a", "completion": null}', "completion", "received null"),
    "empty answer": (b'{"prompt": "a", "completion": "  "}', "completion", "is empty"),
    "missing key": (b'{"prompt": "a"}', "completion", "is missing; the keys are prompt"),
    "too deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "", "nested too deeply"),
    "huge number": (b'{"prompt": ' + b"9" * 5000 + b"}", "", "too many digits"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_is_named(name: str, write: Write) -> None:
    line, field, reason = BAD_LINES[name]
    path = write(
        b'{"prompt": "a", "completion": "b"}\n \t\r\n'
        + line
        + b'\n{"prompt": "c", "completion": "d"}'
    )
    rows = read_rows(path)
    assert [row.line for row in rows.items] == [1, 4]
    (problem,) = rows.problems
    assert (problem.file, problem.line, problem.field) == (str(path), 3, field)
    assert reason in problem.reason
    assert str(problem).startswith(f"{path}:3: ")


BAD_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("preference", {"prompt": "2 + 2?", "chosen": "4"}, "rejected", "is missing"),
    ("chat", {"messages": []}, "messages", "expected a list of turns"),
    ("chat", {"messages": "hi"}, "messages", "received 'hi'"),
    ("chat", {"messages": ["hi"]}, "messages.0", "expected an object with role and content"),
    (
        "chat",
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages.0.role",
        "received 'robot'",
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": 1}]},
        "messages.0.content",
        "received a number 1",
    ),
    ("chat", {"messages": [{"role": "user", "content": "x"}]}, "messages", "no assistant turn"),
    (
        "chat",
        {"messages": [{"role": "assistant", "content": "x"}]},
        "messages.0.role",
        "system or user first",
    ),
    ("classification", {"text": "x", "label": None}, "label", "received null"),
    ("classification", {"text": "x", "label": ["a"]}, "label", "received a list"),
    (
        "multiple_choice",
        {"question": "x", "choices": ["a"], "answer": 0},
        "choices",
        "at least two",
    ),
    (
        "multiple_choice",
        {"question": "x", "choices": ["a", "b"], "answer": 2},
        "answer",
        "received a number 2",
    ),
    (
        "multiple_choice",
        {"question": "x", "choices": ["a", "b"], "answer": True},
        "answer",
        "a boolean true",
    ),
    (
        "multiple_choice",
        {"question": "x", "choices": ["a", 1], "answer": 0},
        "choices.1",
        "a number 1",
    ),
]


@pytest.mark.parametrize(("name", "row", "field", "reason"), BAD_FIELDS)
def test_bad_field_is_named(
    name: str, row: dict[str, Any], field: str, reason: str, write: Write
) -> None:
    rows = read_rows(write([*FORMATS[name], row]))
    (problem,) = rows.problems
    assert (problem.line, problem.field) == (len(FORMATS[name]) + 1, field)
    assert reason in problem.reason


@pytest.mark.parametrize(
    ("content", "name", "part"),
    [
        (b"", "a.jsonl", "is empty"),
        (b" \n\n", "a.csv", "is empty"),
        (b"{oops", "a.jsonl", "a.jsonl:1: is not JSON"),
        (b"[]", "a.json", "a list without elements"),
        (b"\xff\xfe{\x00}\x00", "a.jsonl", "UTF-16"),
        (b"text\n", "a.csv", "no row"),
        (b"a,a\n1,2\n", "a.csv", "a column twice"),
        (b'{"x": 1}', "a.jsonl", "cannot tell the format"),
        (b'{"task": "nope", "prompt_fields": {}, "label": 1}', "a.jsonl", "task without a prompt"),
        (b"words", "a.pdf", "unknown kind"),
    ],
)
def test_unusable_file_is_a_data_error(content: bytes, name: str, part: str, write: Write) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write(content, name))
    assert part in str(caught.value)


def test_a_file_without_a_usable_row_returns_problems_on_request(write: Write) -> None:
    rows = read_rows(write(b"{oops\n[]"), allow_empty=True)
    assert (rows.items, [problem.line for problem in rows.problems]) == ([], [1, 2])


def test_missing_file_folder_and_task(tmp_path: Path, write: Write) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "none.jsonl")
    assert caught.value.received == str(tmp_path / "none.jsonl")
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path)
    assert "folder" in caught.value.message
    with pytest.raises(DataError) as caught:
        read_rows(f"{'long' * 100}.jsonl")
    assert caught.value.hint == "check the path"
    with pytest.raises(ConfigError) as unknown:
        read_rows(write(FORMATS["text"]), task="sst3")
    assert "did you mean 'sst2'?" in (unknown.value.hint or "")


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is not None, reason="the package is installed"
)
def test_data_set_name_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingPackageError) as caught:
        read_rows("glue:sst2@validation", task="sst2")
    assert "there is no file glue" in str(caught.value) and "pip install datasets" in str(
        caught.value
    )


def test_too_many_labels_are_not_classes(write: Write) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write([{"text": "x", "label": f"label {number}"} for number in range(60)]))
    assert caught.value.expected == "at most 50 different values of 'label'"


def test_csv_with_bom_quotes_and_bad_rows(write: Write) -> None:
    content = '\ufeffprompt,completion\n"two\nlines, ü",ok\n\nshort\nbad,\udcff\n,empty prompt\n"odd"x,y\nlast,fine'
    path = write(content.encode("utf-8", "surrogateescape"), "with space/grüße 東京.csv")
    rows = read_rows(path)
    assert [(row.line, row.pairs[0]) for row in rows.items] == [
        (2, ("two\nlines, ü", "ok")),
        (7, ("", "empty prompt")),
        (9, ("last", "fine")),
    ]
    assert [(problem.line, problem.field) for problem in rows.problems] == [
        (5, ""),
        (6, "completion"),
        (8, ""),
    ]
    assert "expected 2 columns" in rows.problems[0].reason
    assert "save the file as UTF-8" in rows.problems[1].reason


def test_line_separators_inside_json_do_not_split_rows(write: Write) -> None:
    text = "one\u2028two\u0085three"
    rows = read_rows(
        write(b"\xef\xbb\xbf" + json.dumps({"text": text}, ensure_ascii=False).encode() + b"\r\n")
    )
    assert rows.items[0].pairs == (("", text),)


def test_plain_text_keeps_line_numbers_past_bad_bytes(write: Write) -> None:
    rows = read_rows(write(b"first\n\xff\nthird\r\n", "a.txt"))
    assert rows.items[0].pairs[0][1] == "first\n\nthird\n"
    assert [problem.line for problem in rows.problems] == [2]


def test_every_message_can_be_printed(write: Write) -> None:
    path = write(b'{"sentence": "x", "label": 1}\n{"sentence": "y", "label": "\\ud800"}')
    (problem,) = read_rows(path, task="sst2").problems
    assert "received '\\ud800'" in str(problem).encode("utf-8").decode("utf-8")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=200), suffix=st.sampled_from([".jsonl", ".csv", ".txt"]))
def test_no_bytes_cause_a_traceback(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"fuzz{suffix}"
    path.write_bytes(content)
    for task in (None, "sst2"):
        try:
            assert read_rows(path, task=task).items
        except OndeviceError as error:
            assert str(path) in str(error) or "CSV header" in str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
KEYS = ("messages", "role", "content", "prompt", "completion", "text", "sentence", "label", "question",
        "choices", "answer", "instruction", "output", "task", "prompt_fields")  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5), min_size=1, max_size=4
    )
)
def test_no_values_cause_a_traceback(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        read = read_rows(path)
    except DataError:
        return
    assert len(read.items) + len(read.problems) == len(rows)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pairs=st.lists(
        st.tuples(st.text(max_size=20), st.text(min_size=1, max_size=20)), min_size=1, max_size=5
    )
)
def test_text_survives_the_file(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "round trip.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    kept = [(p, c) for p, c in pairs if c.strip() and "\0" not in p + c]
    rows = read_rows(path, allow_empty=True)
    assert [row.pairs[0] for row in rows.items] == kept
    assert len(rows.problems) == len(pairs) - len(kept)
