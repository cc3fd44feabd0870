"""Labels cover the answer and nothing else, and truncation never reaches the answer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ondevice.core.errors import ConfigError, DataError
from ondevice.data import IGNORE, Dataset, Example, Item, Row, Rows, encode, pad_id_of

WORDS = [
    "the",
    "film",
    "was",
    "great",
    "foo",
    "bar",
    "foobar",
    "東京",
    "Grüße",
    "\U0001f35c",
    "a",
    "\n",
    "  ",
    ".",
    "Yes",
    "<s>",
    "</s>",
    "<|end|>",
    "<|start|>",
]
texts = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=20
)
answers = texts.filter(lambda text: bool(text.strip()))
kinds = st.sampled_from(["bytes", "bos", "llama"])


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return a text's ids with one BOS in front if the tokenizer has one, and no EOS of its own."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token
    return ids if bos is None or text.startswith(bos) else [tokenizer.bos_token_id, *ids]


def ended(tokenizer: Any, ids: list[int]) -> list[int]:
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def completion(prompt: str, answer: str, **changes: Any) -> Rows:
    return Rows("f", "completion", [Row(1, ((prompt, answer),), **changes)])


def choices(*pairs: tuple[str, str], gold: int = 0) -> Rows:
    return Rows("f", "classification", [Row(1, pairs, gold, end=False)])


def labelled(example: Example) -> tuple[int, ...]:
    return tuple(label for label in example.labels if label != IGNORE)


def check(example: Example, limit: int) -> None:
    assert len(example.ids) == len(example.labels) <= limit
    assert all(
        label in (IGNORE, token) for token, label in zip(example.ids, example.labels, strict=True)
    )
    assert example.trained_tokens == sum(label != IGNORE for label in example.labels[1:]) > 0


def encode_one(
    rows: Rows, tokenizer: Any, limit: int, **options: Any
) -> tuple[Dataset, Item | None]:
    dataset = encode(rows, tokenizer, max_length_tokens=limit, allow_empty=True, **options)
    assert len(dataset.items) + len(dataset.problems) == 1
    return dataset, dataset.items[0] if dataset.items else None


@settings(max_examples=120, deadline=None)
@given(kind=kinds, prompt=texts, answer=answers)
def test_labels_cover_the_answer(
    kind: str, prompt: str, answer: str, tokenizers: dict[str, Any]
) -> None:
    tokenizer = tokenizers[kind]
    _, item = encode_one(completion(prompt, answer), tokenizer, 10_000)
    assume(item is not None)  # an answer that merges with the first token of a prompt without BOS
    check(item.example, 10_000)
    ids, start = item.example.ids, item.prompt_tokens
    assert item.example.labels == (IGNORE,) * start + ids[start:]
    assert ids[-1] == tokenizer.eos_token_id and item.dropped_tokens == 0
    if kind == "bytes":  # the byte-level tokenizer loses nothing
        assert tokenizer.decode(ids).removesuffix("<|end|>") == (prompt + answer).removesuffix(
            "<|end|>"
        )
    assert list(ids) == ended(tokenizer, ids_of(tokenizer, prompt + answer))
    alone = ids_of(tokenizer, prompt)
    assert list(ids[:start]) == alone[:start]
    if list(ids[: len(alone)]) == alone:
        assert start == len(alone)  # the prompt's ids are a prefix: nothing of it is trained on


@settings(max_examples=120, deadline=None)
@given(kind=kinds, prompt=texts, answer=answers, limit=st.integers(2, 24))
def test_answer_is_never_cut(
    kind: str, prompt: str, answer: str, limit: int, tokenizers: dict[str, Any]
) -> None:
    _, whole = encode_one(completion(prompt, answer), tokenizers[kind], 10_000)
    assume(whole is not None)
    dataset, item = encode_one(completion(prompt, answer), tokenizers[kind], limit)
    wanted = labelled(whole.example)
    if item is None:
        room = limit - 1 if whole.prompt_tokens else limit
        assert (
            len(wanted) > room
            and f"the answer has {len(wanted)} tokens" in dataset.problems[0].reason
        )
        assert dataset.too_long_tokens == [len(whole.example)]
        return
    check(item.example, limit)
    assert labelled(item.example) == wanted and item.example.ids[-len(wanted) :] == wanted
    assert item.dropped_tokens == max(0, len(whole.example) - limit)
    assert dataset.truncated == (item.dropped_tokens > 0)
    if kind != "bytes" and item.prompt_tokens:
        assert item.example.ids[0] == tokenizers[kind].bos_token_id
    if item.prompt_tokens > 1:  # what is left of the prompt is its end
        assert (
            item.example.ids[1 : item.prompt_tokens]
            == whole.example.ids[whole.prompt_tokens - item.prompt_tokens + 1 : whole.prompt_tokens]
        )


@settings(max_examples=80, deadline=None)
@given(kind=kinds, prompt=texts, limit=st.integers(4, 30), gold=st.integers(0, 1))
def test_candidates_share_their_context(
    kind: str, prompt: str, limit: int, gold: int, tokenizers: dict[str, Any]
) -> None:
    pairs = ((prompt + " It was", " terrible"), (prompt + " It was", " great and great and great"))
    _, item = encode_one(choices(*pairs, gold=gold), tokenizers[kind], limit)
    assume(item is not None)
    assert len(item.candidates) == 2 and item.gold == gold and item.example == item.candidates[gold]
    contexts = set()
    for candidate, (_, answer) in zip(item.candidates, pairs, strict=True):
        check(candidate, limit)
        contexts.add(candidate.ids[: len(candidate) - len(labelled(candidate))])
        decoded = tokenizers[kind].decode(labelled(candidate))
        assert decoded.endswith(answer.strip()) and (kind == "llama" or decoded == answer)
        ends = candidate.ids.count(tokenizers[kind].eos_token_id)
        assert ends <= prompt.count(tokenizers[kind].eos_token)
    assert len(contexts) == 1


def test_token_across_the_boundary_belongs_to_the_answer(tokenizer: Any) -> None:
    """ "foo" + "bar" is one token "foobar" here, so the prompt's ids are no prefix of the whole."""
    assert len(tokenizer(" foobar")["input_ids"]) == 1
    _, item = encode_one(completion("a foo", "bar"), tokenizer, 99)
    assert tokenizer.decode(labelled(item.example)) == " foobar<|end|>" and item.prompt_tokens == 1


def test_train_on_prompt_does_not_change_candidates(any_tokenizer: Any) -> None:
    rows = choices(("It was", " great"), ("It was", " terrible"))
    _, masked = encode_one(rows, any_tokenizer, 99)
    _, whole = encode_one(rows, any_tokenizer, 99, train_on_prompt=True)
    assert whole.example.labels == whole.example.ids == masked.example.ids != masked.example.labels
    assert whole.candidates == masked.candidates and whole.prompt_tokens == masked.prompt_tokens


def test_end_of_sequence_is_not_doubled(tokenizer: Any) -> None:
    _, item = encode_one(completion("a", " b<|end|>"), tokenizer, 99)
    assert item.example.ids.count(tokenizer.eos_token_id) == 1
    _, item = encode_one(completion("a", " b", end=False), tokenizer, 99)
    assert tokenizer.eos_token_id not in item.example.ids


@settings(max_examples=60, deadline=None)
@given(kind=kinds, text=answers, limit=st.integers(2, 9), end=st.booleans())
def test_windows_predict_every_token_once(
    kind: str, text: str, limit: int, end: bool, tokenizers: dict[str, Any]
) -> None:
    rows = Rows("f", "text", [Row(1, (("", text),), end=end)])
    dataset = encode(rows, tokenizers[kind], max_length_tokens=limit, allow_empty=True)
    ids = ids_of(tokenizers[kind], text)
    ids = ended(tokenizers[kind], ids) if end else ids
    if len(ids) < 2:
        assert "fewer than two tokens" in dataset.problems[0].reason
        return
    joined = list(dataset.items[0].example.ids[:1])
    for item in dataset.items:
        check(item.example, limit)
        assert item.example.labels == item.example.ids and item.example.ids[0] == joined[-1]
        assert item.dropped_tokens == item.prompt_tokens == 0
        joined += item.example.ids[1:]
    assert joined == ids


def test_windows_know_their_line(any_tokenizer: Any) -> None:
    text = "\n".join(f"line {number} was great" for number in range(1, 30))
    dataset = encode(
        Rows("f", "text", [Row(1, (("", text),), end=False)]), any_tokenizer, max_length_tokens=16
    )
    lines = [item.line for item in dataset.items]
    assert lines == sorted(lines) and lines[0] == 1 and len(set(lines)) > 3
    for item in dataset.items:
        first = re.search(r"line +(\d+) +was", any_tokenizer.decode(item.example.ids))
        assert first is None or item.line in (int(first[1]), int(first[1]) - 1)


def test_wrong_length_slow_tokenizer_and_nothing_left(tokenizer: Any) -> None:
    with pytest.raises(ConfigError) as too_small:
        encode(completion("a", "b"), tokenizer, max_length_tokens=1)
    assert (too_small.value.expected, too_small.value.received) == ("at least 2", 1)
    with pytest.raises(DataError) as caught:
        encode(completion("a", "b"), object(), max_length_tokens=9)
    assert (caught.value.expected, caught.value.received) == ("a fast tokenizer", "object")
    with pytest.raises(DataError) as caught:
        encode(completion("a", "b" * 99), tokenizer, max_length_tokens=4)
    assert "f:1: the answer has" in caught.value.message


def test_the_pad_id_falls_back_to_the_end_token(tokenizers: dict[str, Any]) -> None:
    assert pad_id_of(tokenizers["bytes"]) == tokenizers["bytes"].pad_token_id
    assert pad_id_of(type("NoPad", (), {"pad_token_id": None, "eos_token_id": 7})()) == 7
    assert pad_id_of(object()) == 0
