"""GGUF's names and layouts of a model's tensors, for llama.cpp and what is built on it.

Names are `ondevice.gguf.names`'s. Layouts are the inverse of what reading undoes
(`Family.gguf_tensor`), so a family says it once: a permutation of rows, such as the interleaved rotary pairs of the
llama architecture's q and k, or a constant that llama.cpp adds to a norm's weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ondevice.core.errors import ModelError

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.models.families.base import Family


def architecture_of(family: type[Family], dims: ModelDims) -> str:
    """Return the `general.architecture` of files written of a family; ModelError for one without GGUF form."""
    from ondevice.models.registry import family_classes

    name = family.gguf_written_as or family.gguf_architecture
    if name is None:
        written = [
            kind.model_type
            for kind in family_classes().values()
            if kind.gguf_written_as or kind.gguf_architecture
        ]
        raise ModelError(
            f"models of type {dims.family} have no GGUF form here",
            expected=", ".join(written),
            received=dims.family,
            hint="--to peft or --to safetensors",
        )
    return name


def to_gguf(
    family: type[Family], name: str, weights: np.ndarray, dims: ModelDims, *, whole: bool = True
) -> np.ndarray:
    """Lay out a tensor as llama.cpp keeps it; `name` is transformers' name of the weight.

    Args:
        weights: [outputs, ...]; of a LoRA adapter, B [outputs, rank] goes the way of its weight's rows.
        whole: it is the weight itself, which takes the constant too; False for a change of it.
    """
    rows = weights.shape[0]
    column = (rows, *(1,) * (weights.ndim - 1))
    constant = np.asarray(family.gguf_tensor(name, np.zeros(column), dims))
    order = (
        np.asarray(
            family.gguf_tensor(name, np.arange(rows, dtype=np.float64).reshape(column), dims)
        )
        - constant
    )
    order = np.rint(order).astype(np.int64).reshape(-1)
    if not np.array_equal(np.sort(order), np.arange(rows)):
        raise ModelError(
            f"the GGUF layout of '{name}' cannot be inverted", received=family.model_type
        )
    return (weights - constant.astype(weights.dtype) if whole else weights)[np.argsort(order)]
