"""The text of tokens: no space and no byte is lost, and each token has its place in the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ondevice.generation.sample import Token
from ondevice.generation.text import Text
from ondevice.generation.token_bytes import TokenBytes
from tests.trained_tokenizers import byte_level, sentencepiece

TEXTS = ["the capital of france is paris and rome. Two  spaces, é ü 雨 and 🌧\n\nnew lines"]


def wrap(backend: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def with_byte_tokens() -> Any:
    """Return Llama's kind, whose tokens for bytes are not special."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = sentencepiece(TEXTS, 400, ["<unk>", "<s>", "</s>", *names], "<unk>")
    values = json.loads(backend.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    return wrap(Tokenizer.from_str(json.dumps(values)))


TOKENIZERS = {
    "byte-level": lambda: wrap(byte_level(TEXTS, 300, ["<s>", "</s>"])),
    "sentencepiece": with_byte_tokens,
}


def read(text: Text, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the whole text, and each token with its offset."""
    whole, tokens = "", []
    for number in ids:
        part = text.take(Token(number, 0.0))
        whole += part.text
        tokens += zip((token.id for token in part.tokens), part.offsets, strict=True)
        assert "\ufffd" not in whole
    last = text.rest()
    tokens += zip((token.id for token in last.tokens), last.offsets, strict=True)
    return whole + last.text, tokens


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_give_the_text_with_all_spaces_and_their_offsets(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    for text in (*TEXTS, "  two   at the start", "é🌧雨", "unseen: Ω ≠ 𝄞"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = text if kind == "byte-level" else f" {text}"
        whole, tokens = read(Text(tokenizer), ids)
        assert whole == expected and [number for number, _ in tokens] == ids
        own = TokenBytes(tokenizer)
        assert b"".join(map(own.of, ids)) == expected.encode()
        for number, offset in tokens:
            token = own.of(number)
            if token == token.decode("utf-8", "ignore").encode():  # of complete characters
                assert expected[offset:].encode().startswith(token)


def test_a_continuation_keeps_its_first_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]()
    ids = tokenizer("paris and", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "paris and"
    assert read(Text(tokenizer), ids)[0] == " paris and"


def test_special_tokens_are_no_text_and_half_a_character_is_shown_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    rain = tokenizer("Ω", add_special_tokens=False)["input_ids"]
    whole, tokens = read(Text(tokenizer), [tokenizer.bos_token_id, *rain[:-1]])
    assert whole == "\ufffd" and [offset for _, offset in tokens] == [0] * len(rain)


def test_words_of_wordpiece_have_spaces_between_them() -> None:
    backend = Tokenizer(
        models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert read(Text(tokenizer), [1, 2, 3])[0] == " playing now"


def test_a_stop_text_over_several_tokens_ends_the_text_before_it() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    ids = tokenizer("rome and 🌧 paris", add_special_tokens=False)["input_ids"]
    text = Text(tokenizer, ["🌧 pa"])
    whole = ""
    for number in ids:
        whole += text.take(Token(number, 0.0)).text
        if text.is_done:
            break
    assert whole == "rome and " and text.ending.finish == "stop"
