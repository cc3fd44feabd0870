"""A prompt that is returned with its completion: its text, and the place of each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ondevice.generation.sample import Token
from ondevice.generation.text import Text
from ondevice.generation.token_bytes import TokenBytes, token_bytes


def echoed(tokenizer: Any, prompt: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text of a prompt and the first character of each of its tokens.

    The text is the prompt's own; special tokens that the tokenizer adds have no characters in it.
    The text of token ids is that of all tokens, with the names of special ones.
    """
    own = token_bytes(tokenizer)
    if not isinstance(prompt, str):
        return _read(own, ids)
    added = 0
    while added < len(ids) and ids[added] in own.hidden and not _begins(prompt, own, ids[added]):
        added += 1
    text, offsets = _read(own, ids[added:])
    if text == f" {prompt}":  # SentencePiece's own first space
        offsets = [max(0, offset - 1) for offset in offsets]
    elif text != prompt:  # the tokenizer changes text before it reads it
        encoded = tokenizer(prompt, return_offsets_mapping=True)
        return prompt, [begin for begin, _ in encoded["offset_mapping"]]
    return prompt, [0] * added + offsets


def _begins(prompt: str, own: TokenBytes, number: int) -> bool:
    return prompt.encode("utf-8", "replace").startswith(own.of(number))


def _read(own: TokenBytes, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text of tokens, also of special ones, and the first character of each."""
    text = Text(own.tokenizer, shows_special=True)
    parts = [text.take(Token(number, None)) for number in ids]
    parts.append(text.rest())
    whole = "".join(part.text for part in parts)
    return whole, [offset for part in parts for offset in part.offsets]
