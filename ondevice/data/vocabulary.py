"""Token ids that a model's embedding does not have.

MLX would read past the table and keep training, and torch would end in a traceback; so rows are
checked before the first step.
"""

from __future__ import annotations

from ondevice.core.errors import DataError
from ondevice.data.examples import Dataset, Item


def check_ids(dataset: Dataset, vocabulary: int, file: str) -> Dataset:
    """Return the rows if the embedding has all of their tokens.

    Args:
        vocabulary: rows of the model's embedding.
        file: names a row that does not name its own file.

    Raises:
        DataError: names the first row with another token, and the token.
    """
    for item in dataset.items:
        token = unknown_token(item, vocabulary)
        if token is None:
            continue
        row = item.file or file
        if item.line:
            row = f"{row}:{item.line}"
        raise DataError(
            f"{row}: token {token} is not in the model's vocabulary",
            expected=f"ids from 0 to {vocabulary - 1}, as the embedding has {vocabulary} rows",
            received=token,
            hint="the rows were encoded with another model's tokenizer, "
            "or the embedding was not resized for all of its tokens",
        )
    return dataset


def unknown_token(item: Item, vocabulary: int) -> int | None:
    """Return the first token of a row that is not in the embedding, or None."""
    for example in (item.example, *item.candidates):
        if min(example.ids) >= 0 and max(max(example.ids), max(example.labels)) < vocabulary:
            continue
        tokens = (*example.ids, *(label for label in example.labels if label >= 0))
        return next(token for token in tokens if not 0 <= token < vocabulary)
    return None
