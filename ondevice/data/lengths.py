"""The maximum length that a file needs: that of its longest row, in tokens of the model."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ondevice.data.batching import round_up
from ondevice.data.encode import Encoder
from ondevice.data.examples import Item
from ondevice.data.pictures import MOST_TOKENS
from ondevice.data.reading import Reading, about, each_row
from ondevice.data.rows import Row, Rows

PERCENTILE = 99
MOST_TIMES = 2
"""The longest row decides up to so many times the length that holds 99% of the rows."""

WINDOW_TOKENS = 512
"""Longest window of running text: text is cut anywhere, so longer ones cost more and gain little."""

SAMPLE_ROWS = 2000
LONG_ROWS = 32
"""Rows of a larger file that are tokenized in addition: those with the most characters."""

_CHARACTERS = 16 * WINDOW_TOKENS
_UNCUT = 1 << 30


@dataclass(frozen=True, slots=True)
class RowSizes:
    """What a plan's time needs of a file's rows.

    Attributes:
        tokens: of each row that was measured, ascending.
        labels: of a row, on average: tokens that are learned.
    """

    tokens: tuple[int, ...]
    labels: float

    def padded_to(self, rows: int, most: int) -> float:
        """Return the expected length that so many rows are padded to, at most `most`, in tokens."""
        share = (np.arange(len(self.tokens) + 1) / len(self.tokens)) ** rows
        return float(np.diff(share) @ [min(most, round_up(length)) for length in self.tokens])


@dataclass(frozen=True, slots=True)
class Length:
    """A maximum length in tokens, and a sentence that explains it.

    Attributes:
        shorter: the same if memory does not suffice for the longest row; None if there is no
            shorter one.
        sizes: of the rows to train on.
    """

    tokens: int
    note: str
    shorter: Length | None = None
    sizes: RowSizes | None = field(default=None, compare=False)


@dataclass(slots=True)
class Lengths:
    """Lengths of a file's rows, in tokens.

    Attributes:
        sample: of all rows, or of rows spread evenly over the file.
        long: of the rows with the most characters, if `sample` has not all.
        rows: in the file.
        trained: of the examples that are trained, of `sample`; `labels` are their labelled tokens.
    """

    sample: list[int] = field(default_factory=list)
    long: list[int] = field(default_factory=list)
    rows: int = 0
    trained: list[int] = field(default_factory=list)
    labels: int = 0

    @property
    def all(self) -> list[int]:
        """Every length that was measured."""
        return self.sample + self.long

    @property
    def sizes(self) -> RowSizes | None:
        """Return the sizes of the rows as they are trained; None if none was measured."""
        if not self.trained:
            return None
        return RowSizes(tuple(sorted(self.trained)), self.labels / len(self.trained))

    def percentile(self, percent: int) -> int:
        """Return a length that some row has, so that it holds the percentage that it promises."""
        return int(np.percentile(self.sample, percent, method="inverted_cdf"))


def length_of(
    read: Rows | Reading,
    tokenizer: Any,
    *,
    percentile: int = PERCENTILE,
    most_tokens: int | None = None,
    held_out: Rows | Reading | None = None,
) -> Length:
    """Find the smallest multiple of 8 that holds the longest row uncut.

    A row that is longer than twice what `percentile` percent need does not decide: it would make
    every plan larger.

    Args:
        read: rows, or a file; of up to 2000 rows, spread evenly, and of the 32 with the most
            characters the tokens are counted.
        percentile: 1 to 100; with 100 all rows are tokenized, and the longest always decides.
        most_tokens: the model's own limit.
        held_out: rows that are only evaluated, and not cut either.

    Raises:
        DataError: as `encode`.
    """
    measured = [_measure(read, tokenizer, percentile == 100)]
    if held_out is not None:
        measured.append(_measure(held_out, tokenizer, percentile == 100))
    chosen = choose(measured, about(read).format, percentile, most_tokens)
    return replace(chosen, sizes=measured[0].sizes)


def _measure(read: Rows | Reading, tokenizer: Any, every_row: bool) -> Lengths:
    rows = about(read)
    longest: list[tuple[int, int]] = []
    count = 0
    for count, row in enumerate(each_row(read), start=1):
        heapq.heappush(longest, (_characters(row), count - 1))
        if len(longest) > LONG_ROWS:
            heapq.heappop(longest)
    long = {index for _, index in longest}
    step = max(1, -(-count // SAMPLE_ROWS))
    if every_row:
        step = 1
    lengths = Lengths(rows=count)
    encoder = None
    for index, row in enumerate(each_row(read)):
        if index % step and (index not in long or rows.format == "text"):
            continue
        if rows.format == "text":  # its beginning shows whether it is longer than a window
            row = replace(row, pairs=((row.pairs[0][0], row.pairs[0][1][:_CHARACTERS]),))
        encoder = encoder or Encoder(rows, row, tokenizer, max_length_tokens=_UNCUT)
        items = [one for one in encoder.encoded(row) if isinstance(one, Item)]
        counts = [item.longest for item in items]
        if index % step:
            lengths.long += counts
        else:
            lengths.sample += counts
            lengths.trained += [len(item.example) for item in items]
            lengths.labels += sum(item.example.trained_tokens for item in items)
    return lengths


def _characters(row: Row) -> int:
    """Return how many characters a row has, roughly: of its longest pair, and of all its turns.

    A picture counts for more than any text.
    """
    if row.images:
        return MOST_TOKENS * len(row.images)
    pairs = max((len(prompt) + len(answer) for prompt, answer in row.pairs), default=0)
    return max(pairs, sum(len(str(turn)) for turn in row.messages or ()))


def choose(
    measured: Sequence[Lengths],
    format_: str,
    percentile: int = PERCENTILE,
    most_tokens: int | None = None,
) -> Length:
    """Choose the maximum length for files whose rows have these lengths."""
    measured = [lengths for lengths in measured if lengths.all]
    if not measured:
        return Length(WINDOW_TOKENS, f"max length {WINDOW_TOKENS} tokens: no row could be measured")
    lengths = [length for part in measured for length in part.all]
    longest = max(lengths)
    needed = max(part.percentile(percentile) for part in measured if part.sample)
    usual = max(8, round_up(needed))
    tokens = max(8, round_up(longest))
    why = f"the longest row has {longest}"
    if any(part.long for part in measured):
        why = f"the longest of the {len(lengths):,} rows that were measured has {longest}"
    if tokens > MOST_TIMES * usual:
        held = [length for length in lengths if round_up(length) <= MOST_TIMES * usual]
        tokens = max(8, round_up(max(held)))
        why = _of_most(percentile, needed, lengths, tokens)
    if format_ == "text" and tokens > WINDOW_TOKENS:
        return _within(WINDOW_TOKENS, "windows of running text", None, most_tokens, lengths)
    shorter = None
    if usual < tokens:
        reason = f"memory does not suffice for more; {_of_most(percentile, needed, lengths, usual)}"
        shorter = _within(usual, reason, None, most_tokens, lengths)
    return _within(tokens, why, shorter, most_tokens, lengths)


def _of_most(percentile: int, needed: int, lengths: Sequence[int], tokens: int) -> str:
    longer = sum(length > tokens for length in lengths)
    rows = "1 row is" if longer == 1 else f"{longer:,} rows are"
    return (
        f"{percentile}% of the rows have up to {needed}; {rows} longer, "
        f"up to {max(lengths)}, and cut or left out (--max-length {round_up(max(lengths))} keeps all)"
    )


def _within(
    tokens: int,
    why: str,
    shorter: Length | None,
    most_tokens: int | None,
    lengths: Sequence[int],
) -> Length:
    """Return the length, or the model's own limit if that is less."""
    if most_tokens is not None and tokens > most_tokens:
        tokens = most_tokens
        longer = sum(length > tokens for length in lengths)
        why = f"the model's own limit; {longer:,} of {len(lengths):,} rows are longer, "
        why += f"up to {max(lengths)}"
        if shorter is not None and shorter.tokens >= tokens:
            shorter = None
    return Length(tokens, f"max length {tokens} tokens: {why}", shorter)
