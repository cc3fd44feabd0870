"""A model's weights rounded as a file of it has them, GGUF or MLX's: by the code that writes the
file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from ondevice.models import mlx_packing
from ondevice.models.registry import family_for
from ondevice.models.text_model import text_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ondevice.core.dims import ModelDims
    from ondevice.models.families.base import Family
    from ondevice.models.load import LoadedModel

MLX_BITS = {"mlx_4bit": 4}
"""Kinds of rounding that are MLX's; every other is a type of GGUF files."""
_ROUNDED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def check_rounds(dims: ModelDims, dtype: str, model: str, kind: str) -> None:
    """Refuse a model whose weights cannot be rounded as a file of it has them.

    Args:
        dtype: of its weights in memory.
        model: its source, for messages.
        kind: of `core.config.BASE_WEIGHTS`.

    Raises:
        ConfigError: the weights would be rounded once more.
        ModelError: the model has no such file.
        MissingPackageError: mlx is not installed, and the kind is MLX's.
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
    if kind in MLX_BITS:
        mlx_packing.check_packs(family, dims)
    else:
        check_writable(family, dims, model)


def round_weights(loaded: LoadedModel, kind: str) -> None:
    """Round the weights of a model in place, once, as a file of that kind has them.

    An adapter that is next to its layers stays as it is.

    Weights that are not in float32 are rounded once more.

    Raises:
        ConfigError: the weights are packed, or rounded to another kind.
        ModelError, MissingPackageError: as `check_rounds`.
    """
    if _ROUNDED.get(loaded.model) == kind:
        return
    for weight, value in _rounded(loaded, kind):
        weight.copy_(value)
    _ROUNDED[loaded.model] = kind


def round_base(loaded: LoadedModel, kind: str) -> None:
    """Round a session's model in place; errors are those of `check_rounds`."""
    dtype = str(loaded.family.head_weight.dtype).removeprefix("torch.")
    check_rounds(loaded.dims, dtype, loaded.source.source, kind)
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

    if loaded.model in _ROUNDED:
        raise ConfigError(
            f"the weights of {loaded.source.source} are rounded already, in another way",
            expected=f"weights that are not rounded, or {kind}",
            received=_ROUNDED[loaded.model],
            hint="load the model again",
        )
    text = text_model(loaded)
    state = _weights(text.model)
    for name, numbers in _roundings(type(text.family), text.dims, kind).items():
        weight = state.get(name)
        if weight is None or not weight.is_floating_point():
            raise ConfigError(
                f"{loaded.source.source} has packed weights, which are not rounded to {kind}",
                expected="the model that the adapter was trained on",
                received=f"no {name}",
            )
        value = np.ascontiguousarray(numbers(weight.float().cpu().numpy()))
        yield weight, torch.from_numpy(value).view(weight.shape)


def rounded_names(loaded: LoadedModel, kind: str) -> set[str]:
    """Return the names of the weights that `round_weights` changes."""
    return set(_roundings(type(loaded.family), loaded.dims, kind))


def _roundings(
    family: type[Family], dims: ModelDims, kind: str
) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return, by the name of each weight that a file rounds, what makes its rounded numbers."""
    if kind in MLX_BITS:
        mlx_packing.check_packs(family, dims)
        return dict.fromkeys(
            family.weight_shapes(dims), partial(mlx_packing.rounded, bits=MLX_BITS[kind])
        )
    parts = gguf_parts(family, dims, architecture_of(family, dims))
    types = _types(family, dims, parts, kind)
    return {
        name: partial(_as_gguf, family, dims, name, [types[part] for part in own])
        for name, own in parts.items()
        if any(types[part] != "float32" for part in own)
    }


def _as_gguf(
    family: type[Family], dims: ModelDims, name: str, types: list[str], value: np.ndarray
) -> np.ndarray:
    """Return the numbers that a GGUF file has of a weight whose parts have those types."""
    arrays = parts_of(family, name, value, dims, len(types))
    back = joined([rounded(array, dtype) for dtype, array in zip(types, arrays)])
    return from_gguf(family, name, back, dims)


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


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights by transformers' names, also those that an adapter is next to."""
    return {
        name.replace(".base.", ".").replace(".base_layer.", "."): value
        for name, value in model.state_dict().items()
    }
