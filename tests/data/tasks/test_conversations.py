"""Conversations of every shape become the same turns, and what cannot be read in them is named by its place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import DataError
from ondevice.data import IGNORE, encode, read_dataset, read_rows

Write = Callable[..., Path]
TURNS = (("system", "Be kind."), ("user", "2 + 2?"), ("assistant", "4"))
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
IDS = {"OpenAI": {"id": "1"}, "ShareGPT": {}}
ADD = {"name": "add", "parameters": {"type": "object"}}

SHAPES: dict[str, dict[str, Any]] = {
    "ChatML": {"messages": [{"role": role, "content": text} for role, text in TURNS]},
    "ShareGPT": {"conversations": [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "2 + 2?"},
                                   {"from": "gpt", "value": "4"}]},
    "ShareGPT with a system key": {"system": "Be kind.", "conversations": [
        {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    "content parts": {"messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]},
        {"role": "assistant", "content": "4"}]},
    "prompt and completion as turns": {"prompt": [{"role": role, "content": text} for role, text in TURNS[:2]],
                                       "completion": [{"role": "assistant", "content": "4"}]},
    "a cell of JSON": {"messages": json.dumps([{"role": role, "content": text} for role, text in TURNS])},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_turns(shape: str, write: Write) -> None:
    rows = read_rows(write([SHAPES[shape]]))
    assert (rows.format, rows.problems, rows.items[0].messages) == ("chat", [], TURNS)


TOOL_SHAPES: dict[str, dict[str, Any]] = {
    "OpenAI": {"tools": [{"type": "function", "function": ADD}], "messages": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}]},
        {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]},
    "ShareGPT": {"tools": json.dumps([ADD]), "conversations": [
        {"from": "human", "value": "2 + 2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
        {"from": "observation", "value": "4"}, {"from": "gpt", "value": "It is 4."}]},
}  # fmt: skip


@pytest.mark.parametrize("shape", TOOL_SHAPES)
def test_tool_calls_are_turns(shape: str, write: Write) -> None:
    (row,) = read_rows(write([TOOL_SHAPES[shape]])).items
    called = ("assistant", "", {"tool_calls": [IDS[shape] | CALL]})
    assert row.messages == (("user", "2 + 2?"), called, ("tool", "4"), ("assistant", "It is 4."))
    assert row.tools == ({"type": "function", "function": ADD},)


def trained(tokenizer: Any, dataset: Any) -> str:
    return tokenizer.decode([label for label in dataset.items[0].example.labels if label != IGNORE])


def test_tool_calls_are_written_for_a_template_without_them(write: Write, tokenizer: Any) -> None:
    dataset = encode(read_rows(write([TOOL_SHAPES["OpenAI"]])), tokenizer, max_length_tokens=999)
    shown = tokenizer.decode(dataset.items[0].example.ids)
    assert (
        shown.startswith("<|start|>system\nYou may call these functions:\n<tools>\n")
        and '"name": "add"' in shown
    )
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>' in trained(
        tokenizer, dataset
    )
    assert "<|start|>tool\n4<|end|>" in shown and "<tools>" not in trained(tokenizer, dataset)


def test_a_template_with_tool_calls_gets_them_as_they_are(write: Write, tokenizer: Any) -> None:
    native = copy.deepcopy(tokenizer)
    native.chat_template = (
        "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}!{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}"
        "<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    dataset = encode(read_rows(write([TOOL_SHAPES["OpenAI"]])), native, max_length_tokens=999)
    assert native.decode(dataset.items[0].example.ids).startswith("[add]<|start|>user\n2 + 2?")
    assert trained(native, dataset) == "!add(2)<|end|>It is 4.<|end|>"


BAD: list[tuple[Any, str, str]] = [
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        "content.0.type",
        "received 'image_url'",
    ),
    ({"role": "user", "content": [7]}, "content.0.type", "received a number 7"),
    ({"from": "robot", "value": "x"}, "from", "received 'robot'"),
    (
        {"role": "assistant", "tool_calls": [{"name": "x", "arguments": "{"}]},
        "tool_calls.0.arguments",
        "expected JSON",
    ),
    (
        {"role": "assistant", "tool_calls": [{"name": "x", "arguments": [1]}]},
        "tool_calls.0.arguments",
        "an object",
    ),
    (
        {"role": "assistant", "tool_calls": [{}]},
        "tool_calls.0",
        "expected a call with name and arguments",
    ),
    ({"role": "assistant", "content": None}, "content", "received null"),
]


@pytest.mark.parametrize(("turn", "place", "reason"), BAD)
def test_columns_of_token_rows_that_cannot_be_read_are_named(
    turn: Any, place: str, reason: str, write: Write
) -> None:
    good = {"role": "user", "content": "a"}
    rows = read_rows(
        write([{"messages": [good, turn, {"role": "assistant", "content": "b"}]}]), allow_empty=True
    )
    (problem,) = rows.problems
    assert problem.field == f"messages.1.{place}" and reason in problem.reason


PAIRS: dict[str, dict[str, Any]] = {
    "texts behind a prompt": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "turns behind a prompt": {"prompt": [{"role": "user", "content": "2 + 2?"}],
                              "chosen": [{"role": "assistant", "content": "4"}],
                              "rejected": {"role": "assistant", "content": "5"}},
    "whole conversations": {name: [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]
                            for name, text in (("chosen", "4"), ("rejected", "5"))},
    "a prompt and whole conversations": {"prompt": "2 + 2?"} | {
        name: [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "4"), ("rejected", "5"))},
}  # fmt: skip


@pytest.mark.parametrize("shape", PAIRS)
def test_a_preference_pair_trains_on_the_chosen_text(
    shape: str, write: Write, tokenizer: Any
) -> None:
    rows = read_rows(write([PAIRS[shape]]))
    (row,) = rows.items
    assert (rows.format, row.gold) == ("preference", 0)
    assert (row.messages, row.rejected) == tuple(
        (("user", "2 + 2?"), ("assistant", text)) for text in "45"
    )
    (item,) = encode(rows, tokenizer, max_length_tokens=99).items
    ends = [
        tokenizer.decode([label for label in c.labels if label != IGNORE]).strip()
        for c in item.candidates
    ]
    assert ends == ["4<|end|>", "5<|end|>"]


def test_pairs_that_are_one_text_are_cut_at_their_last_answer(write: Write) -> None:
    head = "\n\nHuman: 2 + 2?\n\nAssistant: 4\n\nHuman: Sure?\n\nAssistant:"
    (row,) = read_rows(write([{"chosen": f"{head} Yes", "rejected": f"{head} No"}])).items
    assert row.pairs == ((head, " Yes"), (head, " No"))


@pytest.mark.parametrize(("value", "label"), [(True, "up"), ("false", "down"), (False, "down")])
def test_thumbs_rows_carry_a_verdict(value: Any, label: str, write: Write) -> None:
    told = (
        {"prompt": "a", "completion": "b", "label": value},
        {"prompt": "a", "answer": "b", "liked": value},
    )
    for row in told:  # as the daemon exports it, and as the phone app keeps it
        rows = read_rows(write([row]))
        assert (rows.format, rows.items[0].label, rows.items[0].messages[1][1]) == (
            "thumbs",
            label,
            "b",
        )


def test_preferences_are_not_trained_on_and_the_way_out_works(write: Write, tokenizer: Any) -> None:
    path = write([PAIRS["texts behind a prompt"]])
    with pytest.raises(DataError) as caught:
        read_dataset(path, tokenizer, task=None, max_length_tokens=99)
    assert "--column completion=chosen" in (caught.value.hint or "")
    columns = {"prompt": "prompt", "completion": "chosen"}
    dataset = read_dataset(path, tokenizer, task=None, max_length_tokens=99, columns=columns)
    assert (dataset.format, trained(tokenizer, dataset)) == ("completion", "4<|end|>")
    thumbs = write([{"prompt": "a", "completion": "b", "label": True}])
    with pytest.raises(DataError) as caught:
        read_dataset(thumbs, tokenizer, task=None, max_length_tokens=99)
    assert caught.value.received == "format thumbs"
    columns = {"prompt": "prompt", "completion": "completion"}
    assert (
        read_dataset(thumbs, tokenizer, task=None, max_length_tokens=99, columns=columns).format
        == "completion"
    )
