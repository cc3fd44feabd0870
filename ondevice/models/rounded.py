"""A model's weights rounded as a GGUF file of it has them: by the code that writes the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from ondevice.core.errors import ConfigError
from ondevice.gguf.config import check_writable
from ondevice.gguf.names import (
    architecture_of,
    from_gguf,
    gguf_parts,
    joined,
    part_shapes,
    parts_of,
)
from ondevice.gguf.quants import rounded, types_of
from ondevice.models.registry import family_for
from ondevice.models.text_model import text_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ondevice.core.dims import ModelDims
    from ondevice.models.families.base import Family
    from ondevice.models.load import LoadedModel

_ROUNDED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def check_rounds(dims: ModelDims, dtype: str, model: str) -> None:
    """Refuse a model whose weights cannot be rounded as a GGUF file has them.

    Args:
        dtype: of its weights in memory.
        model: its source, for messages.

    Raises:
        ConfigError: the weights would be rounded once more.
        ModelError: the model has no GGUF form.
    """
    if dtype != "float32":
        raise ConfigError(
            "method.base needs weights in float32: another precision rounds them once more",
            expected="model.dtype: float32",
            received=f"model.dtype: {dtype}",
        )
    if dims.whole or dims.classes:
        raise dims.unknown("method.base")
    family = family_for(dims.family, model)
    check_writable(family, dims, model)


def round_weights(loaded: LoadedModel, kind: str) -> None:
    """Round the weights of a model in place, once, as a GGUF file of type `kind` has them.

    An adapter that is next to its layers stays as it is.

    Weights that are not in float32 are rounded once more.

    Raises:
        ConfigError: the weights are packed.
        ModelError: the model has no GGUF form.
    """
    if _ROUNDED.get(loaded.model) == kind:
        return
    for weight, value in _rounded(loaded, kind):
        weight.copy_(value)
    _ROUNDED[loaded.model] = kind


def round_base(loaded: LoadedModel, kind: str) -> None:
    """Round a session's model in place; errors are those of `check_rounds`."""
    dtype = str(loaded.family.head_weight.dtype).removeprefix("torch.")
    check_rounds(loaded.dims, dtype, loaded.source.source)
    round_weights(loaded, kind)


@contextmanager
def rounded_weights(loaded: LoadedModel, kind: str) -> Iterator[None]:
    """Round the weights of a model for the duration of a block; a copy of them waits meanwhile.

    An empty `kind` rounds nothing.
    """
    if not kind or _ROUNDED.get(loaded.model) == kind:
        yield
        return
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for weight, value in _rounded(loaded, kind):
            kept.append((weight, weight.clone()))
            weight.copy_(value)
        _ROUNDED[loaded.model] = kind
        yield
    finally:
        for weight, value in kept:
            weight.copy_(value)
        _ROUNDED.pop(loaded.model, None)


def _rounded(loaded: LoadedModel, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor that a file rounds, and its rounded numbers in float32 on the CPU."""
    import torch

    text = text_model(loaded)
    family = type(text.family)
    dims = text.dims
    parts = gguf_parts(family, dims, architecture_of(family, dims))
    types = _types(family, dims, parts, kind)
    state = _weights(text.model)
    for name, own in parts.items():
        if _stays(own, types):
            continue
        weight = state.get(name)
        if weight is None or not weight.is_floating_point():
            raise ConfigError(
                f"{loaded.source.source} has packed weights, which are not rounded to {kind}",
                expected="the model that the adapter was trained on",
                received=f"no {name}",
            )
        arrays = parts_of(family, name, weight.float().cpu().numpy(), dims, len(own))
        back = joined([rounded(array, types[part]) for part, array in zip(own, arrays)])
        value = np.ascontiguousarray(from_gguf(family, name, back, dims))
        yield weight, torch.from_numpy(value).view(weight.shape)


def rounded_names(loaded: LoadedModel, kind: str) -> set[str]:
    """Return the names of the weights that `round_weights` changes."""
    family = type(loaded.family)
    parts = gguf_parts(family, loaded.dims, architecture_of(family, loaded.dims))
    types = _types(family, loaded.dims, parts, kind)
    return {name for name, own in parts.items() if not _stays(own, types)}


def _types(
    family: type[Family], dims: ModelDims, parts: dict[str, tuple[str, ...]], kind: str
) -> dict[str, str]:
    """Return the type of each of a file's tensors."""
    sizes = family.weight_shapes(dims)
    shapes = {
        part: shape
        for name, own in parts.items()
        for part, shape in zip(own, part_shapes(sizes[name], len(own)))
    }
    return types_of(shapes, kind)


def _stays(own: tuple[str, ...], types: dict[str, str]) -> bool:
    return all(types[part] == "float32" for part in own)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights by transformers' names, also those that an adapter is next to."""
    return {
        name.replace(".base.", ".").replace(".base_layer.", "."): value
        for name, value in model.state_dict().items()
    }
