"""Seeded damage to messages: fields that are missing, doubled, of another type, too long, or changed in a few bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 70, -(1 << 70), 0.5, float("nan"), float("inf"), "", "x" * 5000, b"", b"\xff" * 9, [], [[]],
    [b"", 3], {}, {"a": {}}, b"{}", b"[]", b"null", b'{"stage": 3}', b"[" * 3000, b'{"a":' * 1500, "\ud800",
)  # fmt: skip


def damaged(data: bytes, draw: np.random.Generator) -> bytes:
    """Change, cut, lengthen or repeat a few bytes."""
    kind, at = int(draw.integers(5)), int(draw.integers(len(data) + 1))
    if kind == 0 or not data:
        return data[:at]
    if kind == 1:
        return data + draw.bytes(int(draw.integers(1, 40)))
    if kind == 2:
        return data[:at] + draw.bytes(int(draw.integers(1, 9))) + data[at:]
    changed = bytearray(data)
    for place in draw.integers(len(data), size=int(draw.integers(1, 4))):
        changed[place] = (
            int(draw.integers(256)) if kind == 3 else changed[place] ^ (1 << int(draw.integers(8)))
        )
    return bytes(changed)


def mutated(
    message: dict[str, Any], draw: np.random.Generator, word: str = "odd"
) -> dict[str, Any]:
    """Return a message with none, one or two things wrong; `word` is what new fields are called and hold."""
    message = dict(message)
    for _ in range(int(draw.integers(0, 3))):
        if not message:
            break
        key = list(message)[int(draw.integers(len(message)))]
        value = message[key]
        kind = int(draw.integers(8))
        if kind == 0:
            del message[key]
        elif kind == 1:
            message[word] = word
        elif kind == 2:
            message[key] = ODD[int(draw.integers(len(ODD)))]
        elif kind == 3 and isinstance(value, bytes):
            message[key] = value.replace(b"sst2", word.encode())
        elif kind <= 5 and isinstance(value, bytes):
            message[key] = in_json(value, draw, word) or damaged(value, draw)
        elif isinstance(value, bytes):
            message[key] = damaged(value, draw)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            message[key] = value + (1, -1, 0.5, 1 << 40, -(1 << 40))[int(draw.integers(5))]
        else:
            message[key] = ODD[int(draw.integers(len(ODD)))]
    return message


def in_json(data: bytes, draw: np.random.Generator, word: str) -> bytes | None:
    """Return JSON with one of its values, at any depth, changed; None if it is no object."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not values:
        return None
    inside = values
    while True:
        key = list(inside)[int(draw.integers(len(inside)))]
        if isinstance(inside[key], dict) and inside[key] and draw.random() < 0.7:
            inside = inside[key]
            continue
        kind = int(draw.integers(5))
        if kind == 0:
            del inside[key]
        elif kind == 1:
            inside[word] = inside[key]
        elif kind == 2:
            inside[key] = word
        elif kind == 3:
            inside[key] = [inside[key]]
        else:
            inside[key] = (None, True, -1, 1 << 70, 1e308, "", [], {}, "=" * 90)[
                int(draw.integers(9))
            ]
        return json.dumps(values).encode()
