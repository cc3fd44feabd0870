"""Open what the other calls work on: rows, devices, artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.manifest import read_manifest
from ondevice.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ondevice.data import Dataset


def read_dataset(
    path: Path | str, tokenizer: Any, *, task: str | None, max_length_tokens: int, train_on_prompt: bool = False
) -> Dataset:
    """Rows of a file as token ids; bad rows are in `.problems`.

    Raises:
        DataError: if no row can be used.
    """
    from ondevice.data import encode, read_rows

    rows = read_rows(path, task=task)
    dataset = encode(rows, tokenizer, max_length_tokens=max_length_tokens, train_on_prompt=train_on_prompt)
    if not dataset.items:
        raise DataError(
            f"{path} has no rows that can be used", received="; ".join(map(str, dataset.problems[:3])) or "nothing"
        )
    return dataset


def resolve_device(name: str) -> str:
    """`auto` to `cuda` where there is one, else `cpu`.

    Raises:
        ConfigError: if CUDA is asked for and not there.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "model.device is cuda and no CUDA device is there", hint="`ondevice doctor` says why; or use cpu"
        )
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def artifact_tokenizer(folder: Path) -> Any:
    """The tokenizer that an artifact carries."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(Path(folder) / "tokenizer"))


def open_artifact(folder: Path) -> Any:
    """An artifact, checked, in the runtime it was made for; step it with `.step(ids, labels, step, learning_rate)`."""
    from ondevice.runtime.opening import open_session

    return open_session(Path(folder), read_manifest(Path(folder)))
