"""Chat rows: assistant turns are trained on, through the tokenizer's own template."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.core.errors import DataError
from ondevice.data import IGNORE, Dataset, Row, Rows, encode

content = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=15
).filter(str.strip)
turns = st.tuples(st.booleans(), st.lists(st.tuples(content, content), min_size=1, max_size=4))


def chat(*messages: tuple[str, str]) -> Rows:
    return Rows("f", "chat", [Row(1, messages=messages)])


def conversation(drawn: tuple[bool, list[tuple[str, str]]]) -> tuple[tuple[str, str], ...]:
    system, pairs = drawn
    said = [
        turn for asked, answered in pairs for turn in (("user", asked), ("assistant", answered))
    ]
    return tuple(([("system", "Be kind.")] if system else []) + said)


def trained_text(dataset: Dataset, tokenizer: Any) -> list[str]:
    """The stretches that are trained on, decoded."""
    collected: list[list[int]] = []
    before = IGNORE
    for label in dataset.items[0].example.labels:
        if label != IGNORE:
            collected = [*collected, []] if before == IGNORE else collected
            collected[-1].append(label)
        before = label
    return [tokenizer.decode(stretch) for stretch in collected]


@settings(max_examples=60, deadline=None)
@given(drawn=turns)
def test_assistant_turns_and_their_end_are_trained_on(drawn: Any, tokenizer: Any) -> None:
    messages = conversation(drawn)
    dataset = encode(chat(*messages), tokenizer, max_length_tokens=10_000)
    (item,) = dataset.items
    expected = [text + "<|end|>" for role, text in messages if role == "assistant"]
    # A template's newline may share a token with the first letters of the answer.
    assert [text.removeprefix("\n") for text in trained_text(dataset, tokenizer)] == [
        text.removeprefix("\n") for text in expected
    ]
    whole = [{"role": role, "content": text} for role, text in messages]
    rendered = tokenizer.apply_chat_template(whole, tokenize=False)
    assert tokenizer.decode(item.example.ids) == rendered.removesuffix("\n")
    asked = tokenizer.apply_chat_template(whole[:-1], tokenize=False, add_generation_prompt=True)
    assert asked.startswith(tokenizer.decode(item.example.ids[: item.prompt_tokens]))
    assert dataset.template == "chat template"


@settings(max_examples=60, deadline=None)
@given(drawn=turns, limit=st.integers(4, 60))
def test_no_answer_is_cut_in_half(drawn: Any, limit: int, tokenizer: Any) -> None:
    messages = conversation(drawn)
    full = len(encode(chat(*messages), tokenizer, max_length_tokens=10_000).items[0].example)
    dataset = encode(chat(*messages), tokenizer, max_length_tokens=limit, allow_empty=True)
    if not dataset.items:
        reason = dataset.problems[0].reason
        assert "the answer has" in reason or "the last turns have" in reason
        assert dataset.too_long_tokens == [full]
        return
    (item,) = dataset.items
    begins = {
        tokenizer.decode(item.example.ids).startswith(f"<|start|>{role}")
        for role in ("user", "system")
    }
    assert begins == {True, False}  # a turn's beginning: what goes is whole turns
    assert len(item.example) <= limit and item.dropped_tokens == full - len(item.example)
    answers = [text + "<|end|>" for role, text in messages if role == "assistant"]
    kept = [text.removeprefix("\n") for text in trained_text(dataset, tokenizer)]
    assert kept == [text.removeprefix("\n") for text in answers[-len(kept) :]] and kept


def test_oldest_turns_go_first_and_the_system_turn_stays(tokenizer: Any) -> None:
    messages = (("system", "Be kind."), ("user", "the film " * 9), ("assistant", "great"),
                ("user", "the book?"), ("assistant", "terrible"))  # fmt: skip
    dataset = encode(chat(*messages), tokenizer, max_length_tokens=40)
    shown = tokenizer.decode(dataset.items[0].example.ids)
    assert shown == (
        "<|start|>system\nBe kind.<|end|>\n<|start|>user\nthe book?<|end|>\n<|start|>assistant\nterrible<|end|>"
    )
    assert dataset.truncated == 1


def test_a_prompt_is_never_cut_inside(tokenizer: Any) -> None:
    rows = chat(("system", "Be kind."), ("user", "the film " * 9), ("assistant", "great"))
    full = len(encode(rows, tokenizer, max_length_tokens=999).items[0].example)
    dataset = encode(rows, tokenizer, max_length_tokens=full - 1, allow_empty=True)
    assert dataset.items == [] and dataset.too_long_tokens == [full]
    assert dataset.problems[0].reason == (
        f"the last turns have {full} tokens; with max_length_tokens={full - 1} they do not fit whole"
    )
    assert dataset.figures()["left_out"] == {
        f"the last turns have N tokens; with max_length_tokens={full - 1} they do not fit whole": 1
    }


def test_one_token_to_train_on_is_enough_but_not_the_first(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (item,) = encode(chat(("user", "a"), ("assistant", " great")), bare, max_length_tokens=99).items
    assert item.example.labels == (IGNORE, item.example.ids[1])
    bare.chat_template = "{% for message in messages if message.role == 'assistant' %}{{ message.content }}{% endfor %}"
    dataset = encode(
        chat(("user", "a"), ("assistant", " great")), bare, max_length_tokens=99, allow_empty=True
    )
    assert "no assistant turn has a token" in dataset.problems[0].reason


def test_train_on_prompt(tokenizer: Any) -> None:
    rows = chat(("user", "the film?"), ("assistant", "great"))
    (item,) = encode(rows, tokenizer, max_length_tokens=99, train_on_prompt=True).items
    assert item.example.labels == item.example.ids


def test_chat_without_a_template_is_a_data_error(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        encode(chat(("user", "a"), ("assistant", "b")), tokenizers["bos"], max_length_tokens=99)
    assert "a tokenizer with a chat template" in str(caught.value.expected)


def test_instruct_without_a_template_has_its_own_prompt(tokenizers: dict[str, Any]) -> None:
    pair = ("### Instruction:\nAdd.\n\n### Response:\n", "2")
    row = Row(1, (pair,), messages=(("user", "Add."), ("assistant", "2")))
    plain = encode(Rows("f", "instruct", [row]), tokenizers["bos"], max_length_tokens=99)
    framed = encode(Rows("f", "instruct", [row]), tokenizers["bytes"], max_length_tokens=99)
    assert (plain.template, framed.template) == ("instruction prompt", "chat template")
    assert tokenizers["bos"].decode(
        plain.items[0].example.ids, skip_special_tokens=True
    ) == "".join(pair)
    assert tokenizers["bytes"].decode(framed.items[0].example.ids).startswith("<|start|>user\nAdd.")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses the turns: roles must alternate",
        ),
        ("{{ messages | length }} turns", "rewrites earlier turns"),
        ("{{ messages[0].nothing.more }}", "refuses the turns"),
        ("no turns", "drops the last assistant turn"),
    ],
)
def test_template_that_does_not_fit_is_a_problem(
    template: str, reason: str, tokenizer: Any
) -> None:
    odd = copy.deepcopy(tokenizer)
    odd.chat_template = template
    dataset = encode(
        chat(("user", "a"), ("assistant", "b")), odd, max_length_tokens=99, allow_empty=True
    )
    assert reason in dataset.problems[0].reason and dataset.problems[0].field == "messages"
