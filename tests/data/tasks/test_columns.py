"""Columns of other names are named by flag or found without regard to case; errors say what would help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import ConfigError, DataError
from ondevice.data import read_rows

Write = Callable[..., Path]
TICKETS = [
    {"Body": "It broke.", "meta": {"team": "repairs"}},
    {"Body": "Where is it?", "meta": {"team": "post"}},
]


def test_columns_are_named(write: Write) -> None:
    rows = read_rows(write(TICKETS), columns={"text": "Body", "label": "meta.team"})
    assert (rows.format, [row.label for row in rows.items]) == (
        "classification",
        ["repairs", "post"],
    )
    assert rows.items[0].pairs[0] == ("It broke.\nLabel:", " post")
    assert rows.notes == ["columns: text is 'Body', label is 'meta.team'"]


@pytest.mark.parametrize(
    ("columns", "format_"),
    [
        ({"prompt": "text", "completion": "label"}, "completion"),
        ({"text": "text"}, "text"),  # named columns decide alone, where they suffice
        ({"text": "label", "label": "text"}, "classification"),
    ],
)
def test_named_columns_decide_the_format(
    columns: dict[str, str], format_: str, write: Write
) -> None:
    rows = read_rows(write([{"text": "good", "label": "yes"}]), columns=columns)
    assert rows.format == format_
    if format_ == "classification":
        assert rows.items[0].pairs == (("yes\nLabel:", " good"),)


def test_a_renamed_column_loses_its_old_name(write: Write) -> None:
    rows = read_rows(
        write([{"prompt": "a", "chosen": "b", "rejected": "c"}]), columns={"completion": "chosen"}
    )
    assert (rows.format, rows.items[0].pairs) == ("completion", (("a", "b"),))


def test_columns_of_a_task(write: Write) -> None:
    row: dict[str, Any] = {
        "premise": "not this",
        "First": "A dog runs.",
        "Second": "It runs.",
        "Entails": "entailment",
    }
    columns = {"premise": "First", "hypothesis": "Second", "label": "Entails"}
    rows = read_rows(write([row]), task="rte", columns=columns)
    assert rows.items[0].pairs[0][0].startswith("A dog runs.\n") and rows.items[0].gold == 0
    nested = {
        "task": "rte",
        "prompt_fields": {"a": "A dog runs.", "b": "It runs."},
        "label": "not_entailment",
    }
    rows = read_rows(write([nested]), task="rte", columns={"premise": "a", "hypothesis": "b"})
    assert rows.items[0].gold == 1


def test_a_record_without_the_column_is_a_problem(write: Write) -> None:
    rows = read_rows(
        write([*TICKETS, {"Body": "x"}]), columns={"text": "Body", "label": "meta.team"}
    )
    assert len(rows) == 2 and [(problem.line, problem.field) for problem in rows.problems] == [
        (3, "meta.team")
    ]


def test_unknown_column_names_are_reported(write: Write) -> None:
    with pytest.raises(DataError) as missing:
        read_rows(write(TICKETS), columns={"text": "body", "label": "meta.team"})
    assert (missing.value.received, missing.value.hint) == ("body", "did you mean 'Body'?")
    with pytest.raises(ConfigError) as unknown:
        read_rows(write(TICKETS), columns={"txt": "Body"})
    assert (unknown.value.received, unknown.value.hint) == ("txt", "did you mean 'text'?")
    with pytest.raises(ConfigError) as unknown:
        read_rows(write(TICKETS), task="rte", columns={"text": "Body"})
    assert unknown.value.expected == "hypothesis, label, premise, sentence1, sentence2"


def test_columns_match_in_any_case_if_nothing_else_fits(write: Write) -> None:
    rows = read_rows(write("Text, LABEL \ngood,yes\nbad,no\n", "a.csv"))
    assert [row.label for row in rows.items] == ["yes", "no"]
    assert rows.notes == ["columns are named without regard to case: Text, LABEL"]
    exact = read_rows(write([{"Text": "other", "text": "good", "label": "yes"}]))
    assert exact.items[0].pairs[0][0] == "good\nLabel:" and exact.notes == []


def test_errors_do_not_send_each_other_in_a_circle(write: Write) -> None:
    """An unknown task never advises to leave it out where that is an error too, and the other way round."""
    unreadable, readable = write(TICKETS), write([{"text": "a"}], "text.jsonl")
    with pytest.raises(ConfigError) as unknown:
        read_rows(unreadable, task="tickets")
    assert "--task my.yaml" in str(unknown.value) and "without --task" not in str(unknown.value)
    with pytest.raises(ConfigError) as unknown:
        read_rows(readable, task="tickets")
    assert "without --task the rows are read as text" in (unknown.value.hint or "")
    with pytest.raises(DataError) as unfit:
        read_rows(unreadable)
    assert "--column prompt=Body --column completion=meta" in str(
        unfit.value
    ) and "--task" not in str(unfit.value)
    with pytest.raises(DataError) as unfit:
        read_rows(write([{"sentence1": "a", "sentence2": "b", "label": 1}]))
    assert "--task rte or mrpc or wnli" in (unfit.value.hint or "")
