"""Every public template, on five kinds of conversation: each answer is trained on as transformers shows that turn.

What is right is computed by `apply_chat_template` on the messages, in the form that the template's authors document:
text parts for models that see pictures, arguments as text for DeepSeek, tools as text where a template has none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from ondevice.data import IGNORE, encode, read_rows
from tests.data.public_templates import names, tokenizer_for

WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather of a town", "parameters": {
    "type": "object", "properties": {"town": {"type": "string", "description": "a town"}},
    "required": ["town"]}}}  # fmt: skip
CALL = {"name": "weather", "arguments": {"town": "Ulm"}}
RESULT = '{"sky": "rain"}'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


ROWS: dict[str, dict[str, Any]] = {
    "single": {"messages": [user("How many legs have two cats?"), assistant("Eight.")]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, user("Name a fruit."), assistant("Apple.")]},
    "multi-turn": {"messages": [user("Name a fruit."), assistant("Apple."), user("Another?"), assistant("Pear.")]},
    "tools": {"tools": [WEATHER], "messages": [
        user("Weather in Ulm?"),
        assistant("", tool_calls=[{"id": "abc123def", "type": "function", "function": CALL}]),
        {"role": "tool", "tool_call_id": "abc123def", "name": "weather", "content": RESULT},
        assistant("It rains in Ulm.")]},
    "reasoning": {"messages": [
        user("How many legs have two cats?"), assistant("Eight.", reasoning_content="A cat has 4, so 8."),
        user("And three?"), assistant("Twelve.", reasoning_content="4 more than 8.")]},
}  # fmt: skip

PARTS = ("idefics3", "llava_next", "smolvlm")
NO_SYSTEM = ("gemma",)
NO_TOOLS = ("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "llama3",
            "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm")  # fmt: skip
NO_CALLS = (*(name for name in NO_TOOLS if name != "deepseekv3"), "lfm2")
NO_RESULTS = ("cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5")
REASONS_IN_CONTENT = ("deepseek_r1_distill_training",)
"""Templates by what they do not write, or write otherwise, as read in them and in their README."""

REFUSED = {
    ("gemma", "system"): "System role not supported",
    ("gemma_training", "system"): "System role not supported",
}
"""Cells that are not trained, and the reason, which is the template's own."""

BY_HAND = f"You may call these functions:\n<tools>\n{json.dumps(WEATHER)}\n</tools>"


def as_documented(
    template: str, row: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return messages and tools in the form that the template takes."""
    name = template.removesuffix("_training")
    messages, tools = json.loads(json.dumps(row["messages"])), row.get("tools")
    if tools and name in NO_TOOLS:
        tools = None
        if name in NO_SYSTEM:
            messages[0]["content"] = f"{BY_HAND}\n\n{messages[0]['content']}"
        else:
            messages.insert(0, {"role": "system", "content": BY_HAND})
    for message in messages:
        if "tool_calls" in message and name in NO_CALLS:
            del message["tool_calls"]
            message["content"] = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
        elif "tool_calls" in message and template == "deepseekv3":
            message["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["arguments"])
        if message["role"] == "tool" and name in NO_RESULTS:
            message.update(role="user", content=f"<tool_response>\n{RESULT}\n</tool_response>")
        if "reasoning_content" in message and template in REASONS_IN_CONTENT:
            message["content"] = (
                f"<think>\n{message.pop('reasoning_content')}\n</think>\n\n{message['content']}"
            )
        if name in PARTS:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages, tools


def answers(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None
) -> list[tuple[list[int], int]]:
    """Return each answer's ids, with all before it, and where what the template asks with ends: by transformers."""
    marks = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    result = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, whole = (
            list(
                tokenizer.apply_chat_template(
                    turns, tools=tools, add_generation_prompt=ask, return_dict=False
                )
            )
            for turns, ask in ((messages[:number], True), (messages[: number + 1], False))
        )
        begin = next(
            (place for place, (a, b) in enumerate(zip(asked, whole)) if a != b), len(asked)
        )
        end = len(whole)
        while whole[end - 1] not in marks and not tokenizer.decode(whole[end - 1 : end]).strip():
            end -= 1  # the white space behind an end-of-turn token teaches nothing
        result.append((whole[:end] if whole[end - 1] in marks else whole, begin))
    return result


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("cell", ROWS)
@pytest.mark.parametrize("template", names())
def test_each_answer_is_trained_on_as_transformers_shows_that_turn(
    template: str, cell: str, tmp_path: Path
) -> None:
    tokenizer, file = tokenizer_for(template), tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[cell]) + "\n", encoding="utf-8")
    dataset = encode(read_rows(file), tokenizer, max_length_tokens=99_999, allow_empty=True)
    messages, tools = as_documented(template, ROWS[cell])
    if (template, cell) in REFUSED:
        with pytest.raises(TemplateError):
            tokenizer.apply_chat_template(messages, tools=tools)
        assert REFUSED[template, cell] in dataset.problems[0].reason
        return
    assert dataset.problems == []
    expected = answers(tokenizer, messages, tools)
    examples = [item.example for item in dataset.items]
    for ids, begin in expected:
        (example,) = [
            one
            for one in examples
            if list(one.ids[: len(ids)]) == ids and one.labels[len(ids) - 1] == ids[-1]
        ]
        assert list(example.labels[begin - 1 : len(ids)]) == [IGNORE, *ids[begin:]]
    # Every answer once, and nothing else.
    assert sum(label != IGNORE for one in examples for label in one.labels) == sum(
        len(ids) - begin for ids, begin in expected
    )
    if cell == "reasoning":  # it is trained on, or the template does not write it and that is said
        trained = "".join(
            tokenizer.decode([label for label in one.labels if label != IGNORE]) for one in examples
        )
        thoughts = [
            message["reasoning_content"]
            for message in ROWS[cell]["messages"]
            if "reasoning_content" in message
        ]
        left = dataset.report.unread_counts.get("messages[].reasoning_content", 0)
        assert [thought in trained for thought in thoughts] == [not left] * 2 and left in (0, 2)


def test_the_wheel_has_the_templates_that_the_figures_are_of() -> None:
    found = names()
    assert len(found) == 72 and sum(not name.endswith("_training") for name in found) == 41, (
        "count the cells anew"
    )
