"""Token ids that a model's embedding has no row for.

MLX reads beyond the table and trains on, torch ends in a traceback: so rows are checked before the first step.
"""

from __future__ import annotations

from ondevice.core.errors import DataError
from ondevice.data.examples import Dataset, Item

HINT = "the rows were encoded with another model's tokenizer, or it has tokens that the embedding was not resized for"


def check_ids(dataset: Dataset, vocabulary: int, file: str) -> Dataset:
    """Return the rows if the embedding has a row for each of their tokens.

    Args:
        vocabulary: rows of the model's embedding.
        file: to name a row by, where the row does not name its own.

    Raises:
        DataError: naming the first row that has another token, and the token.
    """
    for item in dataset.items:
        token = unknown_token(item, vocabulary)
        if token is None:
            continue
        where = f"{item.file or file}:{item.line}" if item.line else item.file or file
        raise DataError(
            f"{where}: token {token} is not in the model's vocabulary",
            expected=f"ids from 0 to {vocabulary - 1}, as the embedding has {vocabulary} rows",
            received=token,
            hint=HINT,
        )
    return dataset


def unknown_token(item: Item, vocabulary: int) -> int | None:
    """Return the first token of a row that the embedding has no row for; None if it has all."""
    for example in (item.example, *item.candidates):
        if min(example.ids) >= 0 and max(max(example.ids), max(example.labels)) < vocabulary:
            continue
        tokens = (*example.ids, *(label for label in example.labels if label >= 0))
        return next(token for token in tokens if not 0 <= token < vocabulary)
    return None
