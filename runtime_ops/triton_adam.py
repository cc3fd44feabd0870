"""The AdamW step of layer_adam.py on a GPU, in one pass over the same storage: operation by
operation that of csrc/layer_adam.h, compiled without fused multiply-adds, so that both give the
same bits.

A state may lie on the host or on the accelerator, whatever suits the run: nothing else about it
changes.
"""

# Inside a kernel values are tensors of Triton, which its stubs do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.runtime_ops.adam_state import KINDS, TILE, HostState
from ondevice.runtime_ops.generator import mix_int

TILES = 8
"""Tiles of one program."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
MEAN_BITS = tl.constexpr(120 << 23)
SQUARE_BITS = tl.constexpr(112 << 23)
MEAN_LEAST, SQUARE_LEAST, SQUARE_FLOOR = (
    tl.constexpr(x) for x in (2.0**-7, 2.0**-15, 1.0625 * 2.0**-15)
)
MEAN_MOST, SQUARE_MOST = (tl.constexpr(float(np.float32(x))) for x in (1.92968, 1.93746))
MEAN_UNIT, SQUARE_UNIT = (
    tl.constexpr(float(np.float32(1) / np.float32(x))) for x in (1.92968, 1.93746)
)
FACTOR = tl.constexpr(0x915F77F5)
INCREMENT = tl.constexpr(0x6C078965)


def layer_adam(
    grad: Tensor, state: HostState, numbers: dict[str, float], step: int, scale: Tensor | None
) -> None:
    """Run one AdamW step of `state` in place, on the current stream.

    Args:
        grad: bfloat16 or float32 [n], on the GPU as all of the state.
        state: as of `layer_adam.layer_adam`.
        numbers: `layer_adam.numbers_of` the step.
        step: 1 for the first.
        scale: float32 [1], the factor of the gradient; None takes that in `numbers`.

    Raises:
        ModelError: a tensor is not contiguous.
    """
    moments = state.moments
    key = mix_int(mix_int(state.seed) + step)
    tensors = [
        t
        for t in (grad, state.master, state.high, state.low, *moments.tensors().values())
        if t is not None
    ]
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ModelError("a state on the GPU has a tensor that is not contiguous")
    if scale is None:
        scale = torch.full((1,), numbers["grad_scale"], device=grad.device)
    factor = scale.float()
    split = state.master is None
    none = grad.view(-1).view(torch.int16)
    halves = [none if t is None else t.view(-1).view(torch.int16) for t in (state.high, state.low)]
    codes = [moments.m, moments.v]
    if moments.kind == "bfloat16":
        codes = [t.view(torch.int16) for t in codes]
    scales = [none if t is None else t for t in (moments.m_scale, moments.v_scale)]
    count = grad.numel()
    _adam[(triton.cdiv(count, TILE * TILES),)](
        grad.view(-1), none if state.master is None else state.master.view(-1), *halves, *codes, *scales, factor,
        count, key - (1 << 64) if key >> 63 else key,
        *(numbers[name] for name in ("decay", "beta2", "weight1", "weight2", "root", "eps", "size")),
        KINDS.index(moments.kind), split, not split and state.high is not None, TILES, **OPTIONS,
    )  # fmt: skip


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _words(key, tile, TILES: tl.constexpr, SHARED: tl.constexpr):
    """`random_words`, with SHARED `shared_word`, of csrc/adam_storage.h for tiles [TILES, 1]:
    uint32 [TILES, 128]."""
    mixed = _mix64(key + tile.to(tl.uint64) * 0x9E3779B97F4A7C15)
    element = tl.arange(0, 128)[None, :]
    odd = element % 2
    if SHARED:
        element = element // 2
    lane, row = (element % 16).to(tl.uint32), element // 16
    h = mixed.to(tl.uint32) + lane * 0x9E3779B9
    h = (h ^ (h >> 16)) * 0x21F0AAAD + (mixed >> 32).to(tl.uint32)
    h = (h ^ (h >> 15)) * 0xD35A2D97
    h = h ^ (h >> 15)
    for i in tl.static_range(1, 8):
        h = tl.where(row >= i, h * FACTOR + INCREMENT, h)
    h = h ^ (h >> 15)
    return tl.where(odd == 1, (h << 16) | (h >> 16), h) if SHARED else h


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _quiet(bits):
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits & -0x80000000) | 0x7FC00000, bits)


@triton.jit
def _upper(bits):
    """The upper half of 32 bits, 0 to 65,535."""
    return (bits >> 16) & 0xFFFF


@triton.jit
def _narrowed(x, random):
    bits = _bits(x)
    return _upper(tl.where((bits & 0x7FFFFFFF) < 0x7F800000, bits + random, _quiet(bits)))


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _tile_scale(x):
    most = tl.reduce(_bits(x) & 0x7FFFFFFF, 1, _larger, keep_dims=True)
    return tl.where(most < 0x00800000, 0, most).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(scale, most):
    return tl.where(scale > 0, tl.div_rn(tl.full(scale.shape, most, tl.float32), scale), 0.0)


@triton.jit
def _mean_code(m, scale, words):
    x = tl.abs(m) * _inverse(scale, MEAN_MOST) + MEAN_LEAST
    x = tl.where(x > MEAN_LEAST, x, MEAN_LEAST)
    return (((_bits(x) + (words & 0x7FFFF).to(tl.int32)) >> 19) & 0x7F) | ((_bits(m) >> 24) & 0x80)


@triton.jit
def _square_code(v, scale, words):
    least = tl.where(scale > 0, SQUARE_FLOOR, SQUARE_LEAST)
    x = v * _inverse(scale, SQUARE_MOST) + SQUARE_LEAST
    x = tl.where(x > least, x, least)
    return ((_bits(x) + (words >> 13).to(tl.int32)) >> 19) & 0xFF


@triton.jit(do_not_specialize=["key"])
def _adam(
    grad, master, high, low, m, v, m_scale, v_scale, grad_scale, numel, key,
    decay, beta2, weight1, weight2, root, eps, size,
    KIND: tl.constexpr, SPLIT: tl.constexpr, COPY: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """KIND: 0 float32, 1 bfloat16, 2 int8 moments; COPY: a plain master has a bfloat16 copy."""
    tile = (tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES))[:, None]
    at = tile * 128 + tl.arange(0, 128)[None, :]
    here = at < numel
    some = tile * 128 < numel
    words = _words(key.to(tl.int64).to(tl.uint64, bitcast=True), tile, TILES, KIND == 2)
    # Storage to float32.
    tie = at < 0
    if KIND == 0:
        mean = tl.load(m + at, mask=here, other=0.0)
        square = tl.load(v + at, mask=here, other=0.0)
        tie = _bits(square) < 0
        square = tl.abs(square)
    elif KIND == 1:
        mean = (tl.load(m + at, mask=here, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        stored = tl.load(v + at, mask=here, other=0).to(tl.int32)
        tie = stored < 0
        square = ((stored & 0x7FFF) << 16).to(tl.float32, bitcast=True)
    else:
        code = tl.load(m + at, mask=here, other=0).to(tl.int32)
        mean = (((code & 0x7F) << 19) | MEAN_BITS).to(tl.float32, bitcast=True) - MEAN_LEAST
        mean = mean * (tl.load(m_scale + tile, mask=some, other=0.0) * MEAN_UNIT)
        mean = (_bits(mean) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        code = tl.load(v + at, mask=here, other=0).to(tl.int32)
        square = ((code << 19) | SQUARE_BITS).to(tl.float32, bitcast=True) - SQUARE_LEAST
        square = square * (tl.load(v_scale + tile, mask=some, other=0.0) * SQUARE_UNIT)
    if SPLIT:
        upper = tl.load(high + at, mask=here, other=0).to(tl.int32) << 16
        lower = tl.load(low + at, mask=here, other=0).to(tl.int32)
        if KIND == 2:
            p = (upper + lower).to(tl.float32, bitcast=True)
        else:
            lower = lower & 0xFFFF
            up = ((lower > 0x8000) | ((lower == 0x8000) & tie)).to(tl.int32) << 16
            p = ((upper - up) | lower).to(tl.float32, bitcast=True)
    else:
        p = tl.load(master + at, mask=here, other=0.0)
    # The step.
    x = tl.load(grad + at, mask=here, other=0.0).to(tl.float32) * tl.load(grad_scale)
    mean = mean + weight1 * (x - mean)
    square = square * beta2 + x * x * weight2
    p = p * decay - tl.div_rn(size * mean, tl.sqrt_rn(square) * root + eps)
    # float32 to storage.
    bits = _quiet(_bits(p))
    odd = _upper(bits) & 1
    nearest = _upper(bits + 0x7FFF + odd)
    half = ((bits & 0xFFFF) == 0x8000) & (odd == 1)
    if SPLIT:
        if KIND == 2:  # v has no sign for a tie
            nearest = _upper(bits + 0x8000)
        tl.store(high + at, nearest.to(tl.int16), mask=here)
        tl.store(low + at, bits.to(tl.int16), mask=here)
    else:
        tl.store(master + at, p, mask=here)
        if COPY:
            tl.store(high + at, nearest.to(tl.int16), mask=here)
    if KIND == 0:
        tl.store(m + at, mean, mask=here)
        sign = (half & SPLIT).to(tl.int32) << 31
        tl.store(
            v + at, ((_bits(square) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True), mask=here
        )
    elif KIND == 1:
        tl.store(m + at, _narrowed(mean, (words & 0xFFFF).to(tl.int32)).to(tl.int16), mask=here)
        stored = _narrowed(square, (words >> 16).to(tl.int32))
        if SPLIT:
            stored = (stored & 0x7FFF) | (half.to(tl.int32) << 15)
        tl.store(v + at, stored.to(tl.int16), mask=here)
    else:
        m_new, v_new = _tile_scale(mean), _tile_scale(square)
        tl.store(m + at, _mean_code(mean, m_new, words).to(tl.uint8), mask=here)
        tl.store(v + at, _square_code(square, v_new, words).to(tl.uint8), mask=here)
        tl.store(m_scale + tile, m_new, mask=some)
        tl.store(v_scale + tile, v_new, mask=some)
