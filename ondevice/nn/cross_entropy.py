"""Cross-entropy that never holds a whole batch's logits: the vocabulary is walked in tiles.

P-RGE's appendix A.8 names this as future work. The running maximum and the running sum of
exponentials (the "online" log-sum-exp) are carried from tile to tile, so each tile is dead before
the next is computed.
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
        labels_RT: int64 [rows, tokens]; `labels[t] == ids[t]` if trained, else -100.

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
    """Return hidden W^T, in float32 if both are half precision: rounded logits would all but hide
    the difference of two losses. On a GPU the product leaves its float32 sums as they are."""
    if hidden_ND.dtype not in (torch.bfloat16, torch.float16):
        return functional.linear(hidden_ND, weight_VD)
    if hidden_ND.is_cuda and hidden_ND.ndim == 2:
        return torch.ops.aten.mm.dtype(hidden_ND, weight_VD.t(), torch.float32)
    return hidden_ND.float() @ weight_VD.float().t()


def wide(x: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def exp_sums(before: tuple[Tensor, Tensor] | None, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Add one more tile to the online log-sum-exp.

    Args:
        before: of each token so far, the largest logit and the sum of exponentials below it, [n]
            each; None for the first tile.
        logits: float32 [n, S], the tile's, whose memory is used up.
    """
    top = logits.amax(-1)
    if before is None:
        return top, logits.sub_(top[:, None]).exp_().sum(-1)
    maximum, total = before
    # The sum so far is rescaled to the new maximum, so that no exponential overflows.
    larger = torch.maximum(maximum, top)
    total = total * (maximum - larger).exp() + logits.sub_(larger[:, None]).exp_().sum(-1)
    return larger, total


def label_logits(logits: Tensor, local: Tensor) -> Tensor:
    """Return the logit of each label that is in a tile, else 0, [n].

    Args:
        local: int64 [n], the label's column in the tile; below 0 or from S on if it is in another
            tile.
    """
    inside, at = _inside(local, logits.shape[1])
    picked = logits.gather(1, at)[:, 0]
    return torch.where(inside, picked, torch.zeros_like(picked))


def logits_gradient(logits: Tensor, local: Tensor, lse: Tensor, weights: Tensor) -> Tensor:
    """Return `weights` [n] times (softmax - one-hot) of one tile, [n, S], in the memory of its
    `logits`.

    Args:
        local: int64 [n], as in `label_logits`; `lse` [n] is the log-sum-exp over all tiles.
    """
    p = logits.sub_(lse[:, None]).exp_()
    inside, at = _inside(local, logits.shape[1])
    # The one is subtracted before the weight is multiplied in: a difference near 0 keeps its
    # digits.
    ones = inside if inside.dtype == p.dtype else inside.to(p.dtype)
    return p.scatter_add_(1, at, -ones[:, None]).mul_(weights[:, None])


def _inside(local: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Find the labels in a tile, and a column for each, [n, 1]: no shape depends on labels."""
    return (local >= 0) & (local < rows), local.clamp(0, rows - 1)[:, None]


def label_columns(labels_N: Tensor, tokens_A: Tensor) -> Tensor:
    """Return the index of each label among some tokens, int64 [N]; -100 if it is not one of
    them."""
    same_NA = (labels_N[:, None] == tokens_A[None]).to(torch.int64)
    index_N = (same_NA * torch.arange(tokens_A.shape[0], device=labels_N.device)).sum(1)
    return torch.where(same_NA.sum(1) > 0, index_N, torch.full_like(index_N, IGNORE))


def token_nll(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tiles: int = 8) -> Tensor:
    """Compute the negative log likelihood of each label, 0 if it is -100; only label tokens are
    computed.

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
    """The online log-sum-exp forward; backward computes each tile's logits again instead of keeping
    them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tiles: int
    ) -> Tensor:
        target_N = (wide(hidden_ND) * wide(weight_VD[labels_N])).sum(-1)
        sums = None
        for low, high in tile_bounds(weight_VD.shape[0], tiles):
            sums = exp_sums(sums, float32_logits(hidden_ND, weight_VD[low:high]))
        assert sums is not None  # noqa: S101 - there is a tile
        maximum, total = sums
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
        for low, high in tile_bounds(weight_VD.shape[0], ctx.tiles):
            logits = float32_logits(hidden_ND, weight_VD[low:high])
            scaled = logits_gradient(logits, labels_N - low, logsumexp, grad_N).to(hidden_ND.dtype)
            if grad_hidden is not None:
                grad_hidden += scaled @ weight_VD[low:high]
            if grad_weight is not None:
                grad_weight[low:high] = scaled.t() @ hidden_ND
        return grad_hidden, grad_weight, None, None
