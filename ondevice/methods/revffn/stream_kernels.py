"""A step of fixed-point streams, its inverse and its gradients as one Triton kernel each, which
give the bits of `FixedStreams`.

PyTorch's operations pass over a stream some twenty times a step; these read and write each tensor
once.
"""

# Inside a kernel values are tensors of Triton, which its stubs do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ondevice.methods.revffn.streams import FixedStreams, Mix, Stepped, packed_bytes

BLOCK = 4096
"""Elements of a program."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32 = {"enable_fp_fusion": False, "num_warps": 8}
"""A product that is added is rounded first, as PyTorch's operations do."""
_plus = tl.standard._sum_combine
_larger = tl.standard._elementwise_max
"""Triton's own, which its interpreter takes to NumPy."""


@dataclass(frozen=True)
class TritonStreams(FixedStreams):
    """`FixedStreams` on a GPU; what the kernels do not take goes to PyTorch's operations."""

    def to_float(self, stream: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if dtype not in DTYPES or not stream.is_contiguous():
            return super().to_float(stream, dtype)
        values = torch.empty_like(stream, dtype=dtype)
        _to_float[_grid(stream)](
            stream, values, stream.numel(), 2.0**-self.fraction_bits, BLOCK, num_warps=8
        )
        return values

    def step(
        self, u: Tensor, v: Tensor, branch: Tensor, mix: Mix, inverted: bool = True
    ) -> Stepped:
        if not _taken(u, v, branch):
            return super().step(u, v, branch, mix, inverted)
        w = torch.empty_like(u)
        peaks = torch.zeros(2, dtype=torch.int32, device=u.device)
        side = None
        if inverted and mix.bits:
            size = packed_bytes(u.numel(), mix.bits)
            side = torch.empty(size, dtype=torch.uint8, device=u.device)
        _step[_grid(u)](
            u, v, branch, w, w if side is None else side, peaks, u.numel(), self._scale(mix),
            _way(mix), mix.bits, side is not None, BLOCK, **FLOAT32,
        )  # fmt: skip
        return Stepped(w, side, peaks.view(torch.float32))

    def inverse_step(
        self, w: Tensor, v: Tensor, branch: Tensor, mix: Mix, side: Tensor | None
    ) -> Tensor:
        if not mix.past or not _taken(w, v, branch):
            return super().inverse_step(w, v, branch, mix, side)
        u = torch.empty_like(w)
        _inverse[_grid(w)](
            w, v, branch, w if side is None else side, u, w.numel(), self._scale(mix),
            _way(mix), mix.bits, side is not None, BLOCK, **FLOAT32,
        )  # fmt: skip
        return u

    def gradients(
        self, mix: Mix, du: Tensor | None, dv: Tensor, of_branch: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        tensors = (dv, of_branch) if du is None else (du, dv, of_branch)
        if not mix.present or not _taken(*tensors) or dv.dtype != torch.float32:
            return super().gradients(mix, du, dv, of_branch)
        older = None
        if mix.past:
            older = torch.empty_like(dv)
        newer = torch.empty_like(dv)
        _gradients[_grid(dv)](
            dv if du is None else du, dv, of_branch, newer if older is None else older, newer,
            dv.numel(), mix.past, mix.present, du is not None, older is not None, BLOCK, **FLOAT32,
        )  # fmt: skip
        return older, newer

    def _scale(self, mix: Mix) -> float:
        return mix.branch * 2.0**self.fraction_bits


def _taken(*tensors: Tensor) -> bool:
    """Return True if all are contiguous, and those of floats in a dtype that the kernels read."""
    return all(x.is_contiguous() and (x.dtype in DTYPES or x.dtype == torch.int32) for x in tensors)


def _grid(x: Tensor) -> tuple[int]:
    return (max(1, -(-x.numel() // BLOCK)),)


def _way(mix: Mix) -> int:
    """Return how u goes in: 0 not at all, 1 as it is, 2 and 3 its higher bits, added and taken off."""
    if not mix.past or mix.past == 1.0:
        return int(mix.past)
    return 2 if mix.past > 0 else 3


# Spelt out as in `nn.fused`, for Triton's interpreter: another module's would be compiled ones.
@triton.jit
def _here(n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < n


@triton.jit
def _rounded(x):
    """The nearest integer as float32, the even one of two: float32 has no fraction from 2^23 on."""
    size = tl.abs(x)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def _add_peak(peaks, values):
    """The largest magnitude as the bits of a float32, whose order is that of integers; NaN is above
    all."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(peaks, tl.reduce(bits, 0, _larger))


@triton.jit
def _to_float(stream, values, n, scale, BLOCK: tl.constexpr):
    at, inside = _here(n, BLOCK)
    x = tl.load(stream + at, mask=inside, other=0).to(tl.float32) * scale
    tl.store(values + at, x, mask=inside)


@triton.jit
def _pack_field(side, first, low, n, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    EACH: tl.constexpr = 8 // WIDTH
    field = tl.reshape((low >> SHIFT) & ((1 << WIDTH) - 1), (BLOCK // EACH, EACH))
    byte = tl.reduce(field << (tl.arange(0, EACH) * WIDTH)[None, :], 1, _plus)
    at = tl.program_id(0).to(tl.int64) * (BLOCK // EACH) + tl.arange(0, BLOCK // EACH)
    tl.store(side + first + at, byte.to(tl.uint8), mask=at * EACH < n)
    return first + (n + EACH - 1) // EACH


@triton.jit
def _unpack_field(side, first, low, at, inside, n, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    EACH: tl.constexpr = 8 // WIDTH
    byte = tl.load(side + first + at // EACH, mask=inside, other=0).to(tl.int32)
    field = (byte >> ((at % EACH) * WIDTH).to(tl.int32)) & ((1 << WIDTH) - 1)
    return low | (field << SHIFT), first + (n + EACH - 1) // EACH


@triton.jit
def _pack(side, u, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """See `streams.pack`: fields of 8, 4, 2 and 1 bits, from the lowest bit on."""
    first = 0
    if BITS & 8:
        first = _pack_field(side, first, u, n, 0, 8, BLOCK)
    if BITS & 4:
        first = _pack_field(side, first, u, n, BITS & 8, 4, BLOCK)
    if BITS & 2:
        first = _pack_field(side, first, u, n, BITS & 12, 2, BLOCK)
    if BITS & 1:
        first = _pack_field(side, first, u, n, BITS & 14, 1, BLOCK)


@triton.jit
def _unpack(side, at, inside, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    low = tl.full((BLOCK,), 0, tl.int32)
    first = 0
    if BITS & 8:
        low, first = _unpack_field(side, first, low, at, inside, n, 0, 8)
    if BITS & 4:
        low, first = _unpack_field(side, first, low, at, inside, n, BITS & 8, 4)
    if BITS & 2:
        low, first = _unpack_field(side, first, low, at, inside, n, BITS & 12, 2)
    if BITS & 1:
        low, first = _unpack_field(side, first, low, at, inside, n, BITS & 14, 1)
    return low


@triton.jit
def _step(
    u, v, branch, w, side, peaks, n, scale, WAY: tl.constexpr, BITS: tl.constexpr,
    KEEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, inside = _here(n, BLOCK)
    scaled = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32) * scale
    total = _rounded(scaled).to(tl.int32)
    if WAY == 1:
        total += tl.load(u + at, mask=inside, other=0)
    else:
        newer = tl.load(v + at, mask=inside, other=0)
        total += newer
        if WAY > 1:
            older = tl.load(u + at, mask=inside, other=0)
            high = (older >> BITS) - (newer >> BITS)
            total = total + high if WAY == 2 else total - high
            if KEEPS:
                _pack(side, older, n, BITS, BLOCK)
    tl.store(w + at, total, mask=inside)
    _add_peak(peaks, scaled)
    _add_peak(peaks + 1, tl.where(inside, total, 0).to(tl.float32))


@triton.jit
def _inverse(
    w, v, branch, side, u, n, scale, WAY: tl.constexpr, BITS: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at, inside = _here(n, BLOCK)
    scaled = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32) * scale
    rest = tl.load(w + at, mask=inside, other=0) - _rounded(scaled).to(tl.int32)
    if WAY > 1:
        newer = tl.load(v + at, mask=inside, other=0)
        rest = rest - newer if WAY == 2 else newer - rest
        rest = (rest + (newer >> BITS)) << BITS
        if KEPT:
            rest = rest | _unpack(side, at, inside, n, BITS, BLOCK)
    tl.store(u + at, rest, mask=inside)


@triton.jit
def _gradients(
    du, dv, of_branch, older, newer, n, past, present, ADDS: tl.constexpr, OLDER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at, inside = _here(n, BLOCK)
    g = tl.load(dv + at, mask=inside, other=0.0)
    if OLDER:
        tl.store(older + at, past * g, mask=inside)
    total = present * g
    if ADDS:
        total = tl.load(du + at, mask=inside, other=0.0) + total
    total += tl.load(of_branch + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(newer + at, total, mask=inside)
