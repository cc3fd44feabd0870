"""Cross-entropy that never holds a whole batch's logits: the vocabulary is walked in tiles.

P-RGE's appendix A.8 names this as future work. The running maximum and the running sum of exponentials
(the "online" log-sum-exp) are carried from tile to tile, so each tile is dead before the next is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.core.session import IGNORE


def shift(hidden_RTD: Tensor, labels_RT: Tensor) -> tuple[Tensor, Tensor]:
    """Pair each position with the label of the next token.

    Args:
        hidden_RTD: [rows, tokens, hidden].
        labels_RT: int64 [rows, tokens]; `labels[t] == ids[t]` where trained, else -100.

    Returns:
        hidden [rows * (tokens - 1), hidden] and labels [rows * (tokens - 1)].
    """
    hidden = hidden_RTD[:, :-1].reshape(-1, hidden_RTD.shape[-1])
    return hidden, labels_RT[:, 1:].reshape(-1)


def tile_bounds(vocabulary: int, tiles: int) -> list[tuple[int, int]]:
    """Split `vocabulary` into at most `tiles` ranges of equal size (the last may be shorter)."""
    size = -(-vocabulary // max(1, tiles))
    return [(low, min(low + size, vocabulary)) for low in range(0, vocabulary, size)]


def float32_logits(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Return hidden W^T, in float32 where both are half precision: rounded logits would all but hide the difference of
    two losses. On a GPU the product leaves its float32 sums as they are."""
    if hidden_ND.dtype not in (torch.bfloat16, torch.float16):
        return functional.linear(hidden_ND, weight_VD)
    if hidden_ND.is_cuda and hidden_ND.ndim == 2:
        return torch.ops.aten.mm.dtype(hidden_ND, weight_VD.t(), torch.float32)
    return hidden_ND.float() @ weight_VD.float().t()


def wide(x: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def token_nll(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tiles: int = 8) -> Tensor:
    """Compute the negative log likelihood of each label, 0 where the label is -100; only labelled rows are computed.

    Args:
        hidden_ND: [N, hidden], any float dtype.
        weight_VD: [vocabulary, hidden], the output head.
        labels_N: int64 [N].
        tiles: vocabulary tiles; at most N * vocabulary / tiles logits exist at once.

    Returns:
        float32 [N]; float64 of a float64 model.
    """
    active = (labels_N != IGNORE).nonzero().squeeze(1)
    result = torch.zeros(
        labels_N.shape[0], dtype=wide(hidden_ND[:0]).dtype, device=hidden_ND.device
    )
    if active.numel() == 0:
        return result
    nll = _TiledNll.apply(hidden_ND[active], weight_VD, labels_N[active], tiles)
    return result.index_put((active,), nll)


class _TiledNll(torch.autograd.Function):
    """The online log-sum-exp forward; backward computes each tile's logits again instead of keeping them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tiles: int
    ) -> Tensor:
        target_N = (wide(hidden_ND) * wide(weight_VD[labels_N])).sum(-1)
        maximum = torch.full_like(target_N, float("-inf"))
        total = torch.zeros_like(target_N)
        for low, high in tile_bounds(weight_VD.shape[0], tiles):
            logits = float32_logits(hidden_ND, weight_VD[low:high])
            # The sum so far is rescaled to the new maximum, so that no exponential overflows.
            larger = torch.maximum(maximum, logits.amax(-1))
            total = total * (maximum - larger).exp() + (logits - larger[:, None]).exp().sum(-1)
            maximum = larger
        logsumexp = maximum + total.log()
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, logsumexp)
        ctx.tiles = tiles
        return logsumexp - target_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_ND, weight_VD, labels_N, logsumexp = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_ND) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VD) if need_weight else None
        rows = torch.arange(labels_N.shape[0], device=labels_N.device)
        for low, high in tile_bounds(weight_VD.shape[0], ctx.tiles):
            logits = float32_logits(hidden_ND, weight_VD[low:high])
            probability = (
                logits - logsumexp[:, None]
            ).exp()  # softmax; minus 1 at the label is the gradient
            inside = (labels_N >= low) & (labels_N < high)
            probability[rows[inside], labels_N[inside] - low] -= 1.0
            scaled = (probability * grad_N[:, None]).to(hidden_ND.dtype)
            if grad_hidden is not None:
                grad_hidden += scaled @ weight_VD[low:high]
            if grad_weight is not None:
                grad_weight[low:high] = scaled.t() @ hidden_ND
        return grad_hidden, grad_weight, None, None
