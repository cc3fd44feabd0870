"""Digests of encoded rows, and of the chat template and the tokenizer that encoded them."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from typing import Any

from ondevice.data.examples import Item


def rows_sha256(items: Iterable[Item]) -> str:
    """Hash rows in their order: ids, labels, candidates and answers."""
    digest = hashlib.sha256()
    for item in items:
        for example in (item.example, *item.candidates):
            digest.update(f"{len(example)} ".encode())
            digest.update(array("q", example.ids))
            digest.update(array("q", example.labels))
        digest.update(f"{item.gold} {item.value} {item.answers!r}\n".encode())
    return digest.hexdigest()


def template_sha256(tokenizer: Any) -> str:
    """Hash the chat template, or all of them if there are several; `none` without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return "none"
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash what turns text into ids: vocabulary, merges, normaliser, added and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    else:
        # The part before holds the last call's truncation and padding, which do not belong here.
        text = backend.to_str()
        text = text[text.index('"added_tokens"') :]
    special = getattr(tokenizer, "special_tokens_map", {})
    # Padding is never trained on.
    marks = {name: str(value) for name, value in special.items() if name != "pad_token"}
    return hashlib.sha256(f"{text}\n{json.dumps(marks, sort_keys=True)}".encode()).hexdigest()
