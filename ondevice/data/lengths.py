"""The maximum length that a file needs: a percentile of its rows, in tokens of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ondevice.data.batching import round_up
from ondevice.data.encode import Encoder
from ondevice.data.examples import Item
from ondevice.data.reading import Reading, about, each_row
from ondevice.data.rows import Rows

PERCENTILE = 99
WINDOW_TOKENS = 512
"""Longest window of running text: text is cut anywhere, so longer ones cost more and gain little."""

SAMPLE_ROWS = 2000
_CHARACTERS = 16 * WINDOW_TOKENS
_UNCUT = 1 << 30


@dataclass(frozen=True, slots=True)
class Length:
    """A maximum length in tokens, and a sentence that explains it."""

    tokens: int
    note: str


def length_of(
    read: Rows | Reading,
    tokenizer: Any,
    *,
    percentile: int = PERCENTILE,
    most_tokens: int | None = None,
) -> Length:
    """Find the smallest multiple of 8 that holds `percentile` percent of the rows uncut.

    Args:
        read: rows, or a file; up to 2000 rows, spread evenly, are tokenized.
        percentile: 1 to 100; with 100 all rows are tokenized.
        most_tokens: the model's own limit.

    Raises:
        DataError: as `encode`.
    """
    rows, count = about(read), sum(1 for _ in each_row(read))
    step = 1 if percentile == 100 else max(1, -(-count // SAMPLE_ROWS))
    encoder, lengths = None, []
    for row in islice(each_row(read), 0, None, step):
        if rows.format == "text":  # its beginning shows whether it is longer than a window
            row = replace(row, pairs=((row.pairs[0][0], row.pairs[0][1][:_CHARACTERS]),))
        encoder = encoder or Encoder(rows, row, tokenizer, max_length_tokens=_UNCUT)
        lengths += [one.longest for one in encoder.encoded(row) if isinstance(one, Item)]
    return choose(lengths, rows.format, step > 1, percentile, most_tokens)


def choose(
    lengths: Sequence[int],
    format_: str,
    sampled: bool,
    percentile: int = PERCENTILE,
    most_tokens: int | None = None,
) -> Length:
    """Choose the maximum length for rows of these lengths."""
    if not lengths:
        return Length(WINDOW_TOKENS, f"max length {WINDOW_TOKENS} tokens: no row could be measured")
    # A length that some row has, so that it holds the percentage that it promises.
    needed = int(np.percentile(lengths, percentile, method="inverted_cdf"))
    tokens = max(8, round_up(needed))
    why = f"holds {percentile}% of the rows, the longest has {max(lengths)}"
    if sampled:
        why = f"holds {percentile}% of {len(lengths)} rows spread over the file, "
        why += f"the longest of them has {max(lengths)}"
    if format_ == "text" and tokens > WINDOW_TOKENS:
        tokens = WINDOW_TOKENS
        why = "windows of running text"
    if most_tokens is not None and tokens > most_tokens:
        tokens = most_tokens
        why = f"the model's own limit; {percentile}% of the rows have up to {needed}"
    return Length(tokens, f"max length {tokens} tokens: {why}")
