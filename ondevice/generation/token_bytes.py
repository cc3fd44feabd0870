"""The bytes of each token: its part of a text, which may be a part of a character.

A tokenizer decodes a token without its neighbours to other text than within them: SentencePiece's
lose the first space, and a part of a character becomes a replacement character. So the bytes are
read from the vocabulary by the tokenizer's own decoder rules. The text of tokens is their bytes in
a row.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "\u2581"


class TokenBytes:
    """The bytes of a tokenizer's tokens.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = {number: token.content.encode() for number, token in added.items()}
        self.hidden = frozenset(number for number, token in added.items() if token.special)
        """Special tokens, which have no text."""
        self._rules: list[dict[str, Any]] | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            self._rules = _rules_of(backend)
        self._known: dict[int, bytes] = {}

    def of(self, number: int) -> bytes:
        """Return the bytes of a token; those of a special one are its name."""
        if number not in self._known:
            self._known[number] = self._bytes_of(number)
        return self._known[number]

    def _bytes_of(self, number: int) -> bytes:
        if number in self._added:
            return self._added[number]
        piece = self.tokenizer.convert_ids_to_tokens(number)
        if piece is None:  # an id of the model that no token has
            return b""
        if self._rules is None:
            return str(self.tokenizer.decode([number])).encode("utf-8", "replace")
        for rule in self._rules:
            kind = rule["type"]
            if kind == "ByteLevel" and all(letter in _letters() for letter in piece):
                return bytes(_letters()[letter] for letter in piece)
            if kind == "ByteFallback" and (byte := _BYTE.fullmatch(piece)):
                return bytes([int(byte[1], 16)])
            piece = _decoded(piece, rule)
        return piece.encode("utf-8", "replace")


@lru_cache(maxsize=4)
def token_bytes(tokenizer: Any) -> TokenBytes:
    """Return the bytes of a tokenizer's tokens; they are read once."""
    return TokenBytes(tokenizer)


def _rules_of(backend: Any) -> list[dict[str, Any]]:
    """Return the decoder's rules in their order; a tokenizer without any joins words by spaces."""
    state = getattr(backend.decoder, "__getstate__", lambda: b"null")()
    decoder = json.loads(state)
    if decoder is None:
        return [{"type": "WordPiece", "prefix": "##"}]
    return list(decoder.get("decoders", [decoder]))


def _decoded(piece: str, rule: dict[str, Any]) -> str:
    """Apply a rule that changes text to a token within a text."""
    kind = rule["type"]
    if kind == "Replace":
        pattern = rule["pattern"]
        if "Regex" in pattern:
            return re.sub(pattern["Regex"], lambda _: rule["content"], piece)
        return piece.replace(pattern["String"], rule["content"])
    if kind == "Metaspace":
        return piece.replace(rule.get("replacement", _REPLACEMENT), " ")
    if kind == "WordPiece":
        prefix = rule.get("prefix", "##")
        return piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
    if kind == "BPEDecoder":
        return piece.replace(rule.get("suffix", "</w>"), " ")
    return piece


@cache
def _letters() -> dict[str, int]:
    """Return the byte of each letter of GPT-2's byte-level alphabet."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
