"""The cross-entropy as a graph, for export and for CUDA graphs: static shapes, one vocabulary tile
alive at a time.

ExecuTorch plans memory from the order of the graph, and XNNPACK's partitioner would merge all tiles
into one delegate that computes every tile before it reduces any. So each tile's input depends on
the sum of the tile before it (measured at 128 rows of SmolLM2's head: 7 MB planned with the chain,
50 MB without).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ondevice.core.session import IGNORE
from ondevice.nn.cross_entropy import float32_logits, label_columns, tile_bounds

Tile = tuple[int, Callable[[Tensor], Tensor]]
"""First vocabulary index of a tile, and hidden [N, D] -> logits [N, size]."""


def weight_tiles(weight_VD: Tensor, tiles: int) -> list[Tile]:
    """Cut a float32 head into tiles; the weight is sliced, so a tied embedding is not copied."""
    return [
        (low, lambda h, low=low, high=high: float32_logits(h, weight_VD[low:high]))
        for low, high in tile_bounds(weight_VD.shape[0], tiles)
    ]


def graph_token_nll(tiles: Sequence[Tile]) -> Callable[[Tensor, Tensor], Tensor]:
    """Build a loss: hidden float32 [N, D] and labels int64 [N] to float32 [N], 0 at label -100."""

    def reduce(hidden_ND: Tensor, safe_N: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Reduce a tile to [N] each: maximum, sum of exponentials below it, and the target's logit
        if it is in it."""
        low, head = tile
        logits = head(hidden_ND).float()
        maximum = logits.amax(dim=-1)
        total = (logits - maximum[:, None]).exp().sum(dim=-1)
        if len(tiles) == 1:
            return maximum, total, logits.gather(1, safe_N[:, None])[:, 0]
        local = safe_N - low
        inside = (local >= 0) & (local < logits.shape[1])
        picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        return maximum, total, torch.where(inside, picked, torch.zeros_like(picked))

    def token_nll(hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        active = labels_N != IGNORE
        safe = torch.where(active, labels_N, torch.zeros_like(labels_N))
        maximum, total, target = reduce(hidden_ND, safe, tiles[0])
        for tile in tiles[1:]:
            # Times zero: the value is the same, and the tile cannot be computed before the one
            # before is reduced.
            tile_maximum, tile_total, tile_target = reduce(
                hidden_ND + (0.0 * total[:, None]).to(hidden_ND.dtype), safe, tile
            )
            larger = torch.maximum(maximum, tile_maximum)
            total = total * (maximum - larger).exp() + tile_total * (tile_maximum - larger).exp()
            maximum = larger
            target = target + tile_target
        nll = maximum + total.log() - target
        return torch.where(active, nll, torch.zeros_like(nll))

    return token_nll


def answer_loss(
    weight_VD: Tensor, rows: Sequence[int], answers: Sequence[int] | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Build a loss over the words that a task's rows are answered with, instead of the vocabulary.

    A classifier by prompt asks which of some words comes next; that all others are unlikely is
    nothing to learn. It needs one row of the head for each of them.

    Args:
        weight_VD: the output head, or some rows of it.
        rows: of the answers in `weight_VD`.
        answers: their tokens, if those are not the rows.

    Returns:
        (hidden [N, D], labels [N]) to float32 [N], 0 if no answer is a label.
    """
    index_A = torch.tensor(tuple(rows if answers is None else answers), device=weight_VD.device)
    weight_AD = weight_VD[list(rows)].detach().float()
    nll = graph_token_nll([(0, lambda hidden_ND: hidden_ND.float() @ weight_AD.t())])
    return lambda hidden_ND, labels_N: nll(
        hidden_ND, label_columns(labels_N, index_A.to(labels_N.device))
    )


def labelled_only(
    loss: Callable[[Tensor, Tensor], Tensor], limit: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Compute a fixed-shape loss on at most `limit` positions: the labelled ones, and some that
    count nothing.

    In a classification row only the answer is labelled, so the head then costs next to nothing.

    Args:
        loss: hidden [n, D] and labels [n] to float32 [n].
        limit: labelled positions a call has at most; positions beyond it are not seen.
    """

    def limited(hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        positions = (
            (labels_N != IGNORE)
            .to(torch.int32)
            .topk(min(limit, labels_N.shape[0]), sorted=False)
            .indices
        )
        nll = loss(hidden_ND[positions], labels_N[positions])
        return torch.zeros(labels_N.shape[0], dtype=nll.dtype, device=nll.device).scatter(
            0, positions, nll
        )

    return limited
