"""Batches as a pure function of the seed and the step, so that a resume needs only the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ondevice.core.errors import ConfigError, DataError
from ondevice.core.session import IGNORE
from ondevice.data.examples import Dataset, Example, Item, Report

ROUND_TO_TOKENS = 8
SORTED_STEPS = 32
"""Steps whose rows are sorted together by length, if rows are grouped."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` and `labels`, int64 [B, T], padded on the right; labels are -100 for untrained tokens.

    Attributes:
        position_ids: int64 [B, T] if a sequence has several rows: each token's position in its row,
            counted from 0; 0 for padding. None if a sequence is a row.
        rows_of_data: of preferences, the numbers of the rows, each with two sequences; else None.
    """

    ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None
    rows_of_data: tuple[int, ...] | None = None

    def rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids and labels of each row that is trained on, int64 [length].

        A row that is not packed comes with its padding.
        """
        for number, (ids, labels) in enumerate(zip(self.ids, self.labels, strict=True)):
            if self.position_ids is None:
                yield ids, labels
                continue
            begins = np.flatnonzero(self.position_ids[number] == 0).tolist()
            for first, end in zip(begins, [*begins[1:], len(ids)], strict=True):
                if (labels[first:end] != IGNORE).any():
                    yield ids[first:end], labels[first:end]


class Batches:
    """Endless batches of constant size in an order that is new every epoch.

    Row p of the run (p = step * batch_size + index in the batch) is row p mod n of epoch p div n,
    so the batch that crosses the end of an epoch is filled from the next epoch's order. An epoch's
    order is the stable argsort of n raw words of numpy's PCG64 seeded with (seed, epoch): numpy
    promises never to change raw words and seeding between versions.

    Args:
        dataset: the encoded rows; their training examples are batched.
        batch_size: rows of a batch (B).
        lengths_tokens: the padded lengths (T) that the program was built for; the smallest that
            holds the longest row of a batch is taken. None pads to the longest row, rounded up to a
            multiple of 8.
        seed: seeds the order, 0 or above.
        pad_id: the id of padding.
        packing: put the rows of a step into as few sequences as hold them; a step's rows stay the
            same.
        group_by_length: give a step rows of about one length. An epoch's order is cut into pieces
            of `SORTED_STEPS` steps, and the rows of each are sorted by length; its steps then come
            in the order in which the first of their rows came before. A step that two epochs share
            has the rows that it has without grouping.

    Raises:
        ConfigError: a size is not positive, the seed is negative, or a row is longer than the
            largest length.
        DataError: the data set is empty.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        lengths_tokens: Sequence[int] | None,
        seed: int,
        pad_id: int,
        packing: bool = False,
        group_by_length: bool = False,
    ) -> None:
        self._examples = [item.example for item in dataset.items]
        self.batch_size = batch_size
        self.lengths_tokens = None if lengths_tokens is None else tuple(sorted(lengths_tokens))
        self.seed = seed
        self.pad_id = pad_id
        self.packing = packing
        self.group_by_length = group_by_length
        self._orders: dict[int, np.ndarray] = {}
        if not self._examples:
            raise DataError(
                "there are no rows to make batches of", expected="one row or more", received="none"
            )
        if batch_size < 1 or seed < 0:
            raise ConfigError(
                "batch_size or seed is out of range",
                expected="batch_size >= 1, seed >= 0",
                received=f"batch_size={batch_size}, seed={seed}",
            )
        if packing and lengths_tokens is not None:
            raise ConfigError(
                "an exported program takes one row in a sequence",
                expected="data.packing: false",
                received="data.packing: true",
                hint="leave --packing out",
            )
        longest = max(len(example) for example in self._examples)
        if self.lengths_tokens is not None and longest > max(self.lengths_tokens, default=0):
            largest = max(self.lengths_tokens, default=0)
            raise ConfigError(
                "a row is longer than the program's largest length",
                expected=f"a length among {self.lengths_tokens}",
                received=longest,
                hint=f"encode the data with max_length_tokens={largest}",
            )
        self._room = max(dataset.max_length_tokens, longest)

    @property
    def rows(self) -> int:
        """Rows of the data set."""
        return len(self._examples)

    @property
    def steps_per_epoch(self) -> float:
        """Batches in which every row is seen once; a fraction if epochs share a batch."""
        return len(self._examples) / self.batch_size

    def rows_at(self, step: int) -> tuple[int, ...]:
        """Return the indices into `dataset.items` of the rows of a step, counted from 0."""
        if step < 0:
            raise ConfigError("steps are counted from 0", expected="0 or above", received=step)
        count = len(self._examples)
        first = step * self.batch_size
        rows = (divmod(number, count) for number in range(first, first + self.batch_size))
        return tuple(int(self._order(epoch)[index]) for epoch, index in rows)

    def at(self, step: int) -> Batch:
        """Return a step's batch: int64 [batch_size, length], or fewer sequences with more rows."""
        examples = [self._examples[row] for row in self.rows_at(step)]
        room = self._room if self.packing else None
        return collate(examples, self.lengths_tokens, self.pad_id, room)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
            words = bits.random_raw(len(self._examples))
            # A batch needs at most two orders; more of them would grow with the run.
            for other in [other for other in self._orders if abs(other - epoch) > 1]:
                del self._orders[other]
            order = np.argsort(words, kind="stable")
            self._orders[epoch] = self._grouped(order, epoch) if self.group_by_length else order
        return self._orders[epoch]

    def _grouped(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """Return an epoch's rows with those of about one length in a step."""
        size, count = self.batch_size, len(order)
        first = -epoch * count % size  # rows that fill up the step of the epoch before
        end = first + max(0, count - first) // size * size
        lengths = np.array([len(example) for example in self._examples])
        pieces = [order[:first]]
        for start in range(first, end, SORTED_STEPS * size):
            rows = order[start : min(end, start + SORTED_STEPS * size)]
            places = np.argsort(lengths[rows], kind="stable").reshape(-1, size)
            steps = np.argsort(places.min(1))
            pieces.append(rows[places[steps]].reshape(-1))
        return np.concatenate([*pieces, order[end:]])


def round_up(length_tokens: int) -> int:
    """Round up to the next multiple of `ROUND_TO_TOKENS`."""
    return -(-length_tokens // ROUND_TO_TOKENS) * ROUND_TO_TOKENS


def collate(
    examples: Sequence[Example],
    lengths_tokens: Sequence[int] | None,
    pad_id: int,
    room_tokens: int | None = None,
) -> Batch:
    """Make a batch of examples.

    With `room_tokens`, the longest sequence, it is packed. Otherwise it is padded to the smallest
    of `lengths_tokens` (ascending) that is long enough, or to a multiple of 8.
    """
    if room_tokens is not None:
        return pack_examples(examples, room_tokens, pad_id)
    longest = max(len(example) for example in examples)
    if lengths_tokens is None:
        length = round_up(longest)
    else:
        length = next(length for length in lengths_tokens if length >= longest)
    return pad_examples(examples, length, pad_id)


def pad_examples(examples: Sequence[Example], length_tokens: int, pad_id: int) -> Batch:
    """Stack examples to one batch of `length_tokens` columns, padded on the right.

    Raises:
        ConfigError: an example is longer than `length_tokens`.
    """
    longest = max((len(example) for example in examples), default=0)
    if longest > length_tokens:
        raise ConfigError(
            "an example does not fit into the batch",
            expected=f"at most {length_tokens} tokens",
            received=longest,
        )
    ids = np.full((len(examples), length_tokens), pad_id, dtype=np.int64)
    labels = np.full((len(examples), length_tokens), IGNORE, dtype=np.int64)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = example.ids
        labels[row, : len(example)] = example.labels
    return Batch(ids, labels)


def pack_examples(examples: Sequence[Example], room_tokens: int, pad_id: int) -> Batch:
    """Put rows into as few sequences as first-fit decreasing needs.

    A sequence has at most `room_tokens` or one row. The label at a row's first token becomes -100,
    because the token before it belongs to another row.
    """
    sequences: list[tuple[int, list[Example]]] = []
    for example in sorted(examples, key=len, reverse=True):  # stable: equal rows stay in order
        for number, (used, packed) in enumerate(sequences):
            if used + len(example) <= room_tokens:
                sequences[number] = used + len(example), [*packed, example]
                break
        else:
            sequences.append((len(example), [example]))
    length = round_up(max(used for used, _ in sequences))
    ids = np.full((len(sequences), length), pad_id, dtype=np.int64)
    labels = np.full((len(sequences), length), IGNORE, dtype=np.int64)
    position_ids = np.zeros((len(sequences), length), dtype=np.int64)
    for number, (_, packed) in enumerate(sequences):
        first = 0
        for example in packed:
            end = first + len(example)
            ids[number, first:end] = example.ids
            labels[number, first + 1 : end] = example.labels[1:]
            position_ids[number, first:end] = np.arange(end - first)
            first = end
    return Batch(ids, labels, position_ids)


def split_rows(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a data set into rows to train on and held-out rows, both in the order of the file.

    The held-out rows are the first of the stable argsort of n raw words of numpy's PCG64 seeded
    with (seed, 0, 1), which is not an epoch's order; the Android app draws the same ones. Windows that
    begin on one line of the file stay together. Problems stay with the rows to train on.

    Args:
        fraction: of the rows to hold out, above 0 and below 1; either side gets at least one row.
        seed: of the run, 0 or above.

    Raises:
        DataError: there is only one row.
    """
    lines = [(item.file, item.line) for item in dataset.items]
    numbers = {line: number for number, line in enumerate(dict.fromkeys(lines))}
    count = len(numbers)
    if count < 2:
        raise DataError(
            "there are too few rows to split", expected="two rows or more", received=count
        )
    size = min(max(1, round(count * fraction)), count - 1)
    words = np.random.PCG64(np.random.SeedSequence((seed, 0, 1))).random_raw(count)
    held_out = set(np.argsort(words, kind="stable")[:size].tolist())
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item, line in zip(dataset.items, lines):
        sides[numbers[line] in held_out].append(item)
    evaluation = replace(
        dataset, items=sides[1], problems=[], too_long_tokens=[], notes=(), report=Report()
    )
    return replace(dataset, items=sides[0]), evaluation


def pad_id_of(tokenizer: Any) -> int:
    """Return the id of padding: the pad token, else the end-of-sequence token, else 0.

    Padding is on the right and never labelled, so the choice does not change a result.
    """
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return int(getattr(tokenizer, name))
    return 0


class InOrder:
    """Batches of something else than rows' own sequences, whose rows come as those of `order`."""

    order: Batches

    @property
    def rows(self) -> int:
        """Rows of the data set."""
        return self.order.rows

    @property
    def steps_per_epoch(self) -> float:
        """Batches in which every row is seen once."""
        return self.order.steps_per_epoch

    def rows_at(self, step: int) -> tuple[int, ...]:
        """Return the numbers of a step's rows."""
        return self.order.rows_at(step)
