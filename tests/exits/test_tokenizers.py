"""llama.cpp cuts text into the same tokens as the tokenizer that was trained with, and makes the same prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import ModelError
from ondevice.exits import convert
from ondevice.exits.ollama import Template, template_of
from ondevice.gguf.write_tokenizer import WRITTEN_WORDS
from ondevice.models import load_model, load_tokenizer, save_tiny
from ondevice.models.tiny import CHAT_TEMPLATE
from tests.exits.conftest import random_adapter
from tests.exits.llama_cpp import LlamaCpp

TEXTS = (
    "Hello, world! It's 12345 o'clock; we've 3.14 and 1,000.",
    "  leading and   inner   spaces \n\n\n and\tlines\r\n  ",
    "Äpfel, naïve, Ελληνικά, 漢字仮名, emoji 🙂🙃, e\u0301",
    "def f(x):\n    return x**2  # IT'S ok\n",
    "<|im_start|>user\nhi<|im_end|>\nx",
)
WORDS = "".join(random.Random(0).choices("aaabbbccd12 ", k=3000))
"""Words in which the order of merges, and whether digits and letters are cut apart, make a difference."""
CORPUS = [*TEXTS, WORDS] * 2
MESSAGES = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Why?"}]  # fmt: skip


def byte_level(*before) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not before or not isinstance(before[0], Split)
    )
    # Trained without cutting, so that there are merges across every place where text is cut.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last]) if before else last
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    return trained(tokenizer, [], ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])


def gemmas() -> Tokenizer:
    """No space before a text, a first token, spaces and lines that are tokens before a text is cut."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("\n\n", "  ", "   ", "\n")]
    )
    tokenizer.add_special_tokens(["<bos>"])
    ids = [("<bos>", tokenizer.token_to_id("<bos>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=ids)
    return tokenizer


def trained(
    tokenizer: Tokenizer, alphabet: list[str], special: list[str] | None = None
) -> Tokenizer:
    tokens = [*(special or []), "<eos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400 + len(tokens), initial_alphabet=alphabet, special_tokens=tokens,
                                  show_progress=False, limit_alphabet=300)  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    if special:  # bytes are no text of their own
        rules = json.loads(tokenizer.to_str())
        rules["added_tokens"] = [
            token for token in rules["added_tokens"] if not token["content"].startswith("<0x")
        ]
        tokenizer = Tokenizer.from_str(json.dumps(rules))
    return tokenizer


Split = pre_tokenizers.Split
WAYS = {
    "GPT-2": lambda: byte_level(),
    "SmolLM": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    **{
        name: lambda words=words: byte_level(Split(Regex(words), "isolated"))
        for words, name in WRITTEN_WORDS.items()
    },
    "sentencepiece": sentencepiece,
    "Gemma": gemmas,
}


def model_with(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a tiny model that has that tokenizer."""
    save_tiny(folder, vocab=tokenizer.get_vocab_size() + 3)  # some rows without a token
    names = {"bos_token": "<bos>"} if tokenizer.token_to_id("<bos>") else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", **names
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_llama_cpp_gives_the_same_tokens(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the file that was written is read back as the same tokenizer, whatever transformers makes of it."""
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    model = model_with(tmp_path / "model", WAYS[way]())
    loaded = load_model(str(model))
    save_adapter(random_adapter(loaded), tmp_path / "adapter")
    convert(tmp_path / "adapter", "gguf", tmp_path / "a.gguf", model=str(model), dtype="float32")
    reader, tokenizer = LlamaCpp(tmp_path / "a.gguf"), AutoTokenizer.from_pretrained(model)
    back: Any = load_tokenizer(str(tmp_path / "a.gguf"))
    for text in (*TEXTS, WORDS[1500:1700]):
        assert reader.tokens(text) == tokenizer(text)["input_ids"] == back(text)["input_ids"], text
        assert back.decode(back(text)["input_ids"]) == tokenizer.decode(
            tokenizer(text)["input_ids"]
        )
    assert back.apply_chat_template(MESSAGES, tokenize=False) == tokenizer.apply_chat_template(
        MESSAGES, tokenize=False
    )
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert reader.chat(MESSAGES) == expected


def test_a_tokenizer_without_a_llama_cpp_name_is_refused(tmp_path: Path) -> None:
    model = model_with(
        tmp_path / "model", byte_level(Split(Regex(r"\w+|\s+|[^\w\s]+"), "isolated"))
    )
    save_adapter(random_adapter(load_model(str(model))), tmp_path / "adapter")
    with pytest.raises(ModelError) as caught:
        convert(tmp_path / "adapter", "gguf", tmp_path / "a.gguf", model=str(model))
    assert "Split" in caught.value.received
    assert not (tmp_path / "a.gguf").exists()


class Fake:
    """A tokenizer that has a template and nothing else."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages, tokenize: bool, add_generation_prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, _ = render_jinja_template([messages], chat_template=self.chat_template,
                                         add_generation_prompt=add_generation_prompt)  # fmt: skip
        return texts[0]


DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<s>Be kind</s>{% endif %}" + CHAT_TEMPLATE


@pytest.mark.parametrize("text", [CHAT_TEMPLATE, DEFAULT_SYSTEM])
def test_a_template_of_texts_around_messages_is_found(text: str) -> None:
    tokenizer = Fake(text)
    found = template_of(tokenizer)
    assert isinstance(found, Template)
    for messages in (
        MESSAGES,
        [{"role": "system", "content": "Be brief"}, *MESSAGES],
        MESSAGES[:1],
    ):
        assert found.render(messages) == tokenizer.apply_chat_template(messages, False, True)
    assert all(
        part in found.go()
        for part in ("{{ range .Messages }}", 'eq .Role "user"', "{{ .Content }}")
    )
    assert ("ne (index .Messages 0).Role" in found.go()) == (text == DEFAULT_SYSTEM)


@pytest.mark.parametrize("text", [
    CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"),
    CHAT_TEMPLATE.replace("{% for", "{{ raise_exception('no') }}{% for"),
    CHAT_TEMPLATE.replace("<|im_end|>", "<|im_end|>{{ loop.index }}"),
])  # fmt: skip
def test_any_other_template_is_left_to_ollama(text: str) -> None:
    assert template_of(Fake(text)) is None
