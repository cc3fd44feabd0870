"""A trained model as a folder that transformers loads, streamed from where its weights lie, without
a second copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import storage_errors, write_tensors
from ondevice.core.errors import ModelError
from ondevice.core.untrusted import read_object
from ondevice.models.sources.resolve import FILE_NAME

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.models.load import LoadedModel
    from ondevice.models.open import ModelFiles

GENERATION_NAME = "generation_config.json"
_TOKENIZER_PATTERNS = (
    "tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


def save_weights(folder: Path, weights: dict[str, Tensor], loaded: Any) -> None:
    """Write `weights`, bfloat16 or float32, with configuration and tokenizer into `folder`, which
    is made.

    Raises:
        OSError: from the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: as_numpy(tensor) for name, tensor in weights.items()}
    write_tensors(folder / FILE_NAME, arrays, bfloat16=True)
    save_description(folder, next(iter(weights.values())).dtype, loaded)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return the same memory; bfloat16 as uint16."""
    import torch

    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def save_description(folder: Path, dtype: Any, loaded: Any) -> None:
    """Write configuration and tokenizer of a model whose weights are of `dtype`."""
    config = loaded.model.config
    config.dtype = dtype
    config.architectures = [type(loaded.model).__name__]
    config.save_pretrained(folder)
    if getattr(loaded.model, "generation_config", None) is not None:
        loaded.model.generation_config.save_pretrained(folder)
    save_tokenizer(loaded, folder)


def add_ends(folder: Path, ends: Iterable[int]) -> None:
    """Let generation stop at these token ids, too: `eos_token_id` of `generation_config.json`."""
    path = folder / GENERATION_NAME
    config = {}
    if path.is_file():
        config = read_object(path, ModelError)
    known = config.get("eos_token_id")
    if known is None:
        known = read_object(folder / "config.json", ModelError).get("eos_token_id")
    known = [known] if isinstance(known, int) else known or []
    every = list(dict.fromkeys([*ends, *known]))
    if every and every != known:
        config["eos_token_id"] = every
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_loaded(loaded: Any, folder: Path) -> None:
    """Write a model that is whole in memory as it is, with its tokenizer, into `folder`."""
    loaded.model.save_pretrained(folder)
    save_tokenizer(loaded, folder)


def save_tokenizer(loaded: LoadedModel | ModelFiles, folder: Path) -> None:
    """Write the tokenizer's files to `folder`: byte for byte the model's own, if it has some."""
    folder.mkdir(parents=True, exist_ok=True)
    with storage_errors(folder):
        if loaded.source.path is None:
            loaded.tokenizer.save_pretrained(folder)
            return
        for pattern in _TOKENIZER_PATTERNS:
            for path in sorted(loaded.source.path.glob(pattern)):
                if path.is_file():
                    target = folder / path.relative_to(loaded.source.path)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)
