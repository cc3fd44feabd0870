"""Examples that begin alike as one sequence."""

from __future__ import annotations

import numpy as np

from ondevice.data.examples import Example
from ondevice.data.prompt_tree import pad_trees, prompt_tree

X = -100
PROMPT = (5, 6, 7)


def example(*answer: int) -> Example:
    return Example((*PROMPT, *answer), (X, X, X, *answer))


def test_a_tree_has_the_prompt_once_and_each_rest_without_its_last_token() -> None:
    tree = prompt_tree([example(8), example(9, 1, 2), example(9, 3)])
    assert (tree.shared, len(tree), tree.separate_tokens) == (3, 3 + 0 + 2 + 1, 4 + 6 + 5)
    batch = pad_trees([tree], pad_id=77)
    assert batch.ids.tolist() == [[5, 6, 7, 9, 1, 9, 77, 77]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 0]]
    assert batch.branches.tolist() == [[0, 0, 0, 2, 2, 3, -1, -1]]
    assert batch.sources.tolist() == [2, 2, 3, 4, 2, 5]
    assert batch.labels.tolist() == [8, 9, 1, 2, 9, 3]
    assert batch.owners.tolist() == [0, 1, 1, 1, 2, 2]


def test_labels_that_begin_alike_share_those_tokens_too() -> None:
    tree = prompt_tree([example(9, 4, 1), example(9, 4, 2), example(9, 4, 3, 8)])
    assert (tree.shared, len(tree)) == (5, 6)
    batch = pad_trees([tree], pad_id=0)
    assert batch.ids.tolist() == [[5, 6, 7, 9, 4, 3, 0, 0]]
    assert batch.sources.tolist() == [2, 3, 4, 2, 3, 4, 2, 3, 4, 5]


def test_trees_of_a_batch_are_as_long_as_the_longest_and_count_their_examples_on() -> None:
    short = prompt_tree([example(8), example(9)])
    long = prompt_tree([example(1, *range(2, 9)), example(2)])
    batch = pad_trees([long, short], pad_id=0)
    assert batch.ids.shape == (2, 16)
    assert batch.owners.tolist() == [0] * 8 + [1, 2, 3]
    assert batch.sources[-2:].tolist() == [16 + 2, 16 + 2]


def test_an_example_without_a_label_is_one_that_owns_none() -> None:
    nothing = Example(PROMPT, (X, X, X))
    batch = pad_trees([prompt_tree([nothing, example(8)])], pad_id=0)
    assert batch.owners.tolist() == [1] and batch.labels.tolist() == [8]
    assert np.bincount(batch.owners, minlength=2).tolist() == [0, 1]
