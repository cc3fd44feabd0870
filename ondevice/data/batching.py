"""Batches as a pure function of the seed and the step, so that resuming needs no state but the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ondevice.core.errors import ConfigError, DataError
from ondevice.core.session import IGNORE
from ondevice.data.examples import Dataset, Example, Item, Report

ROUND_TO_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` and `labels`, int64 [B, T], padded on the right; labels are -100 where nothing is trained.

    Attributes:
        position_ids: int64 [B, T] where a sequence has several rows: each token's place in its own, which begins at 0,
            as every padding token does. None where a sequence is a row.
    """

    ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None

    def rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids and labels of each row that is trained on, int64 [length]; a row that is not packed has its
        padding."""
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

    Row p of the run (p = step * batch_size + position in the batch) is row p mod n of epoch p div n, so
    the batch that crosses the end of an epoch is filled from the next epoch's order. An epoch's order is
    the stable argsort of n raw words of numpy's PCG64 seeded with (seed, epoch): raw words and seeding
    are what numpy promises never to change between versions.

    Args:
        dataset: the encoded rows; their training examples are batched.
        batch_size: rows a batch (B).
        lengths_tokens: the padded lengths (T) that the program was built for, and the smallest that
            holds the longest row of a batch is taken; None pads to the longest row, rounded up to a
            multiple of 8.
        seed: seeds the order, 0 or above.
        pad_id: the id on padded positions.
        packing: put the rows of a step into as few sequences as hold them; which rows a step has does not change.

    Raises:
        ConfigError: a size that is not positive, a negative seed, or a row longer than the largest length.
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
    ) -> None:
        self._examples = [item.example for item in dataset.items]
        self.batch_size = batch_size
        self.lengths_tokens = tuple(sorted(lengths_tokens)) if lengths_tokens is not None else None
        self.seed = seed
        self.pad_id = pad_id
        self.packing = packing
        self._orders: dict[int, np.ndarray] = {}
        if not self._examples:
            raise DataError(
                "there are no rows to make batches of", expected="one row or more", received="none"
            )
        if batch_size < 1 or seed < 0:
            raise ConfigError("batch_size or seed is out of range", expected="batch_size >= 1, seed >= 0",
                              received=f"batch_size={batch_size}, seed={seed}")  # fmt: skip
        if packing and lengths_tokens is not None:
            raise ConfigError("an exported program takes one row a sequence", expected="data.packing: false",
                              received="data.packing: true", hint="leave --packing out")  # fmt: skip
        longest = max(len(example) for example in self._examples)
        if self.lengths_tokens is not None and longest > max(self.lengths_tokens, default=0):
            hint = f"encode the data with max_length_tokens={max(self.lengths_tokens, default=0)}"
            raise ConfigError("a row is longer than the program's largest length", hint=hint,
                              expected=f"a length among {self.lengths_tokens}", received=longest)  # fmt: skip
        self._room = max(dataset.max_length_tokens, longest)

    @property
    def rows(self) -> int:
        """Rows of the data set."""
        return len(self._examples)

    @property
    def steps_per_epoch(self) -> float:
        """Batches in which every row is seen once; not whole if the last one is shared."""
        return len(self._examples) / self.batch_size

    def rows_at(self, step: int) -> tuple[int, ...]:
        """Return the indices into `dataset.items` of the rows of a step, counted from 0."""
        if step < 0:
            raise ConfigError("a step is counted from 0", expected="0 or above", received=step)
        count = len(self._examples)
        first = step * self.batch_size
        positions = (divmod(place, count) for place in range(first, first + self.batch_size))
        return tuple(int(self._order(epoch)[index]) for epoch, index in positions)

    def at(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0: int64 [batch_size, length], or fewer sequences of more rows."""
        examples = [self._examples[row] for row in self.rows_at(step)]
        return collate(
            examples, self.lengths_tokens, self.pad_id, self._room if self.packing else None
        )

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
            words = bits.random_raw(len(self._examples))
            # A batch needs two orders at most; kept for ever, they would grow with the run.
            for other in [other for other in self._orders if abs(other - epoch) > 1]:
                del self._orders[other]
            self._orders[epoch] = np.argsort(words, kind="stable")
        return self._orders[epoch]


def round_up(length_tokens: int, multiple: int = ROUND_TO_TOKENS) -> int:
    """Round up to the next multiple of `multiple`."""
    return -(-length_tokens // multiple) * multiple


def collate(
    examples: Sequence[Example],
    lengths_tokens: Sequence[int] | None,
    pad_id: int,
    room_tokens: int | None = None,
) -> Batch:
    """Make a batch of examples: packed where `room_tokens` says how long a sequence may be, else padded to the smallest
    of `lengths_tokens`, ascending, or to a multiple of 8."""
    if room_tokens is not None:
        return pack_examples(examples, room_tokens, pad_id)
    longest = max(len(example) for example in examples)
    if lengths_tokens is None:
        return pad_examples(examples, round_up(longest), pad_id)
    return pad_examples(
        examples, next(length for length in lengths_tokens if length >= longest), pad_id
    )


def pad_examples(examples: Sequence[Example], length_tokens: int, pad_id: int) -> Batch:
    """Stack examples to one batch of `length_tokens` columns, padded on the right.

    Raises:
        ConfigError: an example is longer than `length_tokens`.
    """
    longest = max((len(example) for example in examples), default=0)
    if longest > length_tokens:
        expected = f"at most {length_tokens} tokens"
        raise ConfigError(
            "an example does not fit into the batch", expected=expected, received=longest
        )
    ids = np.full((len(examples), length_tokens), pad_id, dtype=np.int64)
    labels = np.full((len(examples), length_tokens), IGNORE, dtype=np.int64)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = example.ids
        labels[row, : len(example)] = example.labels
    return Batch(ids, labels)


def pack_examples(examples: Sequence[Example], room_tokens: int, pad_id: int) -> Batch:
    """Put rows into as few sequences as first-fit decreasing needs, each of at most `room_tokens` or one row long.

    The label at a row's first token becomes -100: the token before it is another row's.
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


def split_rows(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a data set into rows to train on and rows to validate on, both in the order of the file.

    The validation rows are the first of the stable argsort of n raw words of numpy's PCG64 seeded with (seed, 0, 1),
    which is no epoch's order; the Android app draws them alike. Windows that begin on one line of the
    file stay together. Problems stay with the rows to train on.

    Args:
        share: of the rows, above 0 and below 1; at least one row goes to either side.
        seed: of the run, 0 or above.

    Raises:
        DataError: there is one row only.
    """
    places = [(item.file, item.line) for item in dataset.items]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    count = len(numbers)
    if count < 2:
        raise DataError(
            "there are too few rows to split", expected="two rows or more", received=count
        )
    kept = min(max(1, round(count * share)), count - 1)
    words = np.random.PCG64(np.random.SeedSequence((seed, 0, 1))).random_raw(count)
    held = set(np.argsort(words, kind="stable")[:kept].tolist())
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item, place in zip(dataset.items, places):
        sides[numbers[place] in held].append(item)
    return replace(dataset, items=sides[0]), replace(dataset, items=sides[1], problems=[], too_long_tokens=[], notes=(),
                                                     report=Report())  # fmt: skip


def pad_id_of(tokenizer: Any) -> int:
    """Return the id to pad with: the tokenizer's pad token, else its end-of-sequence token, else 0. Padding is
    on the right and never labelled, so the choice does not change a result."""
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return int(getattr(tokenizer, name))
    return 0
