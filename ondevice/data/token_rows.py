"""Rows that are already token ids, as TRL, Axolotl and transformers prepare them.

Every column is either obeyed or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.data.examples import Dataset, Example, Item, refuse_unread
from ondevice.data.readers.objects import NAME, PythonRows
from ondevice.data.rows import BadRow, RowProblem, describe

MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Columns that are 1 at each token that is trained on."""
READ = {
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
    "seq_lengths",
    "token_type_ids",
    "length",  # trainers sort by these two
    "num_tokens",
    *MASKS,
}

Range = tuple[int, int]
"""The first token of a sequence, and the one after its last."""


def tokens(
    rows: PythonRows, max_length_tokens: int | None, strict_columns: bool = False
) -> Dataset:
    """Take rows of token ids as they are; a packed row becomes as many sequences as it holds.

    A row that is too long is left out, because nobody knows where its answer begins.

    Raises:
        DataError: no row can be used, or a column is not read under `strict_columns`.
    """
    dataset = Dataset(format="text", notes=rows.notes)
    report = dataset.report
    for line, record in enumerate(rows.records, 1):
        try:
            examples = list(_examples(record, max_length_tokens))
        except BadRow as bad:
            dataset.problems.append(RowProblem(NAME, line, bad.field, bad.reason))
            continue
        dataset.items += [Item(example, line=line) for example in examples]
        report.notes["rows that were packed, as the sequences in them"] += len(examples) > 1
        report.unread.update(key for key in record if key not in READ and record[key] is not None)
    if not dataset.items:
        reason = f"no row can be trained on: {dataset.problems[0]}"
        raise DataError(reason, received=f"{len(rows.records)} rows")
    if strict_columns:
        refuse_unread(NAME, report)
    longest = max(len(item.example) for item in dataset.items)
    dataset.max_length_tokens = max_length_tokens or longest
    return dataset


def _examples(record: dict[str, Any], limit: int | None) -> Iterator[Example]:
    ids = _integers(record, "input_ids")
    labels = _labels(record, ids)
    ranges = _ranges(record, len(ids))
    for first, end in ranges:
        if limit is not None and end - first > limit:
            raise BadRow("input_ids", f"has {end - first} tokens; at most {limit} fit")
        # Nothing predicts a sequence's first token.
        if any(label != IGNORE for label in labels[first + 1 : end]):
            yield Example(tuple(ids[first:end]), tuple(labels[first:end]))
        elif len(ranges) == 1:
            raise BadRow("labels", "there is no token to train on")


def _labels(record: dict[str, Any], ids: list[int]) -> list[int]:
    """Return a label for each token: those of the row, without what its masks leave out."""
    labels = list(ids)
    if record.get("labels") is not None:
        labels = _integers(record, "labels", len(ids))
    mask = record.get("attention_mask") or [1] * len(ids)
    for position, (label, token, used) in enumerate(zip(labels, ids, mask, strict=False)):
        if used and label not in (token, IGNORE):
            reason = f"expected token {token} or {IGNORE}, received {label}; "
            reason += "labels are not shifted, the model does that"
            raise BadRow(f"labels.{position}", reason)
    for name in MASKS:
        if record.get(name) is None:
            continue
        flags = _integers(record, name, len(ids))
        if not set(flags) <= {0, 1}:
            raise BadRow(name, "expected zeros and ones")
        labels = [label if flag else IGNORE for label, flag in zip(labels, flags, strict=True)]
    return labels


def _ranges(record: dict[str, Any], count: int) -> list[Range]:
    """Return the range of each sequence of a row, without padding.

    Raises:
        BadRow: a mask has holes, or columns name different sequences.
    """
    types = record.get("token_type_ids")
    if types is not None and any(_integers(record, "token_type_ids", count)):
        raise BadRow("token_type_ids", "expected zeros: models here take no token types")
    numbers = [1] * count
    if record.get("attention_mask") is not None:
        numbers = _integers(record, "attention_mask", count)
    # 1 is a token and 0 padding; Axolotl numbers packed sequences from 1.
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    ends = list(accumulate((length for _, length in runs), initial=0))
    used = [number for number, _ in runs if number]
    ranges = [pair for (number, _), pair in zip(runs, pairwise(ends), strict=True) if number]
    if len(set(used)) < len(used):
        reason = "expected padding at the ends only, received zeros between tokens"
        raise BadRow("attention_mask", reason)
    if not ranges:
        raise BadRow("attention_mask", "expected a token that is not padding")
    if record.get("seq_lengths") is not None:
        lengths = _integers(record, "seq_lengths")
        total = ranges[-1][1] - ranges[0][0]
        if min(lengths, default=0) < 1 or sum(lengths) != total:
            reason = f"expected lengths that add up to {total} tokens, received {sum(lengths)}"
            raise BadRow("seq_lengths", reason)
        ends = list(accumulate(lengths, initial=ranges[0][0]))
        ranges = _same(ranges, list(pairwise(ends)), "seq_lengths")
    if record.get("position_ids") is not None:
        counted = _restarts(_integers(record, "position_ids", count), ranges)
        ranges = _same(ranges, counted, "position_ids")
    return ranges


def _restarts(positions: list[int], ranges: list[Range]) -> list[Range]:
    """Return the sequences that positions count: each begins at 0 and goes up by one."""
    first, end = ranges[0][0], ranges[-1][1]
    begins = [index for index in range(first, end) if positions[index] == 0]
    counted = list(pairwise([*begins, end]))
    is_counting = all(positions[b:e] == list(range(e - b)) for b, e in counted)
    if begins[:1] != [first] or not is_counting:
        reason = "expected positions that count from 0, and again from 0 at each packed row"
        raise BadRow("position_ids", reason)
    return counted


def _same(ranges: list[Range], named: list[Range], column: str) -> list[Range]:
    if len(ranges) > 1 and ranges != named:
        raise BadRow(column, "names other sequences than the row's other columns")
    return named


def _integers(record: dict[str, Any], name: str, count: int | None = None) -> list[int]:
    values = record[name]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        received = describe(values)
        if isinstance(values, list) and values:
            received = describe(values[0]) + " in it"
        raise BadRow(name, f"expected a list of integers, received {received}")
    if count is not None and len(values) != count:
        raise BadRow(name, f"expected {count} numbers, one a token; received {len(values)}")
    return values
