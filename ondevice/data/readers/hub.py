"""Hugging Face data sets by name, through the package `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ondevice.core.errors import DataError, MissingPackageError
from ondevice.data.readers.source import Record


def read_hub(name: str, config: str | None, split: str) -> Iterator[Record]:
    """Read the records of a Hugging Face data set; class labels become their names. `line` counts rows from 1.

    Raises:
        MissingPackageError: `datasets` is not installed.
        DataError: the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError:
        hint = "pip install datasets"
        raise MissingPackageError(
            "reading a Hugging Face data set needs the package 'datasets'", hint=hint
        ) from None
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except (
        Exception
    ) as error:  # the package raises many kinds, all meaning that there is no such data
        reason = str(error).strip().partition("\n")[0]
        hint = "data sets are named name[:config][@split], such as glue:sst2@validation"
        raise DataError(f"cannot load the data set {name}: {reason}", hint=hint) from None
    names = {
        key: feature.names for key, feature in loaded.features.items() if hasattr(feature, "names")
    }
    return (
        Record(number, named(without_fills(row), names)) for number, row in enumerate(loaded, 1)
    )


def without_fills(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table without the nulls with which Arrow fills an object that lacks another's keys: a
    tool call's arguments, a schema's properties. A row's own columns stay, empty ones too."""
    return {key: _unfilled(value) for key, value in row.items()}


def _unfilled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unfilled(item) for key, item in value.items() if item is not None}
    return [_unfilled(item) for item in value] if isinstance(value, list) else value


def named(row: dict[str, Any], names: dict[str, list[str]]) -> dict[str, Any]:
    """Put the names of class labels in place of their numbers."""
    for key, labels in names.items():
        if isinstance(row.get(key), int) and 0 <= row[key] < len(labels):
            row[key] = labels[row[key]]
    return row
