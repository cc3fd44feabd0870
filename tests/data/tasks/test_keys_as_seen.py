"""Keys, tools and settings of a row reach the template that names them; others are counted or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import DataError
from ondevice.data import encode, read_dataset, read_rows
from tests.data.public_templates import tokenizer_for
from tests.data.tasks.turns import (
    ANSWERED,
    ASKED,
    CALL,
    CALLED,
    RESULT,
    SYSTEM,
    WEATHER,
    Write,
    read,
    stretches,
    whole,
)

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_CALLS] {{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[RESULT] {{ m.content }} {{ m.tool_call_id }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_ids_of_tool_calls_reach_the_template_and_a_missing_one_is_a_problem(
    write: Write, qwen2_5: Any
) -> None:
    mistral = copy.deepcopy(qwen2_5)
    mistral.chat_template = MISTRAL
    messages = [ASKED, CALLED, RESULT, ANSWERED]
    dataset = read(write, mistral, {"messages": messages})
    assert whole(dataset, mistral) == [mistral.apply_chat_template(messages, tokenize=False)]
    assert "abc123def" in stretches(dataset, mistral)[0][0]
    nameless = CALLED | {"tool_calls": [{key: CALL[key] for key in ("type", "function")}]}
    with pytest.raises(DataError) as caught:
        read(write, mistral, {"messages": [ASKED, nameless, RESULT, ANSWERED]})
    assert "Tool call IDs should be alphanumeric strings with length 9" in caught.value.message


def test_every_key_and_column_that_the_template_names_reaches_it(
    write: Write, qwen2_5: Any
) -> None:
    curious = copy.deepcopy(qwen2_5)
    curious.chat_template = (
        "{% if documents %}{% for d in documents %}[{{ d.title }}]{% endfor %}{% endif %}{{ persona }}{{ mood }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}/{{ m.name }}/{{ m.tone }}/{{ m.weight }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.tag }}{{ c.function.name }}{{ c.function.strict }}{% endfor %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    called = CALLED | {
        "tool_calls": [CALL | {"tag": "T", "function": CALL["function"] | {"strict": 7}}]
    }
    messages = [ASKED | {"name": "Ann"}, called, RESULT, ANSWERED | {"tone": "dry", "weight": 1}]
    row = {"messages": messages, "documents": [{"title": "D", "text": "x"}], "persona": "P", "unknown": 1,
           "chat_template_kwargs": {"mood": "M", "tokenize": True}}  # fmt: skip
    dataset = read(write, curious, row)
    shown = curious.apply_chat_template(
        messages, tokenize=False, documents=row["documents"], persona="P", mood="M"
    )
    assert (
        whole(dataset, curious)[0].startswith("[D]PM<|im_start|>user/Ann//\n") and "dry/1" in shown
    )
    assert dataset.report.unread_counts.keys() == {
        "unknown",
        "chat_template_kwargs.tokenize",
        "messages[].tool_call_id",
        "messages[].tool_calls[].id",
    }


def test_keys_of_tools_that_the_template_does_not_write_are_counted(
    write: Write, qwen2_5: Any
) -> None:
    brief = copy.deepcopy(qwen2_5)
    brief.chat_template = (
        "{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}"
        "{% for name, one in t.function.parameters.properties.items() %} {{ name }} {{ one.type }}"
        "{% endfor %}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments|tojson }}"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    city = {"type": "string", "enum": ["Oslo"], "items": {"enum": ["x"]}}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    function = {"name": "find", "description": "Finds", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    row = {"messages": [ASKED, ANSWERED], "tools": tools}
    assert read(write, brief, row, row).report.unread_counts == {
        "tools[].function.parameters.properties.*.enum": 2,
        "tools[].function.parameters.properties.*.items": 2,
        "tools[].function.parameters.required": 2,
    }
    assert read(write, qwen2_5, row).report.unread_counts == {}  # it writes tools as JSON


def test_settings_of_a_row_reach_the_template(write: Write, qwen3: Any) -> None:
    (off,) = stretches(
        read(write, qwen3, {"messages": [ASKED, ANSWERED], "enable_thinking": False}), qwen3
    )
    assert off == [
        "Apple.<|im_end|>"
    ]  # the template asks with an empty thought, and the answer follows it
    with pytest.raises(DataError) as caught:
        read(write, qwen3, {"messages": [ASKED, ANSWERED], "chat_template_kwargs": [1]})
    assert "'chat_template_kwargs': expected an object" in caught.value.message


def test_a_turn_that_the_template_drops_is_refused(write: Write, qwen2_5: Any) -> None:
    deaf = copy.deepcopy(qwen2_5)
    deaf.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError) as caught:
        read(write, deaf, {"messages": [SYSTEM, ASKED, ANSWERED]})
    assert "drops a turn of the role system" in caught.value.message
    llama = tokenizer_for("llama3_1")
    dataset = read(
        write, llama, {"messages": [ASKED, CALLED | {"content": "Let me see."}, RESULT, ANSWERED]}
    )
    assert dataset.report.unread_counts["messages[].content of a turn with tool_calls"] == 1


def test_a_developer_turn_stays_one_if_the_template_knows_the_role(
    write: Write, qwen2_5: Any
) -> None:
    row = {"messages": [{"role": "developer", "content": "Be brief."}, ASKED, ANSWERED]}
    assert whole(read(write, qwen2_5, row), qwen2_5)[0].startswith(
        "<|im_start|>system\nBe brief.<|im_end|>"
    )
    muse = tokenizer_for("gptoss")
    expected = muse.apply_chat_template(row["messages"], tokenize=False)
    assert whole(read(write, muse, row), muse) == [expected]


def test_tool_calls_of_arrow_are_those_of_json_lines(
    tmp_path: Path, write: Write, qwen2_5: Any
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    add = {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"type": "number", "enum": ["1"]}}}}}  # fmt: skip
    other = CALL | {"function": {"name": "add", "arguments": {"a": 1, "b": [{"c": 2}, {"d": 3}]}}}
    rows = [{"tools": [WEATHER, add], "messages": [ASKED, CALLED | {"content": "", "tool_calls": [call]}]}
            for call in (CALL, other)]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_arrow = encode(read_rows(tmp_path / "rows.parquet"), qwen2_5, max_length_tokens=9_999)
    from_lines = read(write, qwen2_5, *rows)
    assert whole(from_arrow, qwen2_5) == whole(from_lines, qwen2_5)
    assert from_arrow.report.unread_counts == from_lines.report.unread_counts
    null = CALLED | {
        "tool_calls": [CALL | {"function": {"name": "weather", "arguments": {"town": None}}}]
    }
    assert '{"town": null}' in whole(read(write, qwen2_5, {"messages": [ASKED, null]}), qwen2_5)[0]


def test_the_named_template_for_tools_is_used_for_tools(write: Write, qwen2_5: Any) -> None:
    named = copy.deepcopy(qwen2_5)
    named.chat_template = {"default": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
                                      "{% if add_generation_prompt %}assistant: {% endif %}",
                           "tool_use": qwen2_5.chat_template}  # fmt: skip
    plain, tools = (
        {"messages": [ASKED, ANSWERED]},
        {"messages": [ASKED, CALLED], "tools": [WEATHER]},
    )
    assert whole(read(write, named, plain), named) == [
        "user: Name a fruit.<|im_end|>assistant: Apple.<|im_end|>"
    ]
    assert whole(read(write, named, tools), named) == whole(read(write, qwen2_5, tools), qwen2_5)
    named.chat_template = {"rag": qwen2_5.chat_template}
    with pytest.raises(DataError) as caught:
        read(write, named, plain)
    assert "'default'" in (caught.value.hint or "")


def test_strict_columns_refuses_with_names_and_counts(write: Write, qwen2_5: Any) -> None:
    file = write([{"messages": [ASKED, ANSWERED | {"mood": "dry"}], "id": n} for n in range(3)])
    with pytest.raises(DataError) as raised:
        read_dataset(file, qwen2_5, task=None, max_length_tokens=999, strict_columns=True)
    assert raised.value.received == "id (3), messages[].mood (3)"
    assert read_dataset(file, qwen2_5, task=None, max_length_tokens=999).figures()["unread"] == {
        "id": 3, "messages[].mood": 3}  # fmt: skip


def test_a_key_that_is_read_later_is_not_named(write: Write, qwen2_5: Any) -> None:
    polite = copy.deepcopy(qwen2_5)
    polite.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name and m.name != 'x' %} {{ m.name }}{% endif %}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"messages": [ASKED | {"name": name}, ANSWERED]} for name in ("x", "", "Ann", "x")]
    assert read(write, polite, *rows).report.unread_counts == {
        "messages[].name": 1
    }  # the first, in which it changes nothing
