"""Special tokens that a message only mentions are text; those that the chat template writes are marks.

A tokenizer reads every special token of a rendered conversation, whoever wrote it. So `hide`
replaces those in messages, before the template is rendered, by codes of the same length. `encode`
then exchanges codes and special tokens, and reads the result with a copy of the tokenizer whose
special tokens are the codes. One pass over the whole text gives the ids and the positions that the
tokenizer itself would give, if it did not know the special tokens of the messages.

The codes are noncharacters, which Unicode reserves for a program's own use.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

from ondevice.data.rows import BadRow
from ondevice.data.tasks.chat_template import ChatTemplate

_BEGIN = "\ufdd0"
_END = "\ufdd1"
_DIGITS = "".join(map(chr, range(0xFDD2, 0xFDF0)))
_RESERVED = re.compile(f"[{_BEGIN}{_END}{_DIGITS}]")
_OF_ANSWERS = ("<think>", "</think>")
"""Written in answers as text, by rows and by models."""


class Encoded(NamedTuple):
    """The ids of a text, and the characters of it that each covers (fast tokenizers only)."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class _Codes(NamedTuple):
    """The codes of a tokenizer's special tokens.

    Attributes:
        exchanged: {special token: code, code: special token}.
        tokens: finds special tokens.
        both: finds special tokens and codes.
    """

    exchanged: dict[str, str]
    tokens: re.Pattern[str]
    both: re.Pattern[str]


def hide(tokenizer: Any, value: Any) -> Any:
    """Return a message, or a list or dictionary of texts, with codes for special tokens.

    Raises:
        BadRow: a text has a noncharacter.
    """
    if isinstance(value, str):
        if _RESERVED.search(value):
            reason = "the characters U+FDD0 to U+FDEF are no text: Unicode reserves them"
            raise BadRow("messages", reason)
        codes = _codes(tokenizer)
        return codes.tokens.sub(lambda found: codes.exchanged[found[0]], value)
    if isinstance(value, dict):
        return {hide(tokenizer, key): hide(tokenizer, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [hide(tokenizer, one) for one in value]
    return value


def encode(tokenizer: Any, text: str) -> Encoded:
    """Tokenize what a template rendered from hidden messages; add no special tokens.

    Raises:
        BadRow: the template cut a code, or the tokenizer makes a special token of any text.
    """
    if not _RESERVED.search(text):
        fast = bool(getattr(tokenizer, "is_fast", False))
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False
        )
        return Encoded(list(encoded["input_ids"]), list(encoded.get("offset_mapping", ())))
    if not getattr(tokenizer, "is_fast", False):
        reason = "a slow tokenizer cannot write a special token as text"
        raise BadRow("messages", reason)
    codes = _codes(tokenizer)
    text = codes.both.sub(lambda found: codes.exchanged[found[0]], text)
    marks = [found for found in codes.both.findall(text) if found.startswith(_BEGIN)]
    if len(_RESERVED.findall(text)) != sum(map(len, marks)):
        reason = "the tokenizer's chat template cuts a text that looks like a special token"
        raise BadRow("messages", reason)
    backend, special = _copy(tokenizer.backend_tokenizer, tuple(codes.exchanged.items()))
    encoding = backend.encode(text, add_special_tokens=False)
    if sum(number in special for number in encoding.ids) != len(marks):
        reason = "the tokenizer makes a special token of a text that only looks like one"
        raise BadRow("messages", reason)
    return Encoded(encoding.ids, encoding.offsets)


def _codes(tokenizer: Any) -> _Codes:
    return _codes_of(tokenizer, len(tokenizer), str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _codes_of(tokenizer: Any, size: int, template: str) -> _Codes:
    """Return the codes; `size` and `template` change if the tokenizer does."""
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens}
    # Some tokenizers do not call the marks of their own template special, as DeepSeek's.
    sides = ChatTemplate(tokenizer).marks.values()
    around = "\0".join(mark for side in sides for marks in side for mark in marks)
    special |= {token.content for token in added if token.content in around}
    exchanged = {}
    counts: dict[int, int] = {}
    for token in sorted(special - {*_OF_ANSWERS}):
        count = counts[len(token)] = counts.get(len(token), 0) + 1
        if len(token) < 3 or not token.strip() or count > len(_DIGITS) ** (len(token) - 2):
            continue
        digits = ""
        for _ in token[2:]:
            count, digit = divmod(count, len(_DIGITS))
            digits += _DIGITS[digit]
        code = f"{_BEGIN}{digits}{_END}"
        exchanged |= {token: code, code: token}
    tokens = sorted((one for one in exchanged if not one.startswith(_BEGIN)), key=len, reverse=True)
    both = [*tokens, *(exchanged[one] for one in tokens)]
    return _Codes(exchanged, _any_of(tokens), _any_of(both))


def _any_of(texts: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"\Z.")


@lru_cache(maxsize=2)
def _copy(backend: Any, exchanged: tuple[tuple[str, str], ...]) -> tuple[Any, frozenset[int]]:
    """Return a copy of a tokenizer whose special tokens are codes, and their ids."""
    from tokenizers import Tokenizer

    code_of = {token: code for token, code in exchanged if code.startswith(_BEGIN)}
    values = json.loads(backend.to_str())
    values["truncation"] = values["padding"] = None
    model = values["model"]
    # Characters that no other token has become the unknown token: of all texts, not of its own.
    unknown = model.get("unk_id")
    if model.get("unk_token") is not None:
        unknown = backend.token_to_id(model["unk_token"])
    special = set()
    for token in values["added_tokens"]:
        if token["content"] in code_of:
            special.add(token["id"])
            token["content"] = code_of[token["content"]]
    model["vocab"] = _renamed(model["vocab"], code_of)
    if "unk_token" in model:
        model["unk_token"] = code_of.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _mentions(merge, code_of)]
    return Tokenizer.from_str(json.dumps(values)), frozenset(special - {unknown})


def _renamed(vocabulary: Any, code_of: dict[str, str]) -> Any:
    """Return a model's vocabulary, in either of its forms, with codes for special tokens."""
    if isinstance(vocabulary, dict):
        return {code_of.get(token, token): number for token, number in vocabulary.items()}
    return [[code_of.get(token, token), score] for token, score in vocabulary]


def _mentions(merge: Any, code_of: dict[str, str]) -> bool:
    """Return whether a merge joins or makes a special token."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in code_of or right in code_of or left + right in code_of
