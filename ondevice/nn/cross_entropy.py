"""Cross-entropy that never holds a whole batch's logits: the vocabulary is walked in tiles.

P-RGE's appendix A.8 names this as future work. The running maximum and the running sum of exponentials
(the "online" log-sum-exp) are carried from tile to tile, so each tile is dead before the next is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100
"""Label of a token that is not trained on."""


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


def token_nll(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tiles: int = 8) -> Tensor:
    """Negative log likelihood of each label, 0 where the label is -100; only labelled rows are computed.

    Args:
        hidden_ND: [N, hidden], any float dtype.
        weight_VD: [vocabulary, hidden], the output head.
        labels_N: int64 [N].
        tiles: vocabulary tiles; at most N * vocabulary / tiles logits exist at once.

    Returns:
        float32 [N].
    """
    active = (labels_N != IGNORE).nonzero().squeeze(1)
    result = torch.zeros(labels_N.shape[0], dtype=torch.float32, device=hidden_ND.device)
    if active.numel() == 0:
        return result
    nll = _online_nll(hidden_ND[active], weight_VD, labels_N[active], tiles)
    return result.index_put((active,), nll)


def _online_nll(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tiles: int) -> Tensor:
    target_N = (hidden_ND.float() * weight_VD[labels_N].float()).sum(-1)
    maximum = total = None
    for low, high in tile_bounds(weight_VD.shape[0], tiles):
        logits = (hidden_ND @ weight_VD[low:high].t()).float()
        tile_maximum = logits.amax(-1)
        tile_total = (logits - tile_maximum[:, None]).exp().sum(-1)
        if maximum is None:
            maximum, total = tile_maximum, tile_total
        else:
            larger = torch.maximum(maximum, tile_maximum)
            total = total * (maximum - larger).exp() + tile_total * (tile_maximum - larger).exp()
            maximum = larger
    return maximum + total.log() - target_N
