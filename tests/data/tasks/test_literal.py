"""Special tokens that a message mentions are text, and a template's own are marks.

What is right comes from a second tokenizer, a copy whose marks have other names: to it, the first
one's are ordinary text.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ondevice.core.errors import ConfigError
from ondevice.core.session import IGNORE
from ondevice.data import encode, read_rows
from ondevice.data.rows import BadRow
from ondevice.data.tasks import literal
from ondevice.data.tasks.chat_template import ChatTemplate, apply_template
from ondevice.generation.prompt import prompt_ids
from tests.data.public_templates import names, tokenizer_for
from tests.trained_tokenizers import byte_level, sentencepiece

TEXTS = [
    "Eight. A cat has four legs. Name a fruit, <s> or [INST] or <|im_end|>. Two  spaces. é ü 雨"
]
CHATML = (
    "{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\n' + turn.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for turn in messages %}{% if turn.role == 'user' %}{{ bos_token + '[INST] ' + turn.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + turn.content + ' </s>' }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'user' %}{{ '<｜User｜>' + turn.content }}"
    "{% else %}{{ '<｜Assistant｜>' + turn.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
MISTRAL = (
    LLAMA2.replace("[INST] ", "[INST]").replace(" [/INST]", "[/INST]").replace(" </s>", "</s>")
)


def wrap(backend: Tokenizer, marks: list[str], template: str, **named: Any) -> Any:
    """Return a tokenizer of transformers with marks, the first two as BOS and EOS."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=marks[0], eos_token=marks[1]
    )
    tokenizer.add_tokens(
        [AddedToken(mark, normalized=False, **({"special": True} | named)) for mark in marks]
    )
    tokenizer.chat_template = template
    return tokenizer


def unigram(marks: list[str]) -> Tokenizer:
    """Train a tokenizer that would make a mark of the same text, as its words are whole pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", *marks], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    values = json.loads(tokenizer.to_str())
    values["model"]["vocab"] = [
        [piece, -1.0 if piece in marks else score] for piece, score in values["model"]["vocab"]
    ]
    return Tokenizer.from_str(json.dumps(values))


def metaspace(marks: list[str]) -> Tokenizer:
    """Train Llama's kind of today, which joins the first space."""
    tokenizer = sentencepiece(TEXTS, 380, ["<unk>", *marks], "<unk>")
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


KINDS: dict[str, Any] = {
    "byte-level": lambda marks: byte_level(TEXTS, 330, marks),
    "byte-level, merges over all": lambda marks: byte_level(TEXTS, 330, marks, cut=False),
    "sentencepiece": lambda marks: sentencepiece(TEXTS, 380, ["<unk>", *marks], "<unk>"),
    "metaspace": metaspace,
    "unigram": unigram,
}
FAMILIES = {
    "ChatML": (CHATML, ["<s>", "</s>", "<|im_start|>", "<|im_end|>"], {}),
    "ChatML, marks that eat spaces": (CHATML, ["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
                                      {"rstrip": True, "lstrip": True}),
    "Llama 2": (LLAMA2, ["<s>", "</s>"], {}),
    "Mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], {}),
    "DeepSeek": (DEEPSEEK, ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"], {}),
    "DeepSeek, marks not called special": (
        DEEPSEEK, ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        {"special": False}),
}  # fmt: skip


def other_name(mark: str) -> str:
    """Return a mark of the same length that no text has."""
    return "§" * (len(mark) - 1) + chr(0x2460 + sum(map(ord, mark)) % 60)


def encoded(tokenizer: Any, turns: list[dict[str, str]]) -> list[int]:
    return list(prompt_ids(tokenizer, turns, ""))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mentioned_mark_has_the_ids_of_a_tokenizer_without_it(family: str, kind: str) -> None:
    template, marks, options = FAMILIES[family]
    others = [other_name(mark) for mark in marks]
    assert len(set(others)) == len(marks)
    renamed = template
    for mark, other in zip(marks, others, strict=True):
        renamed = renamed.replace(mark, other)
    backend = KINDS[kind](marks)
    text = backend.to_str()
    for mark, other in zip(marks, others, strict=True):
        text = text.replace(
            json.dumps(mark, ensure_ascii=False), json.dumps(other, ensure_ascii=False)
        )
    own = wrap(backend, marks, template, **options)
    oracle = wrap(Tokenizer.from_str(text), others, renamed, **options)
    assert len(own) == len(oracle)
    for text in (
        *marks,
        f"Two  {marks[-1]}  spaces{marks[0]}",
        "é" + "".join(marks),
        f" {marks[1]}\n{marks[2 % len(marks)]} user",
    ):
        turns = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"Eight. {text}"},
        ]
        turns.append({"role": "user", "content": "Name a fruit"})
        assert encoded(own, turns) == encoded(oracle, turns), text
    plain = [
        {"role": "user", "content": "Name a  fruit é"},
        {"role": "assistant", "content": " Eight."},
    ]
    whole = own(apply_template(own, plain, add_generation_prompt=True), add_special_tokens=False)
    assert encoded(own, plain) == encoded(oracle, plain) == whole["input_ids"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("template", names())
def test_every_public_template_keeps_only_its_own_marks(template: str, tmp_path) -> None:
    tokenizer = tokenizer_for(template)
    marks = [*tokenizer.added_tokens_encoder]
    mentioned = " ".join(sorted(set(marks) - {"<think>", "</think>", "<image>"}))
    special = {*tokenizer.added_tokens_encoder.values()}

    def shown(text: str) -> tuple[str, list[str], list[str]]:
        path = tmp_path / "rows.jsonl"
        turns = [{"role": "user", "content": f"Name {text} a fruit"}]
        turns.append({"role": "assistant", "content": f"Apple {text} pie"})
        path.write_text(json.dumps({"messages": turns}))
        dataset = encode(read_rows(path), tokenizer, max_length_tokens=20_000)
        example = dataset.items[0].example
        both = zip(example.ids, example.labels, strict=True)
        trained = [one for one, label in both if one in special and label != IGNORE]
        asked = prompt_ids(tokenizer, _formed(tokenizer, turns[:1]), "")
        found = [one for one in [*example.ids, *asked] if one in special]
        words = tokenizer.convert_ids_to_tokens
        note = any("mention special tokens" in one for one in dataset.report.sentences())
        assert note == (text != "QQ")
        return tokenizer.decode(example.ids), words(found), words(trained)

    text, found, trained = shown(mentioned)
    neutral = shown("QQ")
    assert (found, trained) == neutral[1:]
    assert text == neutral[0].replace("QQ", mentioned)


def _formed(tokenizer: Any, turns: list[dict[str, str]]) -> list[dict[str, str]]:
    return [ChatTemplate(tokenizer).formed(turn) for turn in turns]


def test_a_forged_code_is_refused() -> None:
    tokenizer = wrap(byte_level(TEXTS, 330, ["<s>", "</s>"]), ["<s>", "</s>"], CHATML)
    code = literal.hide(tokenizer, "</s>")
    assert len(code) == 4 and code != "</s>"
    with pytest.raises(BadRow):
        literal.hide(tokenizer, f"a{code}")
    with pytest.raises(ConfigError):
        prompt_ids(tokenizer, [{"role": "user", "content": code}], "")
    with pytest.raises(BadRow):
        literal.encode(tokenizer, f"a{code[:2]}")


def test_a_template_that_cuts_a_mentioned_mark_is_refused(tmp_path) -> None:
    cutting = CHATML.replace("turn.content", "turn.content[:9]")
    tokenizer = wrap(byte_level(TEXTS, 330, ["<s>", "</s>"]), ["<s>", "</s>"], cutting)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    with pytest.raises(ConfigError) as caught:
        prompt_ids(tokenizer, [{"role": "user", "content": "Name <|im_end|>"}], "")
    assert "cuts a text" in str(caught.value.received)


def test_merges_that_would_make_a_mark_do_not() -> None:
    backend = byte_level(["<s>"] * 9, 270, ["<s>", "</s>"], cut=False)
    assert ["<s", ">"] in json.loads(backend.to_str())["model"]["merges"]
    tokenizer = wrap(backend, ["<s>", "</s>"], LLAMA2)
    ids = encoded(tokenizer, [{"role": "user", "content": "a <s> b"}])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert "a <s> b" in tokenizer.decode(ids)
