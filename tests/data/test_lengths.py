"""The length of sequences comes from the rows, and the sentence that says it is true."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice.data import Row, Rows, encode, length_of
from ondevice.data.lengths import SAMPLE_ROWS, WINDOW_TOKENS, Lengths, choose


def completions(*sizes: int) -> Rows:
    return Rows(
        "f",
        "completion",
        [Row(number, (("a", " great" * size),)) for number, size in enumerate(sizes, 1)],
    )


def test_the_longest_row_decides_if_that_costs_few_tokens(tokenizer: Any) -> None:
    """Not 192 tokens if the longest of 700 conversations has 212: four were left out."""
    rows = completions(*[100] * 600, *[188] * 95, 195, 200, 205, 208, 210)
    length = length_of(rows, tokenizer)
    dataset = encode(rows, tokenizer, max_length_tokens=length.tokens)
    assert (len(dataset.items), dataset.too_long_tokens, dataset.truncated) == (700, [], 0)
    assert (length.tokens, length.note) == (216, "max length 216 tokens: the longest row has 212")
    assert length.shorter is not None and length.shorter.tokens == 192
    assert (
        "memory does not suffice" in length.shorter.note
        and "5 rows are longer" in length.shorter.note
    )


def test_a_row_of_more_than_twice_the_usual_length_does_not_decide(tokenizer: Any) -> None:
    rows = completions(*[1] * 150, *[20] * 47, 30, 44, 70)
    length = length_of(rows, tokenizer)
    dataset = encode(rows, tokenizer, max_length_tokens=length.tokens, allow_empty=True)
    assert len(dataset.items) == 199 and dataset.too_long_tokens == [72]
    assert (length.tokens, length.note) == (
        48,
        "max length 48 tokens: 99% of the rows have up to 32; 1 row is longer, up to 72, "
        "and cut or left out (--max-length 72 keeps all)",
    )
    assert length_of(rows, tokenizer, percentile=100).tokens == 72
    capped = length_of(rows, tokenizer, percentile=100, most_tokens=40)
    assert (capped.tokens, capped.note) == (
        40,
        "max length 40 tokens: the model's own limit; 2 of 200 rows are longer, up to 72",
    )


def test_held_out_rows_are_not_cut_either(tokenizer: Any) -> None:
    """60 rows to evaluate, 56 of them longer than every row to train on."""
    rows = completions(*[10] * 200)
    held_out = completions(*[10] * 4, *range(100, 156))
    assert length_of(rows, tokenizer).tokens == 16
    length = length_of(rows, tokenizer, held_out=held_out)
    dataset = encode(held_out, tokenizer, max_length_tokens=length.tokens)
    assert (len(dataset.items), dataset.truncated, length.tokens) == (60, 0, 160)


def test_candidates_count_by_their_longest(tokenizer: Any) -> None:
    rows = Rows(
        "f", "classification", [Row(1, (("a", " great"), ("a", " great" * 30)), 0, end=False)]
    )
    assert length_of(rows, tokenizer).tokens == 32


def test_running_text_has_windows(tokenizer: Any) -> None:
    long = Rows("f", "text", [Row(1, (("", " great" * 20_000),), end=False)])
    assert length_of(long, tokenizer) == choose([Lengths([9999], rows=1)], "text")
    assert length_of(long, tokenizer).tokens == WINDOW_TOKENS
    short = Rows("f", "text", [Row(1, (("", " great" * 20),))])
    assert length_of(short, tokenizer).tokens == 24


def test_of_a_large_file_the_longest_row_is_measured_too(tokenizer: Any) -> None:
    sizes = [20] * (SAMPLE_ROWS + 102)
    sizes[1001] = 31  # between two rows of the sample
    length = length_of(completions(*sizes), tokenizer)
    assert length.tokens == 40
    assert length.note.endswith("rows that were measured has 33")


@pytest.mark.parametrize(("lengths", "tokens"), [([], WINDOW_TOKENS), ([1], 8), ([8, 9], 16)])
def test_the_length_is_a_multiple_of_eight(lengths: list[int], tokens: int) -> None:
    assert choose([Lengths(lengths)], "completion").tokens == tokens
