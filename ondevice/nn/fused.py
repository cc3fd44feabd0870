"""Chains of element-by-element operations of a block as one Triton kernel each: norm, norm and
rotation, SwiGLU with its low-rank parts, and the loss of a chunk of tokens.

Each reads its operands once, computes in float32, and rounds once. `methods.mesp.torch.kernels` has
the same operations in PyTorch. Reductions are `tl.reduce`: Triton's interpreter, in which the tests
run, cannot call `tl.sum` once it is compiled.
"""

# Inside a kernel values are tensors of Triton, which its stubs do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from ondevice.nn.low_rank import LowRank

TILE = 4096
"""Elements of a program of the norms."""
WIDEST = 1 << 15
"""Widest row that a norm's program takes; it is in registers."""
MOST_RANK = 64
"""Largest rank that is summed inside a kernel; a larger one is worth a product."""
GLU_TILE = (32, 64)
"""Rows and columns of a program of SwiGLU: of tiles from 2,048 to 16,384 elements the quickest on an
H200."""
VOCAB_BLOCK = 8192
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter runs the kernels, not a GPU."""
_plus = tl.standard._sum_combine
_larger = tl.standard._elementwise_max
"""Triton's own, which its interpreter takes to NumPy."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of the rows of x [N, D], in new memory; a float32 factor of half precision
    is multiplied before rounding."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, width = x.shape
    if rows:
        tile = _tile(width)
        _norm[(triton.cdiv(rows, tile[0]),)](
            x, weight, y, rows, width, x.stride(0), eps, weight.dtype != x.dtype, *tile, num_warps=8
        )
    return y


def rms_norm_backward(x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor) -> Tensor:
    """Return g + the gradient of x [N, D] from that of its norm, in g's memory."""
    rows, width = x.shape
    if rows:
        tile = _tile(width)
        _norm_backward[(triton.cdiv(rows, tile[0]),)](
            x, weight, gn, g, rows, width, x.stride(0), gn.stride(0), g.stride(0), eps, *tile,
            num_warps=8,
        )  # fmt: skip
    return g


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, T, heads, h] in its memory by cos and sin [1 or B, T, 1, w], w at most h / 2."""
    _rotation(x, x, x, x, cos, sin, 0.0, normed=False, backward=False)
    return x


def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotation of the norm of each head of [B, T, heads, h], in new memory."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotation(x, weight, y, y, cos, sin, eps, normed=True, backward=False)
    return y


def norm_rotate_backward(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, g: Tensor
) -> Tensor:
    """Return the gradient of `norm_rotate`'s x from that of its result g, in g's memory."""
    _rotation(x, weight, g, g, cos, sin, eps, normed=True, backward=True)
    return g


def can_rotate(x: Tensor) -> bool:
    """Return True if tokens of [B, T, heads, h] lie one stride apart, each a whole row of heads."""
    batch, length, _, width = x.shape
    apart = batch == 1 or x.stride(0) == length * x.stride(1)
    return x.dtype in DTYPES and x.stride(3) == 1 and x.stride(2) == width and apart


def swiglu(gate: Tensor, up: Tensor, gate_part: LowRank | None, up_part: LowRank | None) -> Tensor:
    """Return silu(gate + its part) (up + its part) [N, F], in new memory."""
    act = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _glu(gate, up, act, (gate_part, up_part, None), backward=False)
    return act


def swiglu_backward(
    gate: Tensor, up: Tensor, g: Tensor, parts: tuple[LowRank | None, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and the activation, in the memory of the arguments.

    Args:
        parts: low-rank parts of gate, of up, and of g, the gradient of the activation.
    """
    _glu(gate, up, g, parts, backward=True)
    return gate, up, g


def loss_rows(
    logits: Tensor, targets: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return each row's negative log likelihood [n], and `scale` (softmax - one-hot) [n, V].

    Args:
        logits: float32 [n, V], contiguous.
        targets: int64 [n], each a column.
        dtype: of the gradient, which is in the memory of `logits`: one of half precision in the
            first half of each row's.
    """
    rows, vocab = logits.shape
    out = logits.view(dtype)[:, :vocab]
    nll = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(VOCAB_BLOCK, triton.next_power_of_2(vocab))
        _loss[(rows,)](logits, targets, out, nll, vocab, out.stride(0), scale, block, num_warps=8)
    return nll, out


def _tile(width: int) -> tuple[int, int]:
    """Return rows and columns of a norm's program."""
    columns = int(triton.next_power_of_2(width))
    return max(1, TILE // columns), columns


def _rotation(
    x: Tensor, weight: Tensor, y: Tensor, g: Tensor, cos: Tensor, sin: Tensor, eps: float,
    normed: bool, backward: bool,
) -> None:  # fmt: skip
    batch, length, heads, width = x.shape
    if not x.numel():
        return
    half = cos.shape[-1]
    columns = triton.next_power_of_2(half)
    tokens = max(1, TILE // 4 // columns)
    by_row = cos.shape[0] > 1
    grid = (triton.cdiv(batch * length, tokens), heads)
    _rotate[grid](
        x, weight, y, cos, sin, batch * length, length, width, half, x.stride(1), y.stride(1), eps,
        by_row, normed, backward, weight.dtype != x.dtype, tokens, columns, num_warps=4,
    )  # fmt: skip


def _glu(
    gate: Tensor, up: Tensor, third: Tensor, parts: tuple[LowRank | None, ...], backward: bool
) -> None:
    rows, width = gate.shape
    if not rows:
        return
    arguments = []
    ranks = [part.h.shape[1] for part in parts if part is not None]
    inner = max(16, triton.next_power_of_2(max(ranks, default=1)))
    for part in parts:
        if part is None:
            arguments += [gate, gate, 0, 0, 0, 0, 0.0]
        else:
            h, b = part.h, part.b
            arguments += [h, b, h.shape[1], h.stride(0), b.stride(0), b.stride(1), part.scale]
    grid = (triton.cdiv(width, GLU_TILE[1]), triton.cdiv(rows, GLU_TILE[0]))
    strides = (gate.stride(0), up.stride(0), third.stride(0))
    given = [part is not None for part in parts]
    _swiglu[grid](
        gate, up, third, rows, width, *strides, *arguments, *given, backward, inner, *GLU_TILE,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _norm(
    x, weight, y, rows, width, stride, eps, wide: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    v = tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.reduce(v * v, 1, _plus) / width + eps)
    n = v * r[:, None]
    if not wide:  # the norm is rounded before its factor, as transformers does
        n = n.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row[:, None] * width + col[None, :], n * w[None, :], mask=inside)


@triton.jit
def _norm_backward(
    x, weight, gn, g, rows, width, x_stride, gn_stride, g_stride, eps, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    v = tl.load(x + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    at = gn + row[:, None] * gn_stride + col[None, :]
    gw = tl.load(at, mask=inside, other=0.0).to(tl.float32) * w[None, :]
    before = tl.load(g + row[:, None] * g_stride + col[None, :], mask=inside, other=0.0)
    r = tl.rsqrt(tl.reduce(v * v, 1, _plus) / width + eps)
    mean = tl.reduce(gw * v, 1, _plus) / width
    gradient = (gw - v * (mean * r * r)[:, None]) * r[:, None]
    total = before.to(tl.float32) + gradient
    tl.store(g + row[:, None] * g_stride + col[None, :], total, mask=inside)


@triton.jit
def _rotate(
    x, weight, y, cos, sin, count, length, width, half, x_stride, y_stride, eps,
    by_row: tl.constexpr, normed: tl.constexpr, backward: tl.constexpr, wide: tl.constexpr,
    TOKENS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    col = tl.arange(0, HALF)
    inside = (token < count)[:, None] & (col < half)[None, :]
    place = token
    if not by_row:
        place = token % length
    angle = place[:, None] * half + col[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    at = token[:, None] * x_stride + head * width + col[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    to = y + token[:, None] * y_stride + head * width + col[None, :]
    if normed:
        w1 = tl.load(weight + col, mask=col < half, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight + half + col, mask=col < half, other=0.0).to(tl.float32)[None, :]
        squares = tl.reduce(first * first, 1, _plus) + tl.reduce(second * second, 1, _plus)
        r = tl.rsqrt(squares / width + eps)[:, None]
        if backward:  # rotated back, then through the norm
            g1 = tl.load(to, mask=inside, other=0.0).to(tl.float32)
            g2 = tl.load(to + half, mask=inside, other=0.0).to(tl.float32)
            gw1 = (g1 * c + g2 * s) * w1
            gw2 = (g2 * c - g1 * s) * w2
            mean = (tl.reduce(gw1 * first, 1, _plus) + tl.reduce(gw2 * second, 1, _plus))[
                :, None
            ] / width
            tl.store(to, (gw1 - first * (mean * r * r)) * r, mask=inside)
            tl.store(to + half, (gw2 - second * (mean * r * r)) * r, mask=inside)
        else:
            first = first * r
            second = second * r
            if not wide:
                first = first.to(y.dtype.element_ty).to(tl.float32)
                second = second.to(y.dtype.element_ty).to(tl.float32)
            first = first * w1
            second = second * w2
            tl.store(to, first * c - second * s, mask=inside)
            tl.store(to + half, second * c + first * s, mask=inside)
    else:
        tl.store(to, first * c - second * s, mask=inside)
        tl.store(to + half, second * c + first * s, mask=inside)


@triton.jit
def _low_rank(
    h, b, rank, h_stride, b_rank, b_col, scale, row, col, rows, width, INNER: tl.constexpr
):
    k = tl.arange(0, INNER)
    here = (row < rows)[:, None] & (k < rank)[None, :]
    left = tl.load(h + row[:, None] * h_stride + k[None, :], mask=here, other=0.0)
    there = (k < rank)[:, None] & (col < width)[None, :]
    right = tl.load(b + k[:, None] * b_rank + col[None, :] * b_col, mask=there, other=0.0)
    if INTERPRETED:  # it multiplies the bits of bfloat16
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    # Products of half precision are exact in the float32 sums.
    return tl.dot(left, right, input_precision="ieee") * scale


@triton.jit
def _swiglu(
    gate, up, third, rows, width, gate_stride, up_stride, third_stride,
    gh, gb, g_rank, gh_stride, gb_rank, gb_col, g_scale,
    uh, ub, u_rank, uh_stride, ub_rank, ub_col, u_scale,
    dh, db, d_rank, dh_stride, db_rank, db_col, d_scale,
    has_gate: tl.constexpr, has_up: tl.constexpr, has_third: tl.constexpr,
    backward: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    gate_at = gate + row[:, None] * gate_stride + col[None, :]
    up_at = up + row[:, None] * up_stride + col[None, :]
    third_at = third + row[:, None] * third_stride + col[None, :]
    a = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_at, mask=inside, other=0.0).to(tl.float32)
    if has_gate:
        a += _low_rank(
            gh, gb, g_rank, gh_stride, gb_rank, gb_col, g_scale, row, col, rows, width, INNER
        )
    if has_up:
        u += _low_rank(
            uh, ub, u_rank, uh_stride, ub_rank, ub_col, u_scale, row, col, rows, width, INNER
        )
    s = 1.0 / (1.0 + tl.exp(-a))
    silu = a * s
    if backward:
        g = tl.load(third_at, mask=inside, other=0.0).to(tl.float32)
        if has_third:
            g += _low_rank(
                dh, db, d_rank, dh_stride, db_rank, db_col, d_scale, row, col, rows, width, INNER
            )
        tl.store(gate_at, g * u * (s + silu * (1.0 - s)), mask=inside)
        tl.store(up_at, g * silu, mask=inside)
    tl.store(third_at, silu * u, mask=inside)


@triton.jit
def _loss(logits, targets, out, nll, vocab, out_stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    at = logits + row * vocab
    largest = float("-inf")
    total = 0.0
    for low in range(0, vocab, BLOCK):
        col = low + tl.arange(0, BLOCK)
        x = tl.load(at + col, mask=col < vocab, other=float("-inf"))
        higher = tl.maximum(largest, tl.reduce(x, 0, _larger))
        total = total * tl.exp(largest - higher) + tl.reduce(tl.exp(x - higher), 0, _plus)
        largest = higher
    lse = largest + tl.log(total)
    tl.store(nll + row, lse - tl.load(at + target))
    for low in range(0, vocab, BLOCK):
        col = low + tl.arange(0, BLOCK)
        x = tl.load(at + col, mask=col < vocab, other=float("-inf"))
        one = tl.where(col == target, 1.0, 0.0)
        # `out` is the logits' own memory: a block is written over what all threads have read.
        tl.debug_barrier()
        tl.store(out + row * out_stride + col, (tl.exp(x - lse) - one) * scale, mask=col < vocab)
