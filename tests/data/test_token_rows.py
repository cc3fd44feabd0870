"""Rows of token ids, as TRL, Axolotl and transformers prepare them: obeyed, or refused by the column's name."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice.core.errors import DataError
from ondevice.data import IGNORE
from ondevice.data.readers.objects import take_rows
from ondevice.data.token_rows import tokens

IDS = [5, 6, 7, 8, 9]
X = IGNORE


def examples(*rows: dict[str, Any], limit: int | None = None) -> list[tuple[list[int], list[int]]]:
    return [
        (list(item.example.ids), list(item.example.labels))
        for item in tokens(take_rows(rows), limit).items
    ]


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({}, IDS),
        ({"labels": [X, X, 7, 8, 9]}, [X, X, 7, 8, 9]),
        ({"completion_mask": [0, 0, 0, 1, 1]}, [X, X, X, 8, 9]),  # TRL, prompt and completion
        (
            {"assistant_masks": [0, 1, 1, 0, 1]},
            [X, 6, 7, X, 9],
        ),  # TRL and transformers, conversations
        ({"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1]}, [X, X, 7, X, 9]),
        ({"labels": [X, X, X, 8, 9], "assistant_masks": [1, 1, 1, 1, 0]}, [X, X, X, 8, X]),
        ({"attention_mask": [1] * 5, "token_type_ids": [0] * 5, "length": 5}, IDS),
    ],
)
def test_labels_and_masks_are_obeyed(columns: dict[str, Any], labels: list[int]) -> None:
    assert examples({"input_ids": IDS, **columns}) == [(IDS, labels)]


def test_masks_are_those_of_transformers_own_loss() -> None:
    """What TRL's collator does with its columns, computed on tensors as it does it."""
    torch = pytest.importorskip("torch")
    ids, labels = torch.tensor(IDS), torch.tensor([X, 6, 7, 8, 9])
    completion, assistant = torch.tensor([0, 1, 1, 1, 0]), torch.tensor([1, 1, 0, 1, 1])
    expected = labels.clone()
    expected[completion == 0] = -100
    expected[assistant == 0] = -100
    row = {
        "input_ids": ids,
        "labels": labels,
        "completion_mask": completion,
        "assistant_masks": assistant,
    }
    assert examples(row) == [(IDS, expected.tolist())]


@pytest.mark.parametrize(
    "columns",
    [
        {"position_ids": [0, 1, 0, 1, 2]},  # transformers and TRL, padding-free
        {"seq_lengths": [2, 3]},  # TRL, packing
        {"attention_mask": [1, 1, 2, 2, 2]},  # Axolotl, multipack
        {"seq_lengths": [2, 3], "position_ids": [0, 1, 0, 1, 2], "attention_mask": [1, 1, 1, 1, 1]},
    ],
)
def test_a_packed_row_becomes_its_sequences(columns: dict[str, Any]) -> None:
    assert examples({"input_ids": IDS, **columns}, limit=3) == [
        ([5, 6], [5, 6]),
        ([7, 8, 9], [7, 8, 9]),
    ]
    said = tokens(take_rows([{"input_ids": IDS, **columns}]), None).report.sentences()
    assert said == ("rows that were packed, as the sequences in them: 1",)


def test_padding_on_either_side_goes() -> None:
    left = {
        "input_ids": [0, 0, 5, 6],
        "labels": [X, X, X, 6],
        "attention_mask": [0, 0, 1, 1],
        "position_ids": [1, 1, 0, 1],
    }
    right = {
        "input_ids": [5, 6, 0],
        "labels": [5, 6, X],
        "attention_mask": [1, 1, 0],
        "position_ids": [0, 1, 0],
    }
    assert examples(left) == [([5, 6], [X, 6])]
    assert examples(right) == [([5, 6], [5, 6])]


@pytest.mark.parametrize(
    ("columns", "field", "reason"),
    [
        ({"labels": [6, 7, 8, 9, X]}, "labels.0", "labels are not shifted"),
        ({"labels": [5, 6]}, "labels", "expected 5 numbers, one a token; received 2"),
        ({"completion_mask": [0, 1]}, "completion_mask", "expected 5 numbers"),
        ({"completion_mask": [0, 0, 0.5, 1, 1]}, "completion_mask", "expected a list of integers"),
        ({"assistant_masks": [0, 2, 2, 2, 2]}, "assistant_masks", "expected zeros and ones"),
        ({"assistant_masks": [0] * 5}, "labels", "there is no token to train on"),
        ({"attention_mask": [1, 1, 0, 1, 1]}, "attention_mask", "zeros between tokens"),
        (
            {"attention_mask": [[1, 0], [1, 1]]},
            "attention_mask",
            "expected a list of integers, received a list in it",
        ),
        ({"attention_mask": [0] * 5}, "attention_mask", "a token that is not padding"),
        ({"position_ids": [0, 1, 5, 6, 7]}, "position_ids", "count from 0"),
        ({"position_ids": [3, 4, 5, 6, 7]}, "position_ids", "count from 0"),
        ({"seq_lengths": [2, 2]}, "seq_lengths", "add up to 5 tokens, received 4"),
        (
            {"seq_lengths": [2, 3], "position_ids": [0, 1, 2, 0, 1]},
            "position_ids",
            "names other sequences",
        ),
        ({"token_type_ids": [0, 0, 1, 1, 1]}, "token_type_ids", "no token types"),
    ],
)
def test_columns_that_cannot_be_obeyed_are_refused_by_name(
    columns: dict[str, Any], field: str, reason: str
) -> None:
    dataset = tokens(take_rows([{"input_ids": IDS}, {"input_ids": IDS, **columns}]), None)
    (problem,) = dataset.problems
    assert (len(dataset), problem.line, problem.field) == (1, 2, field) and reason in problem.reason


def test_other_columns_are_named() -> None:
    rows = take_rows([{"input_ids": IDS, "source": "x", "pixel_values": [0.5]}] * 2)
    assert tokens(rows, None).figures()["unread"] == {"source": 2, "pixel_values": 2}
    with pytest.raises(DataError) as caught:
        tokens(rows, None, strict_columns=True)
    assert "--strict-columns" in (caught.value.hint or "")


def test_nulls_of_an_arrow_data_set_do_not_become_keys_of_tool_calls() -> None:
    class Arrow(list[dict[str, Any]]):
        """What `datasets.Dataset` shows of itself: rows, and features."""

        features: dict[str, Any] = {}

    call = {"name": "add", "arguments": {"a": 1, "town": None}}
    (record,) = take_rows(
        Arrow([{"messages": [{"role": "user", "tool_calls": [call]}], "x": None}])
    ).records
    assert record == {
        "messages": [{"role": "user", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}],
        "x": None,
    }
