"""Hugging Face data sets by name, through the package `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ondevice.core.errors import DataError, MissingPackageError
from ondevice.data.readers.source import Record


def read_hub(name: str, config: str | None, split: str) -> Iterator[Record]:
    """Read a Hugging Face data set; class labels become their names, `line` counts rows from 1.

    Raises:
        MissingPackageError: `datasets` is not installed.
        DataError: the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError:
        raise MissingPackageError(
            "reading a Hugging Face data set needs the package 'datasets'",
            hint="pip install datasets",
        ) from None
    try:
        loaded: Any = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of many kinds, which all mean that there is no such data
        reason = str(error).strip().partition("\n")[0]
        hint = "data sets are named name[:config][@split], such as glue:sst2@validation"
        raise DataError(f"cannot load the data set {name}: {reason}", hint=hint) from None
    features = loaded.features.items()
    names = {key: feature.names for key, feature in features if hasattr(feature, "names")}
    return (
        Record(number, with_label_names(without_fills(row), names))
        for number, row in enumerate(loaded, 1)
    )


def without_fills(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table without the nulls that Arrow fills in for missing keys.

    Objects in a column, such as a tool call's arguments, lose them; the row's own columns stay.
    """
    return {key: _unfilled(value) for key, value in row.items()}


def _unfilled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unfilled(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_unfilled(item) for item in value]
    return value


def with_label_names(row: dict[str, Any], names: dict[str, list[str]]) -> dict[str, Any]:
    """Replace the numbers of class labels by their names."""
    for key, labels in names.items():
        if isinstance(row.get(key), int) and 0 <= row[key] < len(labels):
            row[key] = labels[row[key]]
    return row
