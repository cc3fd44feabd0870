"""What a row says beyond role and content decides what is trained on: weights, reasoning, ids, settings, marks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import DataError
from ondevice.data import IGNORE, Dataset, encode, read_dataset, read_rows
from tests.data.public_templates import tokenizer_for

Write = Callable[..., Path]
ASKED, ANSWERED = (
    {"role": "user", "content": "Name a fruit."},
    {"role": "assistant", "content": "Apple."},
)
AGAIN, PEAR = {"role": "user", "content": "Another?"}, {"role": "assistant", "content": "Pear."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}}}}}  # fmt: skip
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": {"town": "Ulm"}},
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abc123def", "name": "weather", "content": "rain"}


@pytest.fixture(scope="module")
def qwen2_5() -> Any:
    return tokenizer_for("qwen2_5")


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return tokenizer_for("qwen3")


def read(
    write: Write, tokenizer: Any, *rows: dict[str, Any], limit: int = 9_999, **keys: Any
) -> Dataset:
    return encode(read_rows(write(list(rows))), tokenizer, max_length_tokens=limit, **keys)


def stretches(dataset: Dataset, tokenizer: Any) -> list[list[str]]:
    """Return the texts that are trained on, example by example."""
    texts = []
    for item in dataset.items:
        spans: list[list[int]] = []
        before = IGNORE
        for label in item.example.labels:
            if label != IGNORE:
                spans = [*spans, []] if before == IGNORE else spans
                spans[-1].append(label)
            before = label
        texts.append([tokenizer.decode(span) for span in spans])
    return texts


def whole(dataset: Dataset, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(item.example.ids) for item in dataset.items]


def test_the_report_counts_conversations_of_one_and_of_several_sequences(
    write: Write, qwen2_5: Any, qwen3: Any
) -> None:
    row = {"messages": [ASKED, ANSWERED, AGAIN, PEAR]}
    one, several = read(write, qwen2_5, row), read(write, qwen3, row)
    assert stretches(one, qwen2_5) == [["Apple.<|im_end|>", "Pear.<|im_end|>"]]
    assert (
        "conversations that are one sequence each, as the chat template only appends: 1"
        in one.report.sentences()
    )
    thought = "<think>\n\n</think>\n\n"
    assert stretches(several, qwen3) == [
        [f"{thought}Apple.<|im_end|>"],
        [f"{thought}Pear.<|im_end|>"],
    ]
    assert (
        "conversations that are one sequence for each answer, as the chat template rewrites earlier turns: 1, "
        "as 2 sequences" in several.report.sentences()
    )
    assert [item.line for item in several.items] == [1, 1]


def test_turns_that_only_append_share_a_sequence_within_a_template_that_rewrites(
    write: Write, qwen3: Any
) -> None:
    """Qwen3 keeps the reasoning of a tool's turns until the next question, and drops it then."""
    called = CALLED | {"reasoning_content": "Ask."}
    row = {"tools": [WEATHER], "messages": [
        ASKED, called, RESULT, ANSWERED | {"reasoning_content": "Rain."}, AGAIN, PEAR]}  # fmt: skip
    dataset = read(write, qwen3, row)
    first, second = stretches(dataset, qwen3)
    assert [text.partition("</think>")[0] for text in first] == [
        "<think>\nAsk.\n",
        "<think>\nRain.\n",
    ]
    assert second == ["<think>\n\n</think>\n\nPear.<|im_end|>"]
    assert "Ask." not in whole(dataset, qwen3)[1]


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", "content"])
def test_reasoning_gets_the_key_that_the_template_reads(key: str, write: Write, qwen3: Any) -> None:
    turn = ANSWERED | (
        {"content": "<think>\nA fruit.\n</think>\n\nApple."}
        if key == "content"
        else {key: "A fruit."}
    )
    dataset = read(write, qwen3, {"messages": [ASKED, turn]})
    assert stretches(dataset, qwen3) == [["<think>\nA fruit.\n</think>\n\nApple.<|im_end|>"]]
    gpt = tokenizer_for("gptoss")
    (trained,) = stretches(read(write, gpt, {"messages": [ASKED, turn]}), gpt)
    start = "<|start|>assistant"
    assert trained == [
        f"<|channel|>analysis<|message|>A fruit.<|end|>{start}<|channel|>final<|message|>Apple.<|return|>"
    ]


def test_reasoning_that_the_template_drops_is_named(write: Write, qwen2_5: Any) -> None:
    dataset = read(
        write, qwen2_5, {"messages": [ASKED, ANSWERED | {"reasoning_content": "A fruit."}]}
    )
    assert dataset.report.unread_counts == {"messages[].reasoning_content": 1}


@pytest.mark.parametrize("context", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False},
                                     {"loss": False}, {"masked": True}])  # fmt: skip
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "phi3"])
def test_a_turn_that_is_not_to_be_trained_on_is_context(
    template: str, context: Any, write: Write
) -> None:
    tokenizer = tokenizer_for(template)
    dataset = read(write, tokenizer, {"messages": [ASKED, ANSWERED | context, AGAIN, PEAR]})
    assert len(dataset.items) == 1 and dataset.report.unread_counts == {}
    (trained,) = stretches(dataset, tokenizer)
    assert len(trained) == 1 and "Pear." in trained[0] and "Apple." not in trained[0]
    assert "Apple." in whole(dataset, tokenizer)[0]
    last = read(write, tokenizer, {"messages": [ASKED, ANSWERED, AGAIN, PEAR | context]})
    assert "Another?" not in whole(last, tokenizer)[0], (
        "what follows the last trained answer is no context of it"
    )


def test_train_on_prompt_leaves_out_turns_of_weight_0_and_trains_the_others_once(
    write: Write, qwen2_5: Any
) -> None:
    row = {"messages": [ASKED, ANSWERED | {"weight": 0}, AGAIN, PEAR]}
    (trained,) = stretches(read(write, qwen2_5, row, train_on_prompt=True), qwen2_5)
    assert (
        "Apple." not in "".join(trained)
        and "Name a fruit." in trained[0]
        and "Another?" in trained[1]
    )
    phi = tokenizer_for("phi3")
    both = read(write, phi, {"messages": [ASKED, ANSWERED, AGAIN, PEAR]}, train_on_prompt=True)
    trained = ["".join(texts) for texts in stretches(both, phi)]
    assert (
        sum(text.count("Name a fruit.") for text in trained)
        == 1
        == sum(text.count("Apple.") for text in trained)
    )


@pytest.mark.parametrize(
    ("turn", "field", "reason"),
    [
        (
            {"weight": 0.5},
            "messages.1.weight",
            "expected 0 or 1, true or false; received a number 0.5",
        ),
        ({"train": "maybe"}, "messages.1.train", "expected 0 or 1"),
        ({"mask": [1, 0]}, "messages.1.mask", "cannot be obeyed"),
        ({"train_detail": [{"begin_offset": 0}]}, "messages.1.train_detail", "cannot be obeyed"),
    ],
)
def test_a_weight_that_cannot_be_obeyed_is_refused(
    turn: Any, field: str, reason: str, write: Write
) -> None:
    (problem,) = read_rows(
        write([{"messages": [ASKED, ANSWERED | turn]}]), allow_empty=True
    ).problems
    assert problem.field == field and reason in problem.reason


def test_all_turns_of_weight_0_are_refused(write: Write, qwen2_5: Any) -> None:
    with pytest.raises(DataError) as caught:
        read(write, qwen2_5, {"messages": [ASKED, ANSWERED | {"weight": 0}]})
    assert "all answers have weight 0" in caught.value.message


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"instruction": "Another?", "output": "Pear.", "system": "Be brief.",
          "history": [["Name a fruit.", "Apple."]]}, [SYSTEM, ASKED, ANSWERED, AGAIN, PEAR]),
        ({"instruction": "Another?", "output": "Pear.", "history": [ASKED, ANSWERED]}, [ASKED, ANSWERED, AGAIN, PEAR]),
        ({"system_prompt": "Be brief.", "question": "Name a fruit.", "response": "Apple."}, [SYSTEM, ASKED, ANSWERED]),
        ({"system_prompt": "Be brief.", "prompt": "Name a fruit.", "response": "Apple."}, [SYSTEM, ASKED, ANSWERED]),
        ({"system": "Be brief.", "question": "Name a fruit.", "answer": "Apple."}, [SYSTEM, ASKED, ANSWERED]),
        ({"question": "Name", "input": "a fruit.", "answer": "Apple."},
         [{"role": "user", "content": "Name\n\na fruit."}, ANSWERED]),
        ({"system_prompt": "Be brief.", "prompt": [ASKED], "completion": [ANSWERED]}, [SYSTEM, ASKED, ANSWERED]),
        ({"system_message": "Be brief.", "messages": [ASKED, ANSWERED]}, [SYSTEM, ASKED, ANSWERED]),
    ],
)  # fmt: skip
def test_system_history_and_input_stand_before_the_question(
    row: Any, turns: Any, write: Write, qwen2_5: Any
) -> None:
    dataset = read(write, qwen2_5, row)
    assert whole(dataset, qwen2_5) == [
        qwen2_5.apply_chat_template(turns, tokenize=False).rstrip("\n")
    ]
    assert (
        stretches(dataset, qwen2_5) == [[f"{turns[-1]['content']}<|im_end|>"]]
        and dataset.report.unread_counts == {}
    )


def test_system_and_history_stand_before_the_question_without_a_chat_template(
    write: Write, tokenizers: Any
) -> None:
    row = {
        "instruction": "Another?",
        "output": "Pear.",
        "system": "Be brief.",
        "history": [["Name a fruit.", "Apple."]],
    }
    dataset = read(write, tokenizers["bos"], row)
    assert tokenizers["bos"].decode(dataset.items[0].example.ids) == (
        "<s>Be brief.\n\n### Instruction:\nName a fruit.\n\n### Response:\nApple.\n\n"
        "### Instruction:\nAnother?\n\n### Response:\nPear.</s>"
    )
    assert stretches(dataset, tokenizers["bos"]) == [["Pear.</s>"]]


@pytest.mark.parametrize("keys", [("system_prompt", "ask", "reply"), ("systemPrompt", "id", "query", "target"),
                                  ("sys", "uuid", "x", "y", "source")])  # fmt: skip
def test_the_advice_never_trains_the_system_as_the_question(keys: Any, write: Write) -> None:
    with pytest.raises(DataError) as raised:
        read_rows(write([dict.fromkeys(keys, "some text")]))
    advice = str(raised.value.hint)
    assert f"prompt={keys[0]}" not in advice and f"--column system={keys[0]}" in advice
    columns = dict(
        part.split("=")
        for part in advice.partition(" for free")[0].replace("--column ", "").split()[-2:]
    )
    assert columns["prompt"] in ("ask", "query", "x") and columns["completion"] in (
        "reply",
        "target",
        "y",
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


@pytest.mark.parametrize("kind", ["bos", "llama"])
def test_a_sequence_has_one_bos_even_if_the_row_has_one(
    kind: str, write: Write, tokenizers: Any
) -> None:
    tokenizer = tokenizers[kind]
    for row, marked in [({"text": "the film"}, {"text": "<s>the film"}),
                        ({"prompt": "the film", "completion": " was great"},
                         {"prompt": "<s>the film", "completion": " was great"})]:  # fmt: skip
        plain, once = (read(write, tokenizer, one).items[0].example for one in (row, marked))
        assert (
            list(once.ids).count(tokenizer.bos_token_id)
            == 1
            == list(plain.ids).count(tokenizer.bos_token_id)
        )
        assert once.ids[0] == tokenizer.bos_token_id


def test_marks_that_a_turn_already_has_are_written_once(write: Write) -> None:
    for template in ("qwen2_5", "llama3", "gemma", "phi3"):
        tokenizer = tokenizer_for(template)
        expected = read(write, tokenizer, {"messages": [ASKED, ANSWERED]})
        text = tokenizer.apply_chat_template([ASKED, ANSWERED], tokenize=False)
        before, rest = text.split("Name a fruit.")
        between, behind = rest.split("Apple.")
        marked = [{"role": "user", "content": f"{before}Name a fruit.{between}"},
                  {"role": "assistant", "content": f"Apple.{behind}"}]  # fmt: skip
        dataset = read(write, tokenizer, {"messages": marked})
        assert whole(dataset, tokenizer) == whole(expected, tokenizer), template
        assert [item.example.labels for item in dataset.items] == [
            item.example.labels for item in expected.items
        ]
        assert (
            "turns that held the chat template's own marks, which are written once: 2"
            in dataset.report.sentences()
        )


def test_a_completion_with_the_templates_end_token_gets_no_second_one(
    write: Write, qwen2_5: Any
) -> None:
    dataset = read(write, qwen2_5, {"prompt": "A fruit:", "completion": " Apple.<|im_end|>"})
    assert stretches(dataset, qwen2_5) == [[" Apple.<|im_end|>"]]
    assert dataset.report.sentences() == ("answers whose end is trained as <|im_end|>: 1",)
    plain = read(write, qwen2_5, {"prompt": "A fruit:", "completion": " Apple."})
    assert plain.report.sentences() == ("answers whose end is trained as </s>: 1",)


def test_the_report_counts_answers_without_an_end_token(write: Write) -> None:
    glm = tokenizer_for("glm4moe")  # the next role's mark ends its turns
    said = read(write, glm, {"messages": [ASKED, ANSWERED]}).report.sentences()
    assert "answers without an end token, after which a model does not learn to stop: 1" in said


def test_the_report_counts_answers_that_the_template_writes_differently(write: Write) -> None:
    deepseek = tokenizer_for("deepseekv3")
    dataset = read(write, deepseek, {"messages": [ASKED, ANSWERED]})
    assert stretches(dataset, deepseek) == [["Apple.<｜end▁of▁sentence｜>"]]
    assert (
        "answers without '<think>', with which the chat template asks for them: 1"
        in dataset.report.sentences()
    )


def test_each_sequence_is_cut_and_left_out_separately(write: Write, qwen3: Any) -> None:
    long = {"role": "assistant", "content": "Apple. " * 40}
    dataset = read(write, qwen3, {"messages": [ASKED, long, AGAIN, PEAR]}, limit=60)
    (item,) = dataset.items  # the first answer does not fit, and the second does without it
    assert (
        whole(dataset, qwen3)[0].startswith("<|im_start|>user\nAnother?")
        and item.dropped_tokens > 40
    )
    assert (
        len(dataset.problems) == len(dataset.too_long_tokens) == 1
        and "the answer has" in dataset.problems[0].reason
    )


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


def test_the_parts_of_a_conversation_stay_on_one_side_of_a_split(write: Write, qwen3: Any) -> None:
    from ondevice.data import split_rows

    dataset = read(write, qwen3, *[{"messages": [ASKED, ANSWERED, AGAIN, PEAR]}] * 9)
    train, held = split_rows(dataset, 0.3, 1)
    assert (len(train), len(held)) == (12, 6)
    assert not {item.line for item in train.items} & {item.line for item in held.items}
    assert held.figures()["unread"] == {} and json.dumps(train.figures())


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


def test_a_preference_pair_s_turns_are_checked_too(write: Write, qwen2_5: Any) -> None:
    pair = {
        "chosen": [ASKED | {"mood": "dry"}, ANSWERED],
        "rejected": [ASKED | {"mood": "dry"}, PEAR],
        "score": 1.0,
    }
    dataset = read(write, qwen2_5, pair)
    assert dataset.report.unread_counts == {"score": 1, "messages[].mood": 1}
    assert [len(item.candidates) for item in dataset.items] == [2]
