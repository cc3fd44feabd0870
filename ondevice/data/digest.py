"""Digests of what rows become: token ids and labels as they are trained, and the template and tokenizer behind them."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from typing import Any

from ondevice.data.examples import Item


def rows_sha256(items: Iterable[Item]) -> str:
    """Hash rows as they are trained on and evaluated: ids, labels, candidates, answers and their order."""
    digest = hashlib.sha256()
    for item in items:
        for example in (item.example, *item.candidates):
            digest.update(f"{len(example)} ".encode())
            digest.update(array("q", example.ids))
            digest.update(array("q", example.labels))
        digest.update(f"{item.gold} {item.value} {item.answers!r}\n".encode())
    return digest.hexdigest()


def template_sha256(tokenizer: Any) -> str:
    """Hash the chat template, or all of them where there are several; `none` without one."""
    template = getattr(tokenizer, "chat_template", None)
    return (
        "none"
        if not template
        else hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
    )


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash what turns text into ids: vocabulary, merges, normaliser, added and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    else:
        # In front of it there is how the last call truncated and padded, which is not a part of the tokenizer.
        text = backend.to_str()
        text = text[text.index('"added_tokens"') :]
    marks = {
        name: str(value) for name, value in getattr(tokenizer, "special_tokens_map", {}).items()
    }
    marks.pop("pad_token", None)  # padding is never trained on
    return hashlib.sha256(f"{text}\n{json.dumps(marks, sort_keys=True)}".encode()).hexdigest()
