"""Turns of conversations, and what is trained on of a file of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ondevice.data import IGNORE, Dataset, encode, read_rows

Write = Callable[..., Path]
ASKED, ANSWERED = (
    {"role": "user", "content": "Name a fruit."},
    {"role": "assistant", "content": "Apple."},
)
AGAIN, PEAR = {"role": "user", "content": "Another?"}, {"role": "assistant", "content": "Pear."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}}}}}  # fmt: skip
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": {"town": "Ulm"}},
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abc123def", "name": "weather", "content": "rain"}


def read(
    write: Write, tokenizer: Any, *rows: dict[str, Any], limit: int = 9_999, **keys: Any
) -> Dataset:
    return encode(read_rows(write(list(rows))), tokenizer, max_length_tokens=limit, **keys)


def stretches(dataset: Dataset, tokenizer: Any) -> list[list[str]]:
    """Return the texts that are trained on, example by example."""
    texts = []
    for item in dataset.items:
        spans: list[list[int]] = []
        before = IGNORE
        for label in item.example.labels:
            if label != IGNORE:
                spans = [*spans, []] if before == IGNORE else spans
                spans[-1].append(label)
            before = label
        texts.append([tokenizer.decode(span) for span in spans])
    return texts


def whole(dataset: Dataset, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(item.example.ids) for item in dataset.items]


SYSTEM = {"role": "system", "content": "Be brief."}
