"""The state of an AdamW step on the CPU (layer_adam.py): the master parameter and the moments of a
flat array.

The master is one float32 array (`plain`), or the bfloat16 parameter itself and the lower 16 bits
next to it (`split`): the same float32 bits in fewer bytes. csrc/adam_storage.h is the compiled form.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.runtime_ops import native

TILE = 128
"""Elements that share a scale in int8 moments."""

_DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.uint8, torch.uint8),
}
KINDS = tuple(_DTYPES)
HALVES = (torch.bfloat16, torch.uint16, torch.int16)


class Traffic(NamedTuple):
    """Bytes a parameter: `stored` in host memory (without the gradient), `moved` by a step (reads
    and writes)."""

    stored: float
    moved: float


BYTES = {
    ("plain", "float32"): Traffic(14, 28),
    ("plain", "bfloat16"): Traffic(10, 20),
    ("plain", "int8"): Traffic(8 + 8 / TILE, 16 + 16 / TILE),
    ("split", "float32"): Traffic(12, 26),
    ("split", "bfloat16"): Traffic(8, 18),
    ("split", "int8"): Traffic(6 + 8 / TILE, 14 + 16 / TILE),
}
"""(master layout, kind of moments) to bytes, with bfloat16 gradients and, for `plain`, the bfloat16
copy."""


@dataclass
class Moments:
    """Both moments of an array of n elements.

    `float32`: m and v float32 [n]. `bfloat16`: both bfloat16 [n], rounded stochastically (a step
    changes v by less than half a unit of its last place). `int8`: m and v uint8 [n] and float32
    scales [ceil(n / 128)]: codes are floating-point numbers with 4 bits of mantissa, 3 bits of
    exponent and a sign for m, 4 of exponent for v (csrc/adam_storage.h), rounded stochastically.
    With a split master, v's sign bit belongs to the master, if v has one.
    """

    kind: str
    m: Tensor
    v: Tensor
    m_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def empty(cls, numel: int, kind: str = "float32", pin: bool = False) -> Moments:
        """Zero moments of `numel` elements; `pin` puts them into page-locked memory (needs CUDA).

        Raises:
            ModelError: an unknown kind.
        """
        if kind not in _DTYPES:
            raise ModelError("unknown kind of moments", expected=" or ".join(KINDS), received=kind)
        m, v = (torch.zeros(numel, dtype=dtype, pin_memory=pin) for dtype in _DTYPES[kind])
        if kind != "int8":
            return cls(kind, m, v)
        scales = [torch.zeros(-(-numel // TILE), pin_memory=pin) for _ in range(2)]
        return cls(kind, m, v, *scales)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its field's name, all flat."""
        named = {"m": self.m, "v": self.v, "m_scale": self.m_scale, "v_scale": self.v_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass
class HostState:
    """The optimizer's side of one array of n elements.

    Args:
        master: float32 [n] for `plain`; None for `split`.
        high: the bfloat16 parameters [n], bfloat16 or a 16-bit integer type; may be None for
            `plain`.
        low: the lower 16 bits [n] for `split`, uint16 or int16; None for `plain`.
        moments: of the same n.
        seed: of stochastic rounding; give every array its own.
        momentum: of Muon, for the first elements, which then have no moments.
    """

    master: Tensor | None
    high: Tensor | None
    low: Tensor | None
    moments: Moments
    seed: int = 0
    momentum: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the master and the moments by its field's name."""
        named = {"master": self.master, "high": self.high, "low": self.low}
        there = {name: tensor for name, tensor in named.items() if tensor is not None}
        return {**there, **self.moments.tensors()}


def split_(master: Tensor, high: Tensor, low: Tensor, moments: Moments | None) -> None:
    """Write a float32 master as the bfloat16 nearest to it and its lower 16 bits; ties go into v's
    sign bits.

    A NaN becomes the usual quiet one. With int8 moments, whose v has no sign, or without moments,
    ties round away from zero instead.

    Args:
        master: float32 [n].
        high: written; bfloat16 or a 16-bit integer type, n elements.
        low: written; uint16 or int16, n elements.
        moments: of n elements; v's signs are written. None: there are none, as of Muon.

    Raises:
        ModelError: a tensor of another dtype or size.
    """
    count = master.numel()
    check("master", master, (torch.float32,), count)
    kind, ties = _ties(high, low, moments, count)
    if (library := native.library()) is not None:
        pointers = (ctypes.c_void_p(address) for address in (high.data_ptr(), low.data_ptr(), ties))
        numbers = (ctypes.c_int64(kind), ctypes.c_int64(torch.get_num_threads()))
        library.ondevice_layer_adam_split(
            ctypes.c_void_p(master.data_ptr()), ctypes.c_int64(count), *pointers, *numbers
        )
        return
    torch_split_(master, high, low, moments)


def _ties(high: Tensor, low: Tensor, moments: Moments | None, count: int) -> tuple[int, int | None]:
    """Check the halves of a master, and return where C++ keeps its ties: kind and address of v."""
    if moments is not None:
        check_state(HostState(None, high, low, moments), count)
        return KINDS.index(moments.kind), moments.v.data_ptr()
    check("high", high, HALVES, count)
    check("low", low, HALVES[1:], count)
    return KINDS.index("int8"), None


def torch_split_(master: Tensor, high: Tensor, low: Tensor, moments: Moments | None) -> None:
    """Run `split_` by torch's own operations, wherever the tensors are."""
    bits = master.reshape(-1).view(torch.int32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = torch.where(
        nan, (bits & -(2**31)) | 0x7FC00000, bits
    )  # rounded, a NaN could become infinity
    low.view(torch.int16).view(-1).copy_(bits)
    upper = high.view(torch.int16).view(-1)
    if moments is None or moments.kind == "int8":
        upper.copy_((bits + 0x8000) >> 16)
        return
    odd = (bits >> 16) & 1
    upper.copy_((bits + 0x7FFF + odd) >> 16)
    tie = odd * ((bits & 0xFFFF) == 0x8000)
    moments.v.abs_()
    moments.v.copy_(torch.where(tie == 1, -moments.v, moments.v))


def merge(high: Tensor, low: Tensor, moments: Moments | None, out: Tensor | None = None) -> Tensor:
    """Merge the float32 master [n] that `split_`, `layer_adam` or `layer_muon` stored; into `out` if
    it is given.

    Raises:
        ModelError: a tensor of another dtype or size.
    """
    count = high.numel()
    kind, ties = _ties(high, low, moments, count)
    if out is None:
        out = torch.empty(count)
    check("out", out, (torch.float32,), count)
    if (library := native.library()) is not None:
        pointers = (ctypes.c_void_p(address) for address in (high.data_ptr(), low.data_ptr(), ties))
        numbers = (ctypes.c_int64(kind), ctypes.c_int64(count))
        target = ctypes.c_void_p(out.data_ptr())
        threads = ctypes.c_int64(torch.get_num_threads())
        library.ondevice_layer_adam_merge(*pointers, *numbers, target, threads)
        return out
    return torch_merge(high, low, moments, out)


def torch_merge(high: Tensor, low: Tensor, moments: Moments | None, out: Tensor) -> Tensor:
    """Run `merge` by torch's own operations, wherever the tensors are."""
    upper, difference = (half.view(torch.int16).view(-1).to(torch.int32) for half in (high, low))
    if moments is None or moments.kind == "int8":
        out.view(-1).copy_(((upper << 16) + difference).view(torch.float32))
        return out
    lower = difference & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & moments.v.signbit())
    out.view(-1).copy_(((upper - up.to(torch.int32) << 16) | lower).view(torch.float32))
    return out


def check_state(state: HostState, count: int | None = None) -> int:
    """Check a state and return its number of elements.

    Raises:
        ModelError: the state is neither plain nor split, or a tensor does not fit.
    """
    moments = state.moments
    if count is None:
        count = moments.m.numel()
    check_form(state)
    if state.master is not None:
        check("master", state.master, (torch.float32,), count)
    if state.high is not None:
        check("high", state.high, HALVES, count)
    if state.low is not None:
        check("low", state.low, HALVES[1:], count)
    if moments.kind not in _DTYPES:
        raise ModelError(
            "unknown kind of moments", expected=" or ".join(KINDS), received=moments.kind
        )
    for name, dtype in zip(("m", "v"), _DTYPES[moments.kind]):
        check(name, getattr(moments, name), (dtype,), count)
    if moments.kind == "int8":
        for name in ("m_scale", "v_scale"):
            check(name, getattr(moments, name), (torch.float32,), -(-count // TILE))
    return count


def check_form(state: HostState) -> None:
    """Check that a master is plain or split.

    Raises:
        ModelError: it is neither.
    """
    if (state.master is None) != (state.low is not None) or (
        state.low is not None and state.high is None
    ):
        names = [name for name in ("master", "high", "low") if getattr(state, name) is not None]
        raise ModelError(
            "the state is neither plain nor split",
            expected="master, or high and low",
            received=" and ".join(names),
        )


def check(name: str, tensor: Tensor | None, dtypes: tuple[torch.dtype, ...], count: int) -> None:
    fits = tensor is not None and tensor.dtype in dtypes and tensor.numel() == count
    if tensor is None or not fits or not tensor.is_contiguous() or tensor.device.type != "cpu":
        words = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        received = (
            "none"
            if tensor is None
            else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
        if tensor is not None and fits:
            received += f" with strides {list(tensor.stride())} on {tensor.device}"
        raise ModelError(
            f"layer_adam got a wrong {name}",
            expected=f"{' or '.join(words)}, {count} contiguous elements on the CPU",
            received=received,
        )
