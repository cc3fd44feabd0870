"""How long sequences have to be for a file: a percentile of its rows, in tokens of the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ondevice.data.batching import round_up
from ondevice.data.encode import encode
from ondevice.data.rows import Rows

PERCENTILE = 99
WINDOW_TOKENS = 512
"""The most that a window of running text has: text is cut anywhere, so that longer windows cost and gain little."""

SAMPLE_ROWS = 2000
_CHARACTERS = 16 * WINDOW_TOKENS
_UNCUT = 1 << 30


@dataclass(frozen=True, slots=True)
class Length:
    """A maximum length in tokens, and the sentence that says where it is from."""

    tokens: int
    said: str


def length_of(rows: Rows, tokenizer: Any, *, percentile: int = PERCENTILE, most_tokens: int | None = None) -> Length:
    """Find the smallest multiple of 8 that holds `percentile` percent of the rows uncut.

    Args:
        rows: from `read_rows`; of many rows, up to 2000 spread evenly are tokenized.
        percentile: 1 to 100; with 100 all rows are tokenized.
        most_tokens: the model's own limit.

    Raises:
        DataError: as `encode`.
    """
    items = rows.items if percentile == 100 else rows.items[:: -(-len(rows.items) // SAMPLE_ROWS) or 1]
    if rows.format == "text":  # the beginning of a text says whether it is longer than a window
        items = [replace(row, pairs=((row.pairs[0][0], row.pairs[0][1][:_CHARACTERS]),)) for row in items]
    sample = replace(rows, items=items, problems=[])
    dataset = encode(sample, tokenizer, max_length_tokens=_UNCUT, allow_empty=True)
    lengths = [max(len(example) for example in (item.example, *item.candidates)) for item in dataset.items]
    return choose(lengths, rows.format, len(items) < len(rows.items), percentile, most_tokens)


def choose(
    lengths: Sequence[int], format_: str, sampled: bool, percentile: int = PERCENTILE, most_tokens: int | None = None
) -> Length:
    """Choose the length for rows of these lengths."""
    if not lengths:
        return Length(WINDOW_TOKENS, f"max length {WINDOW_TOKENS} tokens: no row could be measured")
    # The least length that some row has and that holds the share that it promises.
    held = int(np.percentile(lengths, percentile, method="inverted_cdf"))
    tokens, why = max(8, round_up(held)), f"holds {percentile}% of the rows, the longest has {max(lengths)}"
    if sampled:
        why = f"holds {percentile}% of {len(lengths)} rows spread over the file, the longest of them has {max(lengths)}"
    if format_ == "text" and tokens > WINDOW_TOKENS:
        tokens, why = WINDOW_TOKENS, "windows of running text"
    if most_tokens is not None and tokens > most_tokens:
        tokens, why = most_tokens, f"the model takes no more; {percentile}% of the rows have up to {held}"
    return Length(tokens, f"max length {tokens} tokens: {why}")
