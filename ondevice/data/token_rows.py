"""Rows that are token ids already, as TRL, Axolotl and transformers prepare them: every column is obeyed, or refused by
name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.data.examples import Dataset, Example, Item, refuse_unread
from ondevice.data.readers.objects import NAME, Given
from ondevice.data.rows import BadRow, RowProblem, describe

MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Columns that are 1 at each token that is trained on."""

SAYS_NOTHING = ("length", "num_tokens")
"""What trainers sort by."""


def tokens(rows: Given, max_length_tokens: int | None, strict_columns: bool = False) -> Dataset:
    """Take rows of token ids as they are; one that is too long is left out, as nobody knows where its answer begins. A
    packed row is as many sequences as were packed.

    Raises:
        DataError: no row can be used, or a column is not read under `strict_columns`.
    """
    dataset = Dataset(format="text", notes=rows.notes)
    for line, record in enumerate(rows.records, 1):
        try:
            examples = list(_examples(record, max_length_tokens))
        except BadRow as bad:
            dataset.problems.append(RowProblem(NAME, line, bad.field, bad.reason))
            continue
        dataset.items += [Item(example, line=line) for example in examples]
        dataset.report.notes["rows that were packed, as the sequences in them"] += len(examples) > 1
        dataset.report.unread.update(
            key for key, value in record.items() if key not in READ and value is not None
        )
    if not dataset.items:
        raise DataError(
            f"no row can be trained on: {dataset.problems[0]}", received=f"{len(rows.records)} rows"
        )
    if strict_columns:
        refuse_unread(NAME, dataset.report)
    dataset.max_length_tokens = max_length_tokens or max(
        len(item.example) for item in dataset.items
    )
    return dataset


READ = {
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
    "seq_lengths",
    "token_type_ids",
    *MASKS,
    *SAYS_NOTHING,
}


def _examples(record: dict[str, Any], limit: int | None) -> Iterator[Example]:
    ids = _integers(record, "input_ids")
    labels = _labels(record, ids)
    parts = _parts(record, len(ids))
    for first, end in parts:
        if limit is not None and end - first > limit:
            raise BadRow("input_ids", f"has {end - first} tokens; at most {limit} fit")
        # A sequence's first token is predicted from nothing.
        if end - first > 1 and any(label != IGNORE for label in labels[first + 1 : end]):
            yield Example(tuple(ids[first:end]), tuple(labels[first:end]))
        elif len(parts) == 1:
            raise BadRow("labels", "there is no token to train on")


def _labels(record: dict[str, Any], ids: list[int]) -> list[int]:
    """Return a label for each token: those of the row, without what its masks leave out."""
    labels = (
        _integers(record, "labels", len(ids)) if record.get("labels") is not None else list(ids)
    )
    mask = record.get("attention_mask") or [1] * len(ids)
    for place, (label, token, there) in enumerate(zip(labels, ids, mask, strict=False)):
        if there and label not in (token, IGNORE):
            reason = f"expected token {token} or {IGNORE}, received {label}; "
            reason += "labels are not shifted, the model does that"
            raise BadRow(f"labels.{place}", reason)
    for name in MASKS:
        if record.get(name) is not None:
            flags = _flags(record, name, len(ids))
            labels = [label if flag else IGNORE for label, flag in zip(labels, flags, strict=True)]
    return labels


def _parts(record: dict[str, Any], count: int) -> list[tuple[int, int]]:
    """Return where the sequences of a row begin and end, without padding.

    Raises:
        BadRow: a mask with holes, or columns that name different sequences.
    """
    if (
        any(_integers(record, "token_type_ids", count))
        if record.get("token_type_ids") is not None
        else False
    ):
        raise BadRow("token_type_ids", "expected zeros: models here take no token types")
    numbers = (
        _integers(record, "attention_mask", count)
        if record.get("attention_mask") is not None
        else [1] * count
    )
    parts, place = [], 0
    for number, run in groupby(
        numbers
    ):  # 1 is a token and 0 padding; Axolotl numbers packed sequences from 1
        end = place + len(list(run))
        parts += [(place, end)] if number else []
        place = end
    named = [number for number, _ in groupby(numbers) if number]
    if len(set(named)) < len(named):
        raise BadRow(
            "attention_mask", "expected padding at the ends only, received zeros between tokens"
        )
    if not parts:
        raise BadRow("attention_mask", "expected a token that is not padding")
    if record.get("seq_lengths") is not None:
        lengths = _integers(record, "seq_lengths")
        if min(lengths, default=0) < 1 or sum(lengths) != parts[-1][1] - parts[0][0]:
            reason = f"expected lengths that add up to {parts[-1][1] - parts[0][0]} tokens, received {sum(lengths)}"
            raise BadRow("seq_lengths", reason)
        ends = list(accumulate(lengths, initial=parts[0][0]))
        parts = _same(parts, list(pairwise(ends)), "seq_lengths")
    if record.get("position_ids") is not None:
        parts = _same(
            parts, _restarts(_integers(record, "position_ids", count), parts), "position_ids"
        )
    return parts


def _restarts(positions: list[int], parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sequences that positions count: each begins at 0 and goes up by one."""
    first, end = parts[0][0], parts[-1][1]
    begins = [place for place in range(first, end) if positions[place] == 0]
    found = list(pairwise([*begins, end]))
    if (
        not begins
        or begins[0] != first
        or any(positions[b:e] != list(range(e - b)) for b, e in found)
    ):
        raise BadRow(
            "position_ids",
            "expected positions that count from 0, and again from 0 where a packed row begins",
        )
    return found


def _same(
    parts: list[tuple[int, int]], found: list[tuple[int, int]], name: str
) -> list[tuple[int, int]]:
    if len(parts) > 1 and parts != found:
        raise BadRow(name, "names other sequences than the row's other columns")
    return found


def _flags(record: dict[str, Any], name: str, count: int) -> list[int]:
    flags = _integers(record, name, count)
    if not set(flags) <= {0, 1}:
        raise BadRow(name, "expected zeros and ones")
    return flags


def _integers(record: dict[str, Any], name: str, count: int | None = None) -> list[int]:
    values = record[name]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        shown = (
            describe(values[0]) + " in it"
            if isinstance(values, list) and values
            else describe(values)
        )
        raise BadRow(name, f"expected a list of integers, received {shown}")
    if count is not None and len(values) != count:
        raise BadRow(name, f"expected {count} numbers, one a token; received {len(values)}")
    return values
