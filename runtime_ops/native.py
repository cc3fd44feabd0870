"""The compiled C library (`csrc/c_api.cpp`) called through ctypes on CPU tensors."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings

import torch
from torch import Tensor

from ondevice.core.errors import DataError, OndeviceError
from ondevice.runtime_ops import build

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_WORD = ctypes.c_uint64


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled library, built at the first call; None without a compiler or with
    `ONDEVICE_NATIVE=0`."""
    if os.environ.get("ONDEVICE_NATIVE") == "0":
        return None
    try:
        loaded = ctypes.CDLL(str(build.build_library()))
    except (
        OndeviceError,
        OSError,
    ) as error:  # every op has a form in PyTorch: slower is better than not at all
        warnings.warn(f"the slower ops in PyTorch are used, because: {error}", stacklevel=2)
        return None
    for name in ("normal", "rademacher"):
        _declare(loaded, name, None, _WORD, _WORD, _INT, _INT, _INT, _INT, _POINTER)
    _declare(
        loaded,
        "q4_linear",
        None,
        _POINTER,
        _INT,
        _POINTER,
        _POINTER,
        _POINTER,
        _INT,
        _INT,
        _INT,
        _POINTER,
    )
    _declare(loaded, "q8_embedding", _INT, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER)
    _declare(
        loaded,
        "linear_cross_entropy",
        _INT,
        _POINTER,
        _INT,
        _POINTER,
        _INT,
        _INT,
        _POINTER,
        _POINTER,
    )
    _declare(
        loaded,
        "q8_linear_cross_entropy",
        _INT,
        _POINTER,
        _INT,
        _POINTER,
        _POINTER,
        _INT,
        _INT,
        _POINTER,
        _POINTER,
    )
    return loaded


def draw(
    kind: str, seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int
) -> Tensor:
    """Draw `normal` or `rademacher` (by `kind`): float32 [queries, count]."""
    out = torch.empty(queries, count)
    _call(
        kind, int(seed) & (2**64 - 1), int(step) & (2**64 - 1), tensor, queries, start, count, out
    )
    return out


def q4_linear(x: Tensor, packed: Tensor, scales: Tensor, mins: Tensor, group: int) -> Tensor:
    """Return float32 [..., in] to [..., out]; see `quantized`."""
    x = x.contiguous()
    outputs, inputs = scales.shape[0], x.shape[-1]
    out = x.new_empty(*x.shape[:-1], outputs)
    rows = x.numel() // inputs
    _call(
        "q4_linear",
        x,
        rows,
        packed.contiguous(),
        scales.contiguous(),
        mins.contiguous(),
        outputs,
        inputs,
        group,
        out,
    )
    return out


def q8_embedding(ids: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return int64 [...] to float32 [..., d]."""
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, weight.shape[1])
    bad = _call(
        "q8_embedding",
        ids,
        ids.numel(),
        weight.contiguous(),
        scales.contiguous(),
        *weight.shape,
        out,
    )
    refuse(bad, ids, weight.shape[0], "a token id")
    return out


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, scales: Tensor | None, labels: Tensor
) -> Tensor:
    """Return float32 [N, d] and labels [N] to losses [N]; `scales` is None for a float32 weight."""
    labels = labels.contiguous()
    out = torch.empty(hidden.shape[0])
    name = "linear_cross_entropy"
    head = [weight.contiguous()]
    if scales is not None:
        name = "q8_linear_cross_entropy"
        head.append(scales.contiguous())
    bad = _call(name, hidden.contiguous(), hidden.shape[0], *head, *weight.shape, labels, out)
    refuse(bad, labels, weight.shape[0], "a label")
    return out


def refuse(index: int | None, values: Tensor, vocabulary: int, what: str) -> None:
    """Raise DataError for the wrong id at `index` of `values`; None or -1 say that all are right."""
    if index is not None and index >= 0:
        raise DataError(
            f"{what} lies outside the vocabulary",
            expected=f"0 to {vocabulary - 1}",
            received=int(values.reshape(-1)[index]),
            hint="use the tokenizer that belongs to the model",
        )


def _declare(loaded: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> None:
    function = getattr(loaded, f"ondevice_{name}")
    function.argtypes = [*arguments, _INT]
    function.restype = result


def _call(name: str, *arguments: Tensor | int) -> int:
    loaded = library()
    if loaded is None:
        raise OndeviceError("the compiled ops are not available")
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    return getattr(loaded, f"ondevice_{name}")(*plain, torch.get_num_threads())
