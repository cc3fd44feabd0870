"""The generator on CUDA, and the two kernels of a zeroth-order step that never store noise.

Importing this file imports Triton; `torch_ops` does so only for CUDA tensors. The arithmetic is
that of `csrc/generator.cpp`, operation by operation, and kernels are compiled without fused
multiply-adds, so that Gaussians have the same bits as the compiled CPU form. Every function may be
captured in a CUDA graph: seed and step are read on the device.
"""

# Inside a kernel values are tensors of Triton, which its stubs do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.runtime_ops.generator import noise_kind

BLOCK = 1024
"""Elements of one program; a multiple of 64, the signs in a word."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def draw(
    seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int, kind: str
) -> Tensor:
    """Draw `generator.normal` or `.rademacher` on the device of `seed`: float32 [queries, count]."""
    out = torch.empty(queries, count, dtype=torch.float32, device=seed.device)
    kind = noise_kind(kind)
    base = start // 64 * 64
    blocks = triton.cdiv(start + count - base, BLOCK)
    if queries and count:
        grid = (blocks, queries)
        _draw[grid](out, seed, step, tensor, base, start, count, kind == "normal", BLOCK, **OPTIONS)
    return out


def perturb(
    flat: Tensor,
    seed: Tensor,
    step: Tensor,
    queries: int,
    eps: float,
    kind: str,
    out_dtype: torch.dtype = torch.float32,
    one_sided: bool = False,
    tensor: int = 0,
) -> Tensor:
    """Compute all perturbed copies of a flat parameter vector in one pass.

    Args:
        flat: float32 [P].
        seed, step: int64 [1] on the device.
        eps: the perturbation scale.
        kind: "gaussian" or "rademacher".
        one_sided: the unperturbed copy first, then flat + eps z_i; else flat + eps z_i, then flat -
            eps z_i.
        tensor: the stream.

    Returns:
        `out_dtype` [queries + 1, P] if `one_sided`, else [2 queries, P].

    Raises:
        ModelError: `flat` is not a contiguous float32 vector.
        ConfigError: an unknown kind.
    """
    normal = noise_kind(kind) == "normal"
    _check(flat)
    size = flat.shape[0]
    copies = queries + 1 if one_sided else 2 * queries
    out = torch.empty(copies, size, dtype=out_dtype, device=flat.device)
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _perturb[grid](
            flat, out, seed, step, tensor, size, queries, eps, normal, one_sided, BLOCK, **OPTIONS
        )
    return out


def apply_update(
    flat: Tensor, seed: Tensor, step: Tensor, coefficients: Tensor, kind: str, tensor: int = 0
) -> Tensor:
    """Compute flat - sum_i coefficients[i] z_i, with z regenerated and never stored.

    Args:
        flat: float32 [P].
        seed, step: int64 [1] on the device.
        coefficients: float32 [queries] on the device.
        kind, tensor: as for `perturb`.

    Returns:
        float32 [P], a new vector.

    Raises:
        ModelError, ConfigError: as for `perturb`.
    """
    normal = noise_kind(kind) == "normal"
    _check(flat)
    out = torch.empty_like(flat)
    if flat.shape[0]:
        grid = (triton.cdiv(flat.shape[0], BLOCK),)
        queries = coefficients.shape[0]
        weights = coefficients.contiguous()
        _update[grid](
            flat, out, seed, step, tensor, flat.shape[0], weights, queries, normal, BLOCK, **OPTIONS
        )
    return out


def _check(flat: Tensor) -> None:
    if flat.dim() != 1 or flat.dtype != torch.float32 or not flat.is_contiguous():
        raise ModelError(
            "the flat parameter vector has a wrong layout",
            expected="contiguous float32 [P]",
            received=f"{flat.dtype} {list(flat.shape)}",
        )


@triton.jit
def _mix(x):
    """The SplitMix64 finaliser; x is uint64, so that shifts are logical and products wrap around."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _next_key(key, counter):
    return _mix(key + (counter.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)


@triton.jit
def _step_key(seed_ptr, step_ptr):
    seed = tl.load(seed_ptr).to(tl.uint64, bitcast=True)
    step = tl.load(step_ptr).to(tl.uint64, bitcast=True)
    return _next_key(_mix(seed + 0x9E3779B97F4A7C15), step)


@triton.jit
def _words(key, first, COUNT: tl.constexpr):
    index = first.to(tl.uint64) + tl.arange(0, COUNT).to(tl.uint64) + 1
    return _mix(key + index * 0x9E3779B97F4A7C15)


@triton.jit
def _log_unit(x):
    """Natural logarithm of floats in (0, 1], as in generator.cpp."""
    shifted = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (shifted >> 23).to(tl.float32)
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    z = f * f
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    y = p * f * z + exponent * -2.12194440e-4
    y = y - z * 0.5
    return (f + y) + exponent * 0.693359375


@triton.jit
def _normals(words):
    """Pairs of normals of each word: cosine, sine."""
    high = (words >> 32).to(tl.uint32)
    upper = (high >> 16).to(tl.int32).to(tl.float32) * 65536.0
    u32 = upper + (high & 0xFFFF).to(tl.int32).to(tl.float32)
    uniform = (u32 + 0.5) * 2.3283064365386963e-10
    turn = ((words & 0xFFFFFF).to(tl.int32).to(tl.float32) - 8388608.0) * 5.9604644775390625e-8
    radius = tl.sqrt_rn(_log_unit(uniform) * -2.0)
    angle = turn * 6.283185307179586
    turns = (angle * 0.636619772367581343 + 12582912.0) - 12582912.0
    quadrant = turns.to(tl.int32)
    f = angle - turns * 1.5703125
    f = f - turns * 4.837512969970703125e-4
    f = f - turns * 7.549789948768648e-8
    z = f * f
    s = ((z * -1.9515295891e-4 + 8.3321608736e-3) * z - 1.6666654611e-1) * z * f + f
    c = (
        ((z * 2.443315711809948e-5 - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z
        - z * 0.5
        + 1.0
    )
    odd = (quadrant & 1) != 0
    sine = tl.where(odd, c, s).to(tl.int32, bitcast=True) ^ ((quadrant & 2) << 30)
    cosine = tl.where(odd, s, c).to(tl.int32, bitcast=True) ^ (((quadrant + 1) & 2) << 30)
    return radius * cosine.to(tl.float32, bitcast=True), radius * sine.to(tl.float32, bitcast=True)


@triton.jit
def _noise(key, base, NORMAL: tl.constexpr, BLOCK: tl.constexpr):
    """Elements base .. base + BLOCK - 1 of a stream; base (int64) is a multiple of 64."""
    if NORMAL:
        cosine, sine = _normals(_words(key, base >> 1, BLOCK // 2))
        return tl.reshape(tl.join(cosine, sine), [BLOCK])
    else:
        words = _words(key, base >> 6, BLOCK // 64)
        shifts = (63 - tl.arange(0, 64)).to(tl.uint64)
        bits = (words[:, None] >> shifts[None, :]) & 1
        return tl.reshape(1.0 - 2.0 * bits.to(tl.int32).to(tl.float32), [BLOCK])


@triton.jit
def _draw(out, seed, step, tensor, base, start, count, NORMAL: tl.constexpr, BLOCK: tl.constexpr):
    query = tl.program_id(1).to(tl.int64)
    key = _next_key(_next_key(_step_key(seed, step), query), tl.full([], 0, tl.int64) + tensor)
    first = tl.program_id(0).to(tl.int64) * BLOCK + base
    position = first + tl.arange(0, BLOCK) - start
    mask = (position >= 0) & (position < count)
    tl.store(out + query * count + position, _noise(key, first, NORMAL, BLOCK), mask=mask)


@triton.jit
def _perturb(
    flat, out, seed, step, tensor, size, queries, eps,
    NORMAL: tl.constexpr, ONE_SIDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    position = first + tl.arange(0, BLOCK)
    mask = position < size
    value = tl.load(flat + position, mask=mask, other=0.0)
    step_key = _step_key(seed, step)
    stream = tl.full([], 0, tl.int64) + tensor
    if ONE_SIDED:
        tl.store(out + position, value.to(out.dtype.element_ty), mask=mask)
    for i in range(queries):
        row = tl.full([], 0, tl.int64) + i
        key = _next_key(_next_key(step_key, row), stream)
        z = _noise(key, first, NORMAL, BLOCK) * eps
        if ONE_SIDED:
            tl.store(
                out + (row + 1) * size + position, (value + z).to(out.dtype.element_ty), mask=mask
            )
        else:
            tl.store(out + row * size + position, (value + z).to(out.dtype.element_ty), mask=mask)
            tl.store(
                out + (row + queries) * size + position,
                (value - z).to(out.dtype.element_ty),
                mask=mask,
            )


@triton.jit
def _update(
    flat,
    out,
    seed,
    step,
    tensor,
    size,
    coefficients,
    queries,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    position = first + tl.arange(0, BLOCK)
    mask = position < size
    step_key = _step_key(seed, step)
    stream = tl.full([], 0, tl.int64) + tensor
    total = tl.full([BLOCK], 0.0, tl.float32)
    for i in range(queries):
        row = tl.full([], 0, tl.int64) + i
        key = _next_key(_next_key(step_key, row), stream)
        total += tl.load(coefficients + row) * _noise(key, first, NORMAL, BLOCK)
    value = tl.load(flat + position, mask=mask, other=0.0)
    tl.store(out + position, value - total, mask=mask)
