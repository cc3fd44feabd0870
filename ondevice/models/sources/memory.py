"""A transformers model that a Python program has loaded already."""

from __future__ import annotations

import hashlib
from typing import Any

from ondevice.core.errors import ConfigError
from ondevice.models.load import LoadedModel, wrap
from ondevice.models.registry import family_for
from ondevice.models.sources.resolve import SourceInfo


def wrap_model(model: Any, tokenizer: Any = None) -> LoadedModel:
    """Wrap a causal language model of transformers and its tokenizer; the model is not copied.

    Args:
        model: of transformers, or a `LoadedModel`, which is returned as it is.
        tokenizer: a fast tokenizer of transformers.

    Raises:
        ConfigError: either is of another type.
        ModelError: the model's family is not supported.
    """
    if isinstance(model, LoadedModel):
        return model
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type") or not hasattr(model, "get_input_embeddings"):
        raise ConfigError(
            "not a model",
            expected="a causal language model of transformers, or the result of ondevice.load_model",
            received=type(model).__name__,
            hint="a model's name or folder is model.source",
        )
    if not hasattr(tokenizer, "is_fast"):
        raise ConfigError(
            "a model that is loaded needs its tokenizer",
            expected="tokenizer=AutoTokenizer.from_pretrained(...)",
            received=type(tokenizer).__name__,
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    name = getattr(config, "_name_or_path", "") or f"{config.model_type} in memory"
    info = SourceInfo(name, None, known_sha256=_sha256(model))
    return wrap(model, tokenizer, family_for(config.model_type, name), info)


def _sha256(model: Any) -> str:
    """Hash names, types and bytes of all parameters and buffers: what a resume must find again."""
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()
