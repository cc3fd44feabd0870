"""MLX's packed form of a model: matrices in affine groups of 64 columns, every other parameter in
float16."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import MissingPackageError, ModelError

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.models.families.base import Family

GROUP = 64
PARTS = ("weight", "scales", "biases")


def mlx_core() -> Any:
    """Return `mlx.core`; MissingPackageError if mlx or mlx-lm is not installed."""
    try:
        import mlx.core as mx
        import mlx_lm  # noqa: F401 - knows which models the form is for
    except ImportError:
        raise MissingPackageError(
            "mlx is not installed", hint="pip install 'ondevice-train[mlx]'"
        ) from None
    return mx


def check_packs(family: type[Family], dims: ModelDims) -> None:
    """Refuse a model that has no packed form here.

    Raises:
        ModelError: a mixture of experts, GPT-2, or a type that the installed mlx-lm does not read.
        MissingPackageError: mlx or mlx-lm is not installed.
    """
    if dims.experts:
        raise ModelError(f"a mixture of experts ({dims.family}) has no packed MLX form here")
    if family.stores_inputs_first:
        raise ModelError(
            f"{dims.family} models have no packed MLX form here: mlx-lm names their weights otherwise"
        )
    mlx_core()
    from mlx_lm.utils import MODEL_REMAPPING

    name = MODEL_REMAPPING.get(dims.family, dims.family)
    if importlib.util.find_spec(f"mlx_lm.models.{name}") is None:
        raise ModelError(
            f"the installed mlx-lm has no models of type {dims.family}",
            expected="a type that it reads",
            received=dims.family,
        )


def is_packed(shape: tuple[int, ...]) -> bool:
    """Return True for a matrix of full groups."""
    return len(shape) == 2 and shape[1] % GROUP == 0


def pack(value: np.ndarray, bits: int) -> list[np.ndarray]:
    """Codes uint32 [rows, columns * bits / 32], scales and biases float16 [rows, columns / 64]."""
    mx = mlx_core()
    with mx.stream(mx.cpu):
        packed = mx.quantize(mx.array(value.astype(np.float16)), group_size=GROUP, bits=bits)
        return [np.array(part) for part in packed]


def unpack(parts: list[Any], bits: int) -> np.ndarray:
    """Return what MLX reads of `pack`'s parts: numbers of float16 in float32 [rows, columns]."""
    mx = mlx_core()
    with mx.stream(mx.cpu):
        value = mx.dequantize(*map(mx.array, parts), group_size=GROUP, bits=bits)
        return np.array(value).astype(np.float32)


def rounded(value: np.ndarray, bits: int) -> np.ndarray:
    """Return a parameter's numbers in the packed form, in float32.

    Rounding them once more gives others: a group's levels follow from its least and largest number,
    and the rounding moves one of the two.
    """
    if is_packed(value.shape):
        return unpack(pack(value, bits), bits)
    return value.astype(np.float16).astype(np.float32)
