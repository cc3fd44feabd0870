"""Causal attention with grouped heads and its backward pass, without a score matrix of the whole sequence.

Three forms. `flash` and `cudnn`: FlashAttention's and cuDNN's own pairs of kernels, forward and backward, on CUDA in
half precision, whichever PyTorch itself would take; they keep one number a query and head. `tiles`: written out
(appendix A.2) over tiles of queries, each against the keys that it sees, for float32 and for devices without such
kernels. A tile's softmax is exact, because a query's scores are all there at once, so nothing of the forward pass is
kept at all: the backward pass needs queries, keys and values.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ondevice.methods.mesp.memory import TILE_NUMBERS, TILE_TOKENS
from ondevice.methods.mesp.torch.kernels import wide

Form = Literal["flash", "cudnn", "tiles"]
GPU_TILES = 64
"""A GPU's tile is so many times as large: its launches cost more than its memory."""
FLASH_HEAD = 256
"""Widest head that FlashAttention takes."""


def form_for(q_BTHh: Tensor, k_BTKh: Tensor, v_BTKh: Tensor) -> Form:
    """The form for tensors of this dtype, device and shape."""
    half, width = q_BTHh.dtype in (torch.bfloat16, torch.float16), q_BTHh.shape[-1]
    if not (q_BTHh.is_cuda and half and width % 8 == 0 and width <= FLASH_HEAD):
        return "tiles"
    q, k, v = (x.transpose(1, 2) for x in (q_BTHh, k_BTKh, v_BTKh))
    grouped = q.shape[1] != k.shape[1]
    chosen = torch.ops.aten._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=grouped)
    return "cudnn" if chosen == SDPBackend.CUDNN_ATTENTION.value and q.shape[2] > 1 else "flash"  # cuDNN needs two


def tile_tokens(rows: int, heads: int, length_tokens: int, gpu: bool = False) -> int:
    """Queries of a tile."""
    numbers = TILE_NUMBERS * (GPU_TILES if gpu else 1)
    return min(length_tokens, max(TILE_TOKENS, numbers // (rows * heads * length_tokens)))


def attend(q_BTHh: Tensor, k_BTKh: Tensor, v_BTKh: Tensor) -> tuple[Tensor, Any]:
    """softmax(q k^T / sqrt(h)) v under the causal mask.

    Args:
        q_BTHh: [rows, tokens, heads, head_dim]; keys and values have H / G heads, each for G of the queries'.

    Returns:
        [rows, tokens, heads, head_dim], contiguous, and what the backward pass wants of it.
    """
    form = form_for(q_BTHh, k_BTKh, v_BTKh)
    if form == "tiles":
        return _attend(q_BTHh, k_BTKh, v_BTKh), None
    q, k, v = (x.transpose(1, 2) for x in (q_BTHh, k_BTKh, v_BTKh))
    if form == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return found[0].transpose(1, 2).contiguous(), (form, *found[:8])


def attend_backward(
    g_BTHh: Tensor, q_BTHh: Tensor, k_BTKh: Tensor, v_BTKh: Tensor, kept: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their shapes, from that of the output."""
    if kept is None:
        return _attend_backward(g_BTHh, q_BTHh, k_BTKh, v_BTKh)
    g, q, k, v = (x.transpose(1, 2) for x in (g_BTHh, q_BTHh, k_BTKh, v_BTKh))
    form, out, lse, *lengths, seed, offset = kept
    aten = torch.ops.aten
    if form == "cudnn":
        backward = aten._scaled_dot_product_cudnn_attention_backward
        found = backward(g, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, True)
    else:
        backward = aten._scaled_dot_product_flash_attention_backward
        found = backward(g, q, k, v, out, lse, *lengths, 0.0, True, seed, offset)
    gq, gk, gv = (x.transpose(1, 2) for x in found)
    return gq, gk, gv


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    keys, values = _by_head(k), _by_head(v)
    for low, high in _tiles(q):
        p = _probabilities(_group(q[:, low:high], k.shape[2]), keys[:, :high], low)
        out[:, low:high] = _ungroup(p @ values[:, :high], q, high - low)
    return out


def _attend_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gq = torch.empty_like(q, memory_format=torch.contiguous_format)
    keys, values = _by_head(k), _by_head(v)
    gk, gv = (torch.zeros_like(wide(x)) for x in (keys, values))
    scale = q.shape[-1] ** -0.5
    for low, high in _tiles(q):
        tile, grad = _group(q[:, low:high], k.shape[2]), _group(g[:, low:high], k.shape[2])
        p = _probabilities(tile, keys[:, :high], low)
        gv[:, :high] += p.transpose(1, 2) @ grad
        gs = (grad @ values[:, :high].transpose(1, 2)).mul_(p)  # p gp, of which the rows' sums are taken off
        gs.addcmul_(p, gs.sum(-1, keepdim=True), value=-1.0).mul_(scale)
        gk[:, :high] += gs.transpose(1, 2) @ tile
        gq[:, low:high] = _ungroup(gs @ keys[:, :high], q, high - low)
    return gq, _by_token(gk, k), _by_token(gv, v)


def _tiles(q: Tensor) -> list[tuple[int, int]]:
    length = q.shape[1]
    size = tile_tokens(q.shape[0], q.shape[2], length, q.is_cuda)
    return [(low, min(low + size, length)) for low in range(0, length, size)]


def _probabilities(tile_NCh: Tensor, keys_NSh: Tensor, first: int) -> Tensor:
    """softmax of [rows * kv heads, group * queries, keys]; the tile's first query is number `first`."""
    queries = keys_NSh.shape[1] - first
    scores = (tile_NCh * tile_NCh.shape[-1] ** -0.5) @ keys_NSh.transpose(1, 2)
    ahead = torch.ones(queries, queries, dtype=torch.bool, device=scores.device).triu_(1)
    by_query = scores.view(scores.shape[0], -1, queries, keys_NSh.shape[1])
    by_query[..., first:].masked_fill_(ahead, float("-inf"))
    return torch.softmax(wide(scores), -1).to(scores.dtype)


def _by_head(x_BTKh: Tensor) -> Tensor:
    """[rows, tokens, kv heads, h] -> [rows * kv heads, tokens, h]."""
    return x_BTKh.transpose(1, 2).reshape(-1, x_BTKh.shape[1], x_BTKh.shape[3])


def _by_token(x_NTh: Tensor, like_BTKh: Tensor) -> Tensor:
    rows, length, heads, width = like_BTKh.shape
    return x_NTh.view(rows, heads, length, width).transpose(1, 2).to(like_BTKh.dtype)


def _group(tile_BCHh: Tensor, kv_heads: int) -> Tensor:
    """[rows, queries, heads, h] -> [rows * kv heads, group * queries, h]."""
    rows, _, _, width = tile_BCHh.shape
    return tile_BCHh.transpose(1, 2).reshape(rows * kv_heads, -1, width)


def _ungroup(x: Tensor, like_BTHh: Tensor, queries: int) -> Tensor:
    rows, _, heads, width = like_BTHh.shape
    return x.view(rows, heads, queries, width).transpose(1, 2)
