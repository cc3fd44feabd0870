"""What a row says beyond role and content decides what is trained on: weights, reasoning, ids, settings, marks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ondevice.core.errors import DataError
from ondevice.data import read_rows
from tests.data.public_templates import tokenizer_for
from tests.data.tasks.turns import (
    AGAIN,
    ANSWERED,
    ASKED,
    CALLED,
    PEAR,
    RESULT,
    SYSTEM,
    WEATHER,
    Write,
    read,
    stretches,
    whole,
)


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


def test_the_parts_of_a_conversation_stay_on_one_side_of_a_split(write: Write, qwen3: Any) -> None:
    from ondevice.data import split_rows

    dataset = read(write, qwen3, *[{"messages": [ASKED, ANSWERED, AGAIN, PEAR]}] * 9)
    train, held = split_rows(dataset, 0.3, 1)
    assert (len(train), len(held)) == (12, 6)
    assert not {item.line for item in train.items} & {item.line for item in held.items}
    assert held.figures()["unread"] == {} and json.dumps(train.figures())


def test_a_preference_pair_s_turns_are_checked_too(write: Write, qwen2_5: Any) -> None:
    pair = {
        "chosen": [ASKED | {"mood": "dry"}, ANSWERED],
        "rejected": [ASKED | {"mood": "dry"}, PEAR],
        "score": 1.0,
    }
    dataset = read(write, qwen2_5, pair)
    assert dataset.report.unread_counts == {"score": 1, "messages[].mood": 1}
    assert [len(item.candidates) for item in dataset.items] == [2]
