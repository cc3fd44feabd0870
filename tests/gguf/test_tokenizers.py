"""llama.cpp cuts text into the same tokens as the tokenizer that was trained with."""

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
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import ModelError
from ondevice.exits import convert
from ondevice.gguf.write_tokenizer import WRITTEN_WORDS
from ondevice.models import load_model, load_tokenizer, save_tiny
from ondevice.models.tiny import CHAT_TEMPLATE
from tests import trained_tokenizers
from tests.exits.conftest import random_adapter
from tests.exits.llama_cpp import MESSAGES, LlamaCpp

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


MARKS = ["<eos>", "<|im_start|>", "<|im_end|>"]


def byte_level(*before) -> Tokenizer:
    last = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not before or not isinstance(before[0], Split)
    )
    tokenizer = trained_tokenizers.byte_level(CORPUS, 403, MARKS, cut=False, limit=300)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last]) if before else last
    return tokenizer


def sentencepiece() -> Tokenizer:
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *MARKS]
    tokenizer = trained_tokenizers.sentencepiece(
        CORPUS, 400 + len(special), special, "<unk>", limit=300
    )
    rules = json.loads(tokenizer.to_str())
    rules["added_tokens"] = [  # bytes are not texts of their own
        token for token in rules["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(rules))


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
