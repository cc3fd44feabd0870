"""Token ids that a model's embedding has no row for.

MLX reads beyond the table and trains on, torch ends in a traceback: so rows are checked before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ondevice.core.errors import DataError
from ondevice.data.encode import Dataset, Item
from ondevice.data.rows import RowProblem

HINT = "the rows were encoded with another model's tokenizer, or it has tokens that the embedding was not resized for"


def check_ids(dataset: Dataset, vocabulary: int, file: str) -> Dataset:
    """Return the rows if the embedding has a row for each of their tokens.

    Args:
        vocabulary: rows of the model's embedding.
        file: to name a row by, where the row does not name its own.

    Raises:
        DataError: naming the first row that has another token, and the token.
    """
    for item, token in _beyond(dataset, vocabulary):
        where = f"{item.file or file}:{item.line}" if item.line else item.file or file
        raise DataError(
            f"{where}: token {token} is not in the model's vocabulary",
            expected=f"ids from 0 to {vocabulary - 1}, as the embedding has {vocabulary} rows",
            received=token,
            hint=HINT,
        )
    return dataset


def without_unknown_ids(dataset: Dataset, vocabulary: int, file: str) -> Dataset:
    """Return the rows without those that `check_ids` would refuse, which become problems."""
    wrong = dict[int, RowProblem]()
    for item, token in _beyond(dataset, vocabulary):
        reason = f"token {token} is not in the model's vocabulary of {vocabulary}"
        wrong[id(item)] = RowProblem(item.file or file, item.line, "", reason)
    if not wrong:
        return dataset
    problems = sorted([*dataset.problems, *wrong.values()], key=lambda problem: problem.line)
    return replace(dataset, items=[item for item in dataset.items if id(item) not in wrong], problems=problems)


def _beyond(dataset: Dataset, vocabulary: int) -> Iterator[tuple[Item, int]]:
    """Yield each row that has a token outside the vocabulary, with the first such token."""
    for item in dataset.items:
        for example in (item.example, *item.candidates):
            if min(example.ids) >= 0 and max(max(example.ids), max(example.labels)) < vocabulary:
                continue
            tokens = (*example.ids, *(label for label in example.labels if label >= 0))
            yield item, next(token for token in tokens if not 0 <= token < vocabulary)
            break
