"""The losses of all examples of rows; a prompt that several candidates share is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ondevice.core.errors import DataError
from ondevice.core.session import Branching
from ondevice.data.batching import pad_examples, round_up
from ondevice.data.prompt_tree import PromptTree, pad_trees, prompt_tree

if TYPE_CHECKING:
    from ondevice.core.session import Evaluator
    from ondevice.data import Example, Item

DEFAULT_BATCH_SIZE = 8
GAIN = 1.25
"""A tree is used if its examples have that many times its tokens; its attention is not causal only,
which costs."""

MASK_ELEMENTS = 1 << 24
"""Most elements of a batch's mask, rows * tokens * tokens: 64 MiB in float32."""

Key = tuple[int, int]
"""A row's index, and the index of its candidate; -1 is the right answer if it is not one of them."""

Totals = dict[Key, tuple[float, int]]
"""Summed negative log likelihood of each example's labelled tokens, and their count."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One example, and the row that it is of."""

    key: Key
    example: Example
    item: Item


@dataclass(frozen=True, slots=True)
class _TreeJob:
    """The examples of one row, as a tree."""

    keys: tuple[Key, ...]
    tree: PromptTree


def score_examples(
    session: Evaluator,
    items: Sequence[Item],
    pad_id: int,
    batch_size: int | None,
    should_stop: Callable[[], bool] | None,
) -> Totals | None:
    """Compute every example of every row.

    Longest first: neighbours are of about one length, so little is padding, and memory that does
    not suffice fails in the first batch.

    Returns:
        The losses, or None if `should_stop`, which is called before every batch, returned True.

    Raises:
        DataError: an example is longer than the session takes.
    """
    size = session.eval_batch_size or batch_size or DEFAULT_BATCH_SIZE
    jobs: list[_Job] = []
    trees: list[_TreeJob] = []
    for index, item in enumerate(items):
        row = [_Job((index, slot), example, item) for slot, example in _examples(item)]
        tree = _worthwhile_tree(session, [job.example for job in row])
        if tree is None:
            jobs += row
        else:
            trees.append(_TreeJob(tuple(job.key for job in row), tree))
    totals: Totals = {}
    trees.sort(key=lambda job: -len(job.tree))
    for batch in _tree_batches(trees, size):
        if should_stop is not None and should_stop():
            return None
        totals |= _run_trees(session, batch, pad_id)
    jobs.sort(key=lambda job: -len(job.example))
    for start in range(0, len(jobs), size):
        if should_stop is not None and should_stop():
            return None
        totals |= _run(session, jobs[start : start + size], size, pad_id)
    return totals


def _examples(item: Item) -> list[tuple[int, Example]]:
    """List the candidates under their index, and the right answer under -1 if it is not one of
    them."""
    slots = list(enumerate(item.candidates))
    if item.gold is not None:
        return slots
    return [(-1, item.example), *slots]


def _worthwhile_tree(session: Evaluator, examples: list[Example]) -> PromptTree | None:
    """Return a row's examples as a tree, or None if the session or the row is not for one."""
    if len(examples) < 2 or not isinstance(session, Branching) or session.eval_batch_size:
        return None
    tree = prompt_tree(examples)
    length = round_up(len(tree))
    if tree.shared == 0 or tree.separate_tokens < GAIN * len(tree):
        return None
    if length * length > MASK_ELEMENTS or not session.takes_branches(length):
        return None
    return tree


def _tree_batches(trees: list[_TreeJob], size: int) -> Iterator[list[_TreeJob]]:
    """Cut trees, the longest first, into batches of at most `size`, whose mask is not too large."""
    start = 0
    while start < len(trees):
        length = round_up(len(trees[start].tree))
        end = start + max(1, min(size, MASK_ELEMENTS // (length * length)))
        yield trees[start:end]
        start = end


def _run_trees(session: Evaluator, batch: list[_TreeJob], pad_id: int) -> Totals:
    assert isinstance(session, Branching)  # noqa: S101  checked where the trees are made
    arrays = pad_trees([job.tree for job in batch], pad_id)
    losses = np.asarray(session.evaluate_branches(*arrays[:-1]))
    keys = [key for job in batch for key in job.keys]
    sums = np.bincount(arrays.owners, weights=losses, minlength=len(keys))
    counts = np.bincount(arrays.owners, minlength=len(keys))
    return {
        key: (float(nll), int(count)) for key, nll, count in zip(keys, sums, counts, strict=True)
    }


def _run(session: Evaluator, jobs: list[_Job], size: int, pad_id: int) -> Totals:
    """Run examples, the longest first, each as a sequence of its own."""
    need = len(jobs[0].example)
    buckets = session.lengths_tokens
    length: int | None = round_up(need)
    if buckets is not None:
        length = next((bucket for bucket in buckets if bucket >= need), None)
    if length is None:
        raise DataError(
            f"line {jobs[0].item.line} of the evaluation data is longer than the program takes",
            expected=f"at most {max(buckets or (0,))} tokens",
            received=f"{need} tokens",
            hint="export the program with a longer sequence, or lower `data.max_length_tokens`",
        )
    examples = [job.example for job in jobs]
    fill = 0
    if session.eval_batch_size:  # an exported program takes full batches only
        fill = size - len(examples)
    batch = pad_examples([*examples, *[examples[-1]] * fill], length, pad_id)
    nll, counts = session.evaluate(batch.ids, batch.labels)
    return {
        job.key: (float(loss), int(count))
        for job, loss, count in zip(jobs, np.asarray(nll), np.asarray(counts), strict=False)
    }
