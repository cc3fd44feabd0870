"""GGUF's names and layouts of a model's tensors, for reading and for writing.

Names come from the tables of the `gguf` package. A layout is told once, by `Family.gguf_tensor`, as
reading needs it; writing inverts it. It is a permutation of rows, such as the interleaved rotary
pairs of Llama's q and k, or a constant that llama.cpp adds to the weight of a norm. Permutations of
columns (`gguf_columns`) and functions of numbers (`gguf_function`) are told by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import MissingPackageError, ModelError

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.gguf.family import GGUFFamily

_JOINED = "experts.gate_up_proj"
_HALVES = ("experts.gate_proj", "experts.up_proj")
"""transformers keeps the experts' gate and up matrices as one tensor, GGUF as two."""


def gguf_package() -> Any:
    """Import the package `gguf`.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise MissingPackageError(
            "GGUF files need the package 'gguf'",
            expected="gguf",
            received="not installed",
            hint="pip install 'ondevice-train[torch]'",
        ) from None
    return gguf


def architecture_of(family: type[GGUFFamily], dims: ModelDims) -> str:
    """Return the `general.architecture` of files written for a family.

    Raises:
        ModelError: the family has no GGUF form.
    """
    name = family.gguf_written_as or family.gguf_architecture
    if name is None:
        raise ModelError(
            f"{dims.family} models have no GGUF form",
            expected="a family with a GGUF architecture",
            received=dims.family,
            hint="--to peft or --to safetensors",
        )
    return name


def gguf_parts(
    family: type[GGUFFamily], dims: ModelDims, architecture: str | None
) -> dict[str, tuple[str, ...]]:
    """Map each of transformers' tensors to its GGUF tensor, or to two halves along the second
    dimension.

    Raises:
        ModelError: the architecture has no name for one of them.
        MissingPackageError: the package `gguf` is not installed.
    """
    halves = {
        name: tuple(name.replace(_JOINED, half) for half in _HALVES)
        if name.endswith(_JOINED)
        else (name,)
        for name in family.weight_shapes(dims)
    }
    parts = [part for names in halves.values() for part in names]
    known = {part: family.gguf_known_as(part) for part in parts}
    by_table = gguf_names(dims, list(known.values()), architecture)
    found = {part: by_table[name] for part, name in known.items()}
    # transformers gives the experts' tensors no suffix.
    for part in parts:
        if ".experts." in part and not part.endswith(".weight"):
            found[part] += ".weight"
        if part.endswith(".expert_bias"):
            found[part] += ".bias"
    return {name: tuple(found[part] for part in names) for name, names in halves.items()}


def gguf_names(dims: ModelDims, names: list[str], architecture: str | None) -> dict[str, str]:
    """Map transformers' names to GGUF's; errors as `gguf_parts`."""
    gguf = gguf_package()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        raise ModelError(
            f"the installed package gguf does not know the architecture {architecture!r}",
            hint="pip install -U gguf",
        )
    table = gguf.get_tensor_name_map(kinds[architecture], dims.layers)
    result = {name: table.get_name(name, (".weight", ".bias")) for name in names}
    for name, gguf_name in result.items():
        if gguf_name is None:
            raise ModelError(
                f"'{name}' has no name in GGUF files of architecture {architecture}",
                expected="a tensor that llama.cpp reads",
                received=name,
                hint="--to peft or --to safetensors",
            )
    return result


def gguf_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a file of a tensor of that shape: [channels, taps] of a convolution's
    [channels, 1, taps]."""
    if len(shape) == 3 and shape[1] == 1:
        return shape[0], shape[2]
    return shape


def parts_of(
    family: type[GGUFFamily], name: str, weights: np.ndarray, dims: ModelDims, count: int
) -> list[np.ndarray]:
    """Return the `count` tensors that a file has of one of transformers', whose name is `name`."""
    value = to_gguf(family, name, weights, dims)
    if count == 1:
        return [value.reshape(gguf_shape(value.shape))]
    return np.split(value, count, axis=1)


def part_shapes(shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Return the shapes in a file of the `count` tensors that one of that shape is there."""
    shape = gguf_shape(shape)
    if count == 1:
        return [shape]
    return [(shape[0], shape[1] // count, *shape[2:])] * count


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return what `parts_of` split; its layout is still the file's."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis=1)


def from_gguf(
    family: type[GGUFFamily], name: str, weights: np.ndarray, dims: ModelDims
) -> np.ndarray:
    """Lay out a file's tensor as transformers does; `name` is transformers' name of the weight."""
    columns = family.gguf_columns(name, dims)
    if columns is not None:
        weights = weights[:, np.argsort(columns)]
    weights = family.gguf_tensor(name, weights, dims)
    functions = family.gguf_function(name)
    return weights if functions is None else functions[1](weights)


def to_gguf(
    family: type[GGUFFamily],
    name: str,
    weights: np.ndarray,
    dims: ModelDims,
    *,
    is_weight: bool = True,
) -> np.ndarray:
    """Lay out a tensor as llama.cpp does; `name` is transformers' name of the weight.

    Args:
        weights: [outputs, ...]; B [outputs, rank] of a LoRA adapter follows the rows of its weight.
        is_weight: False for B of an adapter, which no constant is subtracted from, and whose
            columns are the adapter's.
    """
    if is_weight and (functions := family.gguf_function(name)):
        weights = functions[0](weights)
    columns = family.gguf_columns(name, dims)
    if is_weight and columns is not None:
        weights = weights[:, columns]
    rows = weights.shape[0]
    column = (rows, *(1,) * (weights.ndim - 1))
    constant = np.asarray(family.gguf_tensor(name, np.zeros(column), dims))
    numbers = np.arange(rows, dtype=np.float64).reshape(column)
    order = np.asarray(family.gguf_tensor(name, numbers, dims)) - constant
    order = np.rint(order).astype(np.int64).reshape(-1)
    if not np.array_equal(np.sort(order), np.arange(rows)):
        raise ModelError(
            f"the GGUF layout of '{name}' cannot be inverted", received=family.model_type
        )
    if is_weight:
        weights = weights - constant.astype(weights.dtype)
    return weights[np.argsort(order)]
