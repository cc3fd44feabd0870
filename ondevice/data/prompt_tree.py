"""Sequences that begin alike, as one sequence: their common beginning once, then each one's rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ondevice.core.session import IGNORE
from ondevice.data.batching import round_up
from ondevice.data.examples import Example


@dataclass(frozen=True, slots=True)
class PromptTree:
    """Examples and the count of tokens that all of them begin with.

    The last token of an example is only predicted, so it is part of neither.
    """

    examples: tuple[Example, ...]
    shared: int

    def __len__(self) -> int:
        """Return how many tokens the model reads."""
        return self.shared + sum(len(example) - 1 - self.shared for example in self.examples)

    @property
    def separate_tokens(self) -> int:
        """Tokens that the model reads if each example is a sequence of its own."""
        return sum(len(example) for example in self.examples)


class TreeBatch(NamedTuple):
    """Trees as arrays, int64; a tree's branches are numbered from 1 in the order of its examples.

    Attributes:
        ids: [rows, tokens], padded on the right.
        position_ids: [rows, tokens], each token's position in its example; 0 for padding.
        branches: [rows, tokens]; 0 is the shared beginning, -1 is padding.
        sources: [labels], the token whose hidden state predicts the label: row * tokens + place.
        labels: [labels].
        owners: [labels], the number of the example, counted over all trees.
    """

    ids: np.ndarray
    position_ids: np.ndarray
    branches: np.ndarray
    sources: np.ndarray
    labels: np.ndarray
    owners: np.ndarray


def branch_rows(branches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find each continuation with its prompt as a row of its own.

    Args:
        branches: int64 [B, T]; see `TreeBatch`.

    Returns:
        int64 [R, L], each row's tokens by their place in B * T, with any place after its end; and
        int64 [B, T], a place in R * L of each token, any for padding.
    """
    rows = []
    for first, numbers in zip(range(0, branches.size, branches.shape[1]), branches, strict=True):
        prompt = numbers == 0
        for branch in range(1, max(1, int(numbers.max())) + 1):
            rows.append(first + np.flatnonzero(prompt | (numbers == branch)))
    apart = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    together = np.zeros(branches.size, dtype=np.int64)
    for number, row in enumerate(rows):
        apart[number, : len(row)] = row
        together[row] = number * apart.shape[1] + np.arange(len(row))
    return apart, together.reshape(branches.shape)


def prompt_tree(examples: Sequence[Example]) -> PromptTree:
    """Find what examples of at least one token begin with."""
    inputs = [example.ids[:-1] for example in examples]
    shared = 0
    for column in zip(*inputs):
        if len(set(column)) > 1:
            break
        shared += 1
    return PromptTree(tuple(examples), shared)


def pad_trees(trees: Sequence[PromptTree], pad_id: int) -> TreeBatch:
    """Return a batch of trees, as long as the longest rounded up to a multiple of 8."""
    length = round_up(max(len(tree) for tree in trees))
    ids = np.full((len(trees), length), pad_id, dtype=np.int64)
    position_ids = np.zeros((len(trees), length), dtype=np.int64)
    branches = np.full((len(trees), length), -1, dtype=np.int64)
    labelled: list[tuple[int, int, int]] = []
    owner = 0
    for row, tree in enumerate(trees):
        shared = tree.shared
        ids[row, :shared] = tree.examples[0].ids[:shared]
        position_ids[row, :shared] = np.arange(shared)
        branches[row, :shared] = 0
        first = shared
        for branch, example in enumerate(tree.examples, start=1):
            end = first + len(example) - 1 - shared
            ids[row, first:end] = example.ids[shared:-1]
            position_ids[row, first:end] = np.arange(shared, len(example) - 1)
            branches[row, first:end] = branch
            for position, label in enumerate(example.labels[1:]):
                if label == IGNORE:
                    continue
                place = position
                if position >= shared:
                    place = first + position - shared
                labelled.append((row * length + place, label, owner))
            first = end
            owner += 1
    columns = np.array(labelled, dtype=np.int64).reshape(-1, 3).T
    return TreeBatch(ids, position_ids, branches, *columns)
