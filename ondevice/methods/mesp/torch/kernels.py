"""The operations that the stages are made of: products, norm, rotary embedding, SwiGLU and causal
attention, forward and backward, for eager PyTorch; `graph_kernels` has those of a graph that is
exported, and `triton_kernels` those for a GPU.

Attention has no score matrix of the whole sequence, and three algorithms. `flash` and `cudnn`:
FlashAttention's and cuDNN's own pairs of kernels, on CUDA in half precision, whichever PyTorch
itself would take; they keep one number a query and head. `chunks`: written out (appendix A.2) over
chunks of queries, each against the keys that it sees, for float32 and for devices without such
kernels. All scores of a query are there at once, so a chunk's softmax is exact, and nothing of the
forward pass is kept: the backward pass needs queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from ondevice.methods.mesp.memory import CHUNK_QUERIES, CHUNK_SCORES
from ondevice.nn.cross_entropy import (
    cast,
    exp_sums,
    joined,
    label_logits,
    logits_gradient,
    wide,
)
from ondevice.nn.low_rank import LowRank

Algorithm = Literal["flash", "cudnn", "chunks"]
GPU_CHUNKS = 64
"""A GPU's chunk is so many times as large: its launches cost more than its memory."""
FLASH_HEAD = 256
"""Widest head that FlashAttention takes."""


@dataclass(frozen=True)
class Scores:
    """How scores are made: q k^T times `scale`, of the last `window` tokens.

    Attributes:
        window: number of tokens that a query sees, itself included; 0 is all before it.
    """

    scale: float
    window: int = 0


def algorithm_for(q_BTHh: Tensor, k_BTKh: Tensor, v_BTKh: Tensor) -> Algorithm:
    """Choose by dtype, device and shape."""
    half = q_BTHh.dtype in (torch.bfloat16, torch.float16)
    width = q_BTHh.shape[-1]
    if not (q_BTHh.is_cuda and half and width % 8 == 0 and width <= FLASH_HEAD):
        return "chunks"
    q, k, v = (x.transpose(1, 2) for x in (q_BTHh, k_BTKh, v_BTKh))
    grouped = q.shape[1] != k.shape[1]
    chosen = torch.ops.aten._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=grouped)
    return (
        "cudnn" if chosen == SDPBackend.CUDNN_ATTENTION.value and q.shape[2] > 1 else "flash"
    )  # cuDNN needs two


def attend(
    q_BTHh: Tensor, k_BTKh: Tensor, v_BTKh: Tensor, how: Scores | None = None
) -> tuple[Tensor, Any]:
    """Compute softmax(q k^T / sqrt(h)) v under the causal mask, or with scores made as `how` says.

    Args:
        q_BTHh: [rows, tokens, heads, head_dim]; keys and values have H / G heads, each for G of the
            queries'.

    Returns:
        [rows, tokens, heads, head_dim], contiguous, and what the backward pass wants of it.
    """
    how = how or Scores(q_BTHh.shape[-1] ** -0.5)
    algorithm = "chunks" if how.window else algorithm_for(q_BTHh, k_BTKh, v_BTKh)
    if algorithm == "chunks":
        return attend_in_chunks(q_BTHh, k_BTKh, v_BTKh, how=how), None
    q, k, v = (x.transpose(1, 2) for x in (q_BTHh, k_BTKh, v_BTKh))
    if algorithm == "cudnn":
        outputs = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, scale=how.scale
        )
    else:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, scale=how.scale
        )
    return outputs[0].transpose(1, 2).contiguous(), (algorithm, *outputs[:8])


def attend_branches(
    q_BTHh: Tensor, k_BTKh: Tensor, v_BTKh: Tensor, mask_B1TT: Tensor, how: Scores
) -> Tensor:
    """Compute `attend` of prompts with their continuations, which `mask_B1TT` keeps apart: a prompt
    attends to itself once. Float32 sums have the order of `attend`'s, as two orders differ by 1e-5
    nats after 30 layers."""
    if algorithm_for(q_BTHh, k_BTKh, v_BTKh) == "chunks":
        return attend_in_chunks(q_BTHh, k_BTKh, v_BTKh, mask_B1TT, how)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHh, k_BTKh, v_BTKh))
    grouped = q.shape[1] != k.shape[1]
    o = functional.scaled_dot_product_attention(
        q, k, v, mask_B1TT, scale=how.scale, enable_gqa=grouped
    )
    return o.transpose(1, 2)


def attend_backward(
    g_BTHh: Tensor,
    q_BTHh: Tensor,
    k_BTKh: Tensor,
    v_BTKh: Tensor,
    kept: Any,
    how: Scores | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their shapes, from that of the output."""
    how = how or Scores(q_BTHh.shape[-1] ** -0.5)
    if kept is None:
        return attend_in_chunks_backward(g_BTHh, q_BTHh, k_BTKh, v_BTKh, how=how)
    g, q, k, v = (x.transpose(1, 2) for x in (g_BTHh, q_BTHh, k_BTKh, v_BTKh))
    algorithm, out, lse, *lengths, seed, offset = kept
    aten = torch.ops.aten
    if algorithm == "cudnn":
        backward = aten._scaled_dot_product_cudnn_attention_backward
        gradients = backward(
            g, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, True, scale=how.scale
        )
    else:
        backward = aten._scaled_dot_product_flash_attention_backward
        gradients = backward(
            g, q, k, v, out, lse, *lengths, 0.0, True, seed, offset, scale=how.scale
        )
    gq, gk, gv = (x.transpose(1, 2) for x in gradients)
    return gq, gk, gv


def attend_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, how: Scores | None = None
) -> Tensor:
    """Return attention written out.

    Args:
        mask: [tokens, tokens] or [rows, 1, tokens, tokens], added to the scores; then chunks are
            joined instead of written into one tensor, as an exported graph has to: there a write
            into a slice copies the whole.
    """
    how = how or Scores(q.shape[-1] ** -0.5)
    keys = _by_head(k)
    values = _by_head(v)
    out = None
    if mask is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    chunks: list[Tensor] = []
    for low, high in _chunks(q):
        p = _probabilities(_group(q[:, low:high], k.shape[2]), keys[:, :high], low, mask, how)
        o = _ungroup(torch.bmm(p, values[:, :high]), q, high - low)
        if out is None:
            chunks.append(o)
        else:
            out[:, low:high] = o
    if out is not None:
        return out
    return joined(chunks, 1)


def attend_in_chunks_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    how: Scores | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute appendix A.2, a chunk of queries after the other: with P the probabilities and dO the
    output's gradient, dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(P dP)) / sqrt(h), dQ = dS K, dK
    = dS^T Q.
    """
    how = how or Scores(q.shape[-1] ** -0.5)
    keys = _by_head(k)
    values = _by_head(v)
    gq = None
    if mask is None:
        gq = torch.empty_like(q, memory_format=torch.contiguous_format)
    gqs: list[Tensor] = []
    gk = gv = None
    # The last chunk sees all keys, so it makes gk and gv whole; the ones before it add to their
    # first keys.
    for low, high in reversed(_chunks(q)):
        chunk = _group(q[:, low:high], k.shape[2])
        grad = _group(g[:, low:high], k.shape[2])
        p = _probabilities(chunk, keys[:, :high], low, mask, how)
        gv = _add_first(gv, torch.bmm(p.transpose(1, 2), grad), mask is None)
        gs = torch.bmm(grad, values[:, :high].transpose(1, 2)).mul_(p)
        # In place, so that of a chunk's [queries, keys] there are three: p, this, and one product.
        gs.sub_(p * gs.sum(-1, keepdim=True)).mul_(how.scale)
        del p
        gk = _add_first(gk, torch.bmm(gs.transpose(1, 2), chunk), mask is None)
        gq_chunk = _ungroup(torch.bmm(gs, keys[:, :high]), q, high - low)
        if gq is None:
            gqs.insert(0, gq_chunk)
        else:
            gq[:, low:high] = gq_chunk
    assert gk is not None and gv is not None  # noqa: S101 - there is a chunk
    if gq is None:
        gq = joined(gqs, 1)
    return gq, _by_token(gk, k), _by_token(gv, v)


def chunk_queries(rows: int, heads: int, length_tokens: int, gpu: bool = False) -> int:
    """Return queries of a chunk."""
    scores = CHUNK_SCORES
    if gpu:
        scores *= GPU_CHUNKS
    return min(length_tokens, max(CHUNK_QUERIES, scores // (rows * heads * length_tokens)))


def _chunks(q: Tensor) -> list[tuple[int, int]]:
    length = q.shape[1]
    size = chunk_queries(q.shape[0], q.shape[2], length, q.is_cuda)
    return [(low, min(low + size, length)) for low in range(0, length, size)]


def _probabilities(
    chunk_NCh: Tensor, keys_NSh: Tensor, first: int, mask: Tensor | None, how: Scores
) -> Tensor:
    """Return the softmax of [rows * kv heads, group * queries, keys]; `first` is the first query's
    number."""
    last = keys_NSh.shape[1]
    queries = last - first
    scores = torch.bmm(chunk_NCh * how.scale, keys_NSh.transpose(1, 2))
    groups = chunk_NCh.shape[1] // queries
    if mask is not None and mask.ndim == 4:
        by_query = scores.view(len(mask), -1, queries, last)
        by_query += mask[..., first:last, :last]
    elif mask is not None:
        seen = mask[first:last, :last]
        if groups > 1:
            seen = seen.repeat(groups, 1)
        scores = scores + seen[None]
    else:
        ahead = torch.ones(queries, queries, dtype=torch.bool, device=scores.device).triu_(1)
        by_query = scores.view(scores.shape[0], -1, queries, last)
        by_query[..., first:].masked_fill_(ahead, float("-inf"))
        if how.window:
            number = torch.arange(first, last, device=scores.device)[:, None]
            behind = number - torch.arange(last, device=scores.device)[None] >= how.window
            by_query.masked_fill_(behind, float("-inf"))
    return cast(torch.softmax(wide(scores), -1), scores.dtype)


def _add_first(total: Tensor | None, part: Tensor, in_place: bool) -> Tensor:
    """`part`, of the first keys, added to `total` of all keys; sums of half precision are
    float32."""
    if total is None:
        return wide(part)
    count = part.shape[1]
    if in_place:
        total[:, :count] += part
        return total
    return torch.cat((total[:, :count] + part, total[:, count:]), 1)


def _by_head(x_BTKh: Tensor) -> Tensor:
    """[rows, tokens, kv heads, h] -> [rows * kv heads, tokens, h]."""
    return x_BTKh.transpose(1, 2).reshape(-1, x_BTKh.shape[1], x_BTKh.shape[3])


def _by_token(x_NTh: Tensor, like_BTKh: Tensor) -> Tensor:
    rows, length, heads, width = like_BTKh.shape
    return cast(x_NTh.view(rows, heads, length, width).transpose(1, 2), like_BTKh.dtype)


def _group(chunk_BCHh: Tensor, kv_heads: int) -> Tensor:
    """[rows, queries, heads, h] -> [rows * kv heads, group * queries, h]."""
    rows, _, _, width = chunk_BCHh.shape
    return chunk_BCHh.transpose(1, 2).reshape(rows * kv_heads, -1, width)


def _ungroup(x: Tensor, like_BTHh: Tensor, queries: int) -> Tensor:
    rows, _, heads, width = like_BTHh.shape
    return x.view(rows, heads, queries, width).transpose(1, 2)


Position = tuple[Tensor, Tensor]
"""cos and sin, each [1, tokens, 1, head_dim / 2]; [rows, ...] if sequences have several rows
each."""
Parts = tuple[LowRank | None, ...]


class Matrix(Protocol):
    """A frozen weight [outputs, inputs], dense or to be made dense."""

    def dense(self) -> Tensor: ...


@dataclass(frozen=True)
class Dense:
    """A matrix as it is."""

    weight: Tensor

    def dense(self) -> Tensor:
        return self.weight


class TorchKernels:
    """Eager PyTorch over matrices [N, width]; norms in float32 at least, as transformers computes
    them.

    Results go into an argument's memory if a docstring says so: a caller uses the result, never the
    argument.
    """

    name = "torch"
    in_place = True
    fused = False
    """Chains of operations are one kernel each: see `rotate_normed`, `swiglu_parts` and
    `loss_rows`."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Compute x W^T + bias, added into `into`'s memory if given."""
        if into is None:
            return functional.linear(x, weight, bias)
        into.addmm_(x, weight.t())
        if bias is not None:
            into.add_(bias)
        return into

    def frozen_linear(
        self, x: Tensor, matrix: Matrix, bias: Tensor | None, into: Tensor | None
    ) -> Tensor:
        """Compute `linear` with a frozen matrix W."""
        return self.linear(x, matrix.dense(), bias, into)

    def frozen_backward(self, g: Tensor, matrix: Matrix, into: Tensor | None) -> Tensor:
        """into + g W, in into's memory; None is zero."""
        return self.add_product(into, g, matrix.dense())

    def add_product(self, into: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """Compute into + scale a b, in into's memory; None is zero, unscaled."""
        return a @ b if into is None else into.addmm_(a, b, alpha=scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = wide(x)
        r = torch.rsqrt((x32 * x32).mean(-1, keepdim=True).add_(eps))
        if (
            weight.dtype != x.dtype
        ):  # a factor in float32 (1 + w) is multiplied before it is rounded
            return cast(x32 * r * weight, x.dtype)
        return cast(x32 * r, x.dtype) * weight

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor
    ) -> Tensor:
        """Compute g + the gradient of x from that of its norm, in g's memory (appendix A.3).

        With r = 1 / rms(x) and gw = gn w the gradient is r (gw - x r^2 mean(gw x)).
        """
        x32 = wide(x)
        r = torch.rsqrt((x32 * x32).mean(-1, keepdim=True).add_(eps))
        gw = wide(gn) * wide(weight)
        mean = (gw * x32).mean(-1, keepdim=True)
        return g.add_(gw.sub_(x32 * (mean * r * r)).mul_(r))

    def rope(self, q: Tensor, k: Tensor, position: Position) -> tuple[Tensor, Tensor]:
        """Rotate [B, T, heads, h], in their memory; with the sine's sign changed it is its own
        backward pass."""
        cos, sin = position
        for x in (q, k):
            first, second = x[..., : 2 * cos.shape[-1]].chunk(
                2, -1
            )  # the rest of a head is not rotated
            kept = first.clone()
            first.mul_(cos).addcmul_(second, sin, value=-1.0)
            second.mul_(cos).addcmul_(kept, sin)
        return q, k

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) up, in new memory."""
        return functional.silu(gate).mul_(up)

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of gate and up (appendix A.4); the memory of all three arguments is used
        up."""
        up.mul_(g)
        torch.ops.aten.silu_backward.grad_input(up, gate, grad_input=up)
        return up, g.mul_(functional.silu(gate, inplace=True))

    def glu(self, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        """Compute activation(gate) up, in new memory."""
        if activation == "silu":
            return self.swiglu(gate, up)
        act = functional.gelu(gate, approximate="tanh")
        if self.in_place:
            return act.mul_(up)
        return act * up

    def glu_backward(
        self, activation: str, gate: Tensor, up: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of gate and up; the memory of all three arguments is used up."""
        if activation == "silu":
            return self.swiglu_backward(gate, up, g)
        aten = torch.ops.aten
        if not self.in_place:
            return aten.gelu_backward(g * up, gate, approximate="tanh"), g * functional.gelu(
                gate, approximate="tanh"
            )
        up.mul_(g)
        aten.gelu_backward.grad_input(up, gate, approximate="tanh", grad_input=up)
        return up, g.mul_(aten.gelu_(gate, approximate="tanh"))

    def rotate_normed(self, x: Tensor, weight: Tensor, eps: float, position: Position) -> Tensor:
        """Return the rotation of the norm of each head of [B, T, heads, h], in new memory."""
        normed = self.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
        return self.rope(normed, normed[:, :, :0], position)[0]

    def rotate_normed_backward(
        self, x: Tensor, weight: Tensor, eps: float, position: Position, g: Tensor
    ) -> Tensor:
        """Return the gradient of `rotate_normed`'s x from that of its result."""
        g = self.rope(g, g[:, :, :0], (position[0], -position[1]))[0]
        rows = [y.reshape(-1, x.shape[-1]) for y in (x, g)]
        zeros = torch.zeros_like(rows[0])
        return self.rms_norm_backward(rows[0], weight, eps, rows[1], zeros).view(x.shape)

    def swiglu_parts(self, gate: Tensor, up: Tensor, parts: Parts) -> Tensor:
        """Return silu(gate + its part) (up + its part), in new memory."""
        return self.swiglu(*(with_part(x, part) for x, part in zip((gate, up), parts)))

    def swiglu_parts_backward(
        self, gate: Tensor, up: Tensor, g: Tensor, parts: Parts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of gate and up, and the activation; the memory of all three arguments is
        used up.

        Args:
            parts: low-rank parts of gate, up and g.
        """
        gate, up, g = (with_part(x, part) for x, part in zip((gate, up, g), parts, strict=True))
        act = self.swiglu(gate, up)
        return *self.swiglu_backward(gate.clone(), up.clone(), g.clone()), act

    def loss_rows(
        self, logits: Tensor, targets: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return each row's negative log likelihood [n] and `scale` (softmax - one-hot) [n, V] in
        `dtype`; the memory of `logits` [n, V] is used up."""
        maximum, total = exp_sums(None, logits.clone())
        lse = maximum + total.log()
        nll = lse - label_logits(logits, targets)
        return nll, cast(logits_gradient(logits, targets, lse, torch.full_like(lse, scale)), dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Any]:
        """See `attend`."""
        return attend(q, k, v, how)

    def attend_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Any, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `attend_backward`."""
        return attend_backward(g, q, k, v, kept, how)


def with_part(x: Tensor, part: LowRank | None) -> Tensor:
    """Return x + scale h b, in new memory; x itself without a part."""
    if part is None:
        return x
    return torch.addmm(x, part.h, cast(part.b, x.dtype), alpha=part.scale)
