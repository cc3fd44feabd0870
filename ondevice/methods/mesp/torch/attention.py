"""Causal attention with grouped heads and its backward pass, without a score matrix of the whole
sequence.

Three algorithms. `flash` and `cudnn`: FlashAttention's and cuDNN's own pairs of kernels, forward
and backward, on CUDA in half precision, whichever PyTorch itself would take; they keep one number a
query and head. `chunks`: written out (appendix A.2) over chunks of queries, each against the keys
that it sees, for float32 and for devices without such kernels. A query's scores are all there at
once, so a chunk's softmax is exact, and nothing of the forward pass is kept at all: the backward
pass needs queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ondevice.methods.mesp.memory import CHUNK_QUERIES, CHUNK_SCORES
from ondevice.nn.cross_entropy import wide

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


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`; without an operation, which a graph would hold, if it has it."""
    return x if x.dtype == dtype else x.to(dtype)


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
        mask: [tokens, tokens], added to the scores; then chunks are joined instead of written into
            one tensor, as an exported graph has to: there a write into a slice copies the whole.
    """
    how = how or Scores(q.shape[-1] ** -0.5)
    keys = _by_head(k)
    values = _by_head(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if mask is None else None
    chunks: list[Tensor] = []
    for low, high in _chunks(q):
        p = _probabilities(_group(q[:, low:high], k.shape[2]), keys[:, :high], low, mask, how)
        o = _ungroup(torch.bmm(p, values[:, :high]), q, high - low)
        if out is None:
            chunks.append(o)
        else:
            out[:, low:high] = o
    return _joined(chunks) if out is None else out


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
    gq = torch.empty_like(q, memory_format=torch.contiguous_format) if mask is None else None
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
    return _joined(gqs) if gq is None else gq, _by_token(gk, k), _by_token(gv, v)


def chunk_queries(rows: int, heads: int, length_tokens: int, gpu: bool = False) -> int:
    """Return queries of a chunk."""
    scores = CHUNK_SCORES * (GPU_CHUNKS if gpu else 1)
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
    if mask is not None:
        seen = mask[first:last, :last]
        scores = scores + (seen.repeat(groups, 1) if groups > 1 else seen)[None]
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


def _joined(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks, 1) if len(chunks) > 1 else chunks[0]


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
