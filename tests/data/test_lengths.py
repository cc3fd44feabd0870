"""The length of sequences comes from the rows, and the sentence that says it is true."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice.data import Row, Rows, encode, length_of
from ondevice.data.lengths import SAMPLE_ROWS, WINDOW_TOKENS, choose


def completions(*sizes: int) -> Rows:
    return Rows(
        "f",
        "completion",
        [Row(number, (("a", " great" * size),)) for number, size in enumerate(sizes, 1)],
    )


def test_the_suggested_length_holds_the_promised_percentage(tokenizer: Any) -> None:
    rows = completions(*[1] * 90, *[20] * 9, 60)
    length = length_of(rows, tokenizer)
    dataset = encode(rows, tokenizer, max_length_tokens=length.tokens, allow_empty=True)
    assert len(dataset.items) == 99 and dataset.too_long_tokens == [62]
    assert (length.tokens, length.note) == (
        24,
        "max length 24 tokens: holds 99% of the rows, the longest has 62",
    )
    assert length_of(rows, tokenizer, percentile=100).tokens == 64
    capped = length_of(rows, tokenizer, percentile=100, most_tokens=40)
    assert (capped.tokens, "the model's own limit" in capped.note) == (40, True)


def test_candidates_count_by_their_longest(tokenizer: Any) -> None:
    rows = Rows(
        "f", "classification", [Row(1, (("a", " great"), ("a", " great" * 30)), 0, end=False)]
    )
    assert length_of(rows, tokenizer).tokens == 32


def test_running_text_has_windows(tokenizer: Any) -> None:
    long = Rows("f", "text", [Row(1, (("", " great" * 20_000),), end=False)])
    assert length_of(long, tokenizer) == choose([9999], "text", False)
    assert length_of(long, tokenizer).tokens == WINDOW_TOKENS
    short = Rows("f", "text", [Row(1, (("", " great" * 20),))])
    assert length_of(short, tokenizer).tokens == 24


def test_many_rows_are_sampled_over_the_whole_file(tokenizer: Any) -> None:
    rows = completions(*[1] * SAMPLE_ROWS, *[30] * 101)
    length = length_of(rows, tokenizer)
    assert length.tokens == 32 and "1051 rows spread over the file" in length.note


@pytest.mark.parametrize(("lengths", "tokens"), [([], WINDOW_TOKENS), ([1], 8), ([8, 9], 16)])
def test_the_length_is_a_multiple_of_eight(lengths: list[int], tokens: int) -> None:
    assert choose(lengths, "completion", False).tokens == tokens
