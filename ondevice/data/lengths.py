"""How long sequences have to be for a file: a percentile of its rows, in tokens of the model's own tokenizer."""

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
"""The most that a window of running text has: text is cut anywhere, so that longer windows cost and gain little."""

SAMPLE_ROWS = 2000
_CHARACTERS = 16 * WINDOW_TOKENS
_UNCUT = 1 << 30


@dataclass(frozen=True, slots=True)
class Length:
    """A maximum length in tokens, and the sentence that says where it is from."""

    tokens: int
    said: str


def length_of(
    read: Rows | Reading,
    tokenizer: Any,
    *,
    percentile: int = PERCENTILE,
    most_tokens: int | None = None,
) -> Length:
    """Find the smallest multiple of 8 that holds `percentile` percent of the rows uncut.

    Args:
        read: the rows, or the file that has them; of many rows, up to 2000 spread evenly are tokenized.
        percentile: 1 to 100; with 100 all rows are tokenized.
        most_tokens: the model's own limit.

    Raises:
        DataError: as `encode`.
    """
    rows, count = about(read), sum(1 for _ in each_row(read))
    step = 1 if percentile == 100 else max(1, -(-count // SAMPLE_ROWS))
    encoder, lengths = None, []
    for row in islice(each_row(read), 0, None, step):
        if rows.format == "text":  # the beginning of a text says whether it is longer than a window
            row = replace(row, pairs=((row.pairs[0][0], row.pairs[0][1][:_CHARACTERS]),))
        encoder = encoder or Encoder(rows, row, tokenizer, max_length_tokens=_UNCUT)
        items = [one for one in encoder.encoded(row) if isinstance(one, Item)]
        lengths += [
            max(len(example) for example in (item.example, *item.candidates)) for item in items
        ]
    return choose(lengths, rows.format, step > 1, percentile, most_tokens)


def choose(
    lengths: Sequence[int],
    format_: str,
    sampled: bool,
    percentile: int = PERCENTILE,
    most_tokens: int | None = None,
) -> Length:
    """Choose the length for rows of these lengths."""
    if not lengths:
        return Length(WINDOW_TOKENS, f"max length {WINDOW_TOKENS} tokens: no row could be measured")
    # The least length that some row has and that holds the share that it promises.
    held = int(np.percentile(lengths, percentile, method="inverted_cdf"))
    tokens, why = (
        max(8, round_up(held)),
        f"holds {percentile}% of the rows, the longest has {max(lengths)}",
    )
    if sampled:
        why = f"holds {percentile}% of {len(lengths)} rows spread over the file, the longest of them has {max(lengths)}"
    if format_ == "text" and tokens > WINDOW_TOKENS:
        tokens, why = WINDOW_TOKENS, "windows of running text"
    if most_tokens is not None and tokens > most_tokens:
        tokens, why = (
            most_tokens,
            f"the model takes no more; {percentile}% of the rows have up to {held}",
        )
    return Length(tokens, f"max length {tokens} tokens: {why}")
