"""Row shapes of public data sets: every column and key is read, or named as one that nothing reads.

Whether something is read is found by taking it away: if the same tokens are trained on without it, nobody read it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import DataError
from ondevice.data import Dataset, encode, read_rows
from tests.data.public_templates import tokenizer_for

Write = Callable[..., Path]
ASKED, ANSWERED = (
    {"role": "user", "content": "Name a fruit."},
    {"role": "assistant", "content": "Apple."},
)
GPT = [{"from": "human", "value": "Name a fruit."}, {"from": "gpt", "value": "Apple."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"town": "Ulm"}'},
}

SHAPES: dict[str, dict[str, Any]] = {
    "OpenAI": {"messages": [ASKED, ANSWERED]},
    "OpenAI with weights and names": {"messages": [
        ASKED | {"name": "Ann"}, ANSWERED | {"weight": 0}, {"role": "user", "content": "Another?"},
        {"role": "assistant", "content": "Pear.", "weight": 1}]},
    "OpenAI tools": {"tools": [TOOL], "parallel_tool_calls": False, "messages": [
        ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc123def", "name": "weather", "content": "rain"}, ANSWERED]},
    "OpenAI functions": {"functions": [TOOL["function"]], "messages": [
        ASKED, {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"town": "Ulm"}'}},
        {"role": "function", "name": "weather", "content": "rain"}, ANSWERED]},
    "OpenAI refusal and audio": {"messages": [ASKED, ANSWERED | {"refusal": "no", "audio": {"id": "1"}}]},
    "ShareGPT": {"id": "identity_0", "conversations": GPT},
    "ShareGPT with a system": {"system": "Be brief.", "source": "x", "conversations": GPT},
    "ShareGPT tools": {"tools": json.dumps([TOOL["function"]]), "conversations": [
        GPT[0], {"from": "function_call", "value": '{"name": "weather", "arguments": {"town": "Ulm"}}'},
        {"from": "observation", "value": "rain"}, GPT[1]]},
    "SlimOrca": {"conversations": [{"from": "system", "value": "Be brief.", "weight": None},
                                   GPT[0] | {"weight": 0.0}, GPT[1] | {"weight": 1.0}]},
    "Hermes function calling": {"id": "7", "tools": json.dumps([TOOL]), "category": "IoT", "task": "turn on",
                                "subcategory": "x", "conversations": GPT},
    "Alpaca": {"instruction": "Translate.", "input": "apple", "output": "Apfel"},
    "Alpaca with its text": {"instruction": "Name a fruit.", "input": "", "output": "Apple.", "text": "Below is"},
    "Alpaca with system and history": {"instruction": "Another?", "input": "", "output": "Pear.", "system": "Be brief.",
                                       "history": [["Name a fruit.", "Apple."]]},
    "Dolly": {"instruction": "Name a fruit.", "context": "Apples grow.", "response": "Apple.", "category": "open_qa"},
    "OpenOrca": {"id": "niv.1", "system_prompt": "Be brief.", "question": "Name a fruit.", "response": "Apple."},
    "OpenOrca as prompts": {"system_prompt": "Be brief.", "prompt": "Name a fruit.", "response": "Apple."},
    "GSM8K": {"question": "1 and 2?", "answer": "3 #### 3"},
    "question, input and answer": {"question": "What is it?", "input": "a pear", "answer": "A fruit.", "level": 3},
    "UltraChat": {"prompt": "Name a fruit.", "prompt_id": "9f", "messages": [ASKED, ANSWERED]},
    "No Robots": {"prompt": "Name a fruit.", "prompt_id": "9f", "category": "QA", "messages": [ASKED, ANSWERED]},
    "OpenR1": {"problem": "1+1", "solution": "2", "uuid": "u", "messages": [
        ASKED, {"role": "assistant", "content": "<think>\nA fruit.\n</think>\n\nApple."}]},
    "reasoning_content": {"reasoning": "on", "used_in_training": "yes", "messages": [
        ASKED, ANSWERED | {"reasoning_content": "A fruit."}]},
    "thinking": {"messages": [{"role": "developer", "content": "Be brief."}, ASKED, ANSWERED | {"thinking": "Fruit."}]},
    "TRL prompt and completion": {"prompt": [ASKED], "completion": [ANSWERED],
                                  "chat_template_kwargs": {"enable_thinking": False, "effort": "low"}},
    "a setting of the template": {"enable_thinking": False, "messages": [ASKED, ANSWERED]},
    "TRL prompt and completion, texts": {"prompt": "A fruit:", "completion": " Apple.", "system": "Be brief."},
    "text": {"text": "Apples are fruits.", "url": "x", "timestamp": "2020", "meta": {"a": 1}},
    "TRL preferences": {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, {"role": "assistant", "content": "Ulm."}],
                        "score_chosen": 9.0, "score_rejected": 1.0},
    "UltraFeedback": {"prompt": "Name a fruit.", "prompt_id": "1", "chosen": [ASKED, ANSWERED], "messages": [ASKED],
                      "rejected": [ASKED, {"role": "assistant", "content": "Ulm."}]},
    "HH": {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No", "margin": 1},
    "KTO": {"prompt": "Name a fruit.", "completion": "Apple.", "label": True, "rater": 4},
    "IMDb": {"text": "It was great.", "label": "positive", "movie": 5},
    "MMLU": {"question": "1 and 2?", "subject": "algebra", "choices": ["2", "3"], "answer": 1},
    "a task": {"task": "sst2", "prompt_fields": {"sentence": "It was great.", "idx": 7}, "label": 1, "split": "train"},
    "Axolotl": {"messages": [ASKED | {"train": False}, ANSWERED | {"train": False}, ASKED, ANSWERED | {"train": True}]},
    "ms-swift": {"messages": [ASKED, ANSWERED | {"loss": False}, ASKED, ANSWERED | {"loss": True}], "channel": "chat"},
    "a mask of turns": {"messages": [ASKED, ANSWERED, ASKED, ANSWERED], "loss_mask": [0, 0, 0, 1]},
    "turns after the last answer": {"messages": [ASKED, ANSWERED, {"role": "user", "content": "Thank you."}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen() -> Any:
    return tokenizer_for("qwen3")


def encoded(write: Write, row: dict[str, Any], tokenizer: Any, name: str = "rows.jsonl") -> Dataset:
    others = (
        [row, row | {"label": "negative"}] if row.get("label") == "positive" else [row]
    )  # classes are two
    rows = read_rows(write(others, name))
    return encode(rows, tokenizer, max_length_tokens=9_999)


def paths(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of every key that holds something, however deep."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        if isinstance(key, str) and inner not in (None, "", [], {}):
            yield (*place, key)
        yield from paths(inner, (*place, key))


def without(row: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    copied = copy.deepcopy(row)
    holder = copied
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return copied


def trains(dataset: Dataset) -> list[Any]:
    return [(item.example, item.candidates, item.gold) for item in dataset.items]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_key_is_read_or_named(shape: str, write: Write, qwen: Any) -> None:
    row = SHAPES[shape]
    dataset = encoded(write, row, qwen)
    # "messages[].tool_calls[].id" and "messages after the last answer" end with, or begin with, the key.
    named = {name.rpartition(".")[2].partition(" ")[0] for name in dataset.report.unread_counts}
    for path in paths(row):
        key = path[-1]
        try:
            changed = trains(encoded(write, without(row, path), qwen, "less.jsonl")) != trains(
                dataset
            )
        except DataError:
            changed = True  # it cannot be left out
        # Obeyed where they say what is so anyway: weights, labels, a call's type, a prompt that both answers repeat.
        changed |= key in ("weight", "train", "loss", "label", "type") or (shape, key) == (
            "UltraFeedback",
            "prompt",
        )
        assert changed or named & set(path), path
    assert all(any(name in path for path in paths(row)) for name in named)
    with pytest.raises(DataError) if named else nullcontext() as caught:
        encode(read_rows(write([row, row | {"label": "negative"}] if shape == "IMDb" else [row])), qwen,
               max_length_tokens=9_999, strict_columns=True)  # fmt: skip
    if caught is not None:
        assert all(name in caught.value.received for name in named)
