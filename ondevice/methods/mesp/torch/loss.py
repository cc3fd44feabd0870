"""The cross-entropy and its gradient over tiles of the vocabulary, in two passes; logits never exist at once.

The first pass finds each token's log-sum-exp; the second computes every tile's logits again and turns them into
probabilities, which are the gradient. Only labelled tokens are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ondevice.methods.mesp.torch.kernels import wide
from ondevice.nn.cross_entropy import IGNORE, tile_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ondevice.methods.mesp.torch.kernels import Kernels


class Head(Protocol):
    """The output head."""

    vocab: int

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Its rows [high - low, D]; `then` is the tile that will be asked for next."""
        ...


class Loss:
    """Final norm, head and cross-entropy over [N, D].

    Args:
        tiles: of the vocabulary.
        chunk_tokens: labelled tokens whose logits exist at once; None is all.
    """

    def __init__(
        self, head: Head, norm: Tensor, eps: float, kernels: Kernels, tiles: int, chunk_tokens: int | None
    ) -> None:
        self.head, self.norm, self.eps, self.kernels = head, norm, eps, kernels
        self.bounds, self.chunk_tokens = tile_bounds(head.vocab, tiles), chunk_tokens

    def nll(self, x: Tensor, labels_BT: Tensor) -> Tensor:
        """Each row's summed negative log likelihood, float32 [B]."""
        targets = _next(labels_BT)
        where = (targets != IGNORE).nonzero().squeeze(1)
        rows = torch.zeros(labels_BT.shape[0], dtype=torch.float32, device=x.device)
        if where.numel() == 0:
            return rows
        hidden = self.kernels.rms_norm(x[where], self.norm, self.eps)
        nll, _ = self._look(hidden, targets[where], again=False)
        return rows.index_add_(0, where // labels_BT.shape[1], nll.float())

    def learn(self, x: Tensor, labels_BT: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The summed loss, float32 [], and `scale` times its gradient in the memory of `x`, which is used up."""
        targets = _next(labels_BT)
        where = (targets != IGNORE).nonzero().squeeze(1)
        if where.numel() == 0:
            return torch.zeros((), device=x.device), x.zero_()
        rows, targets = x[where], targets[where]
        hidden = self.kernels.rms_norm(rows, self.norm, self.eps)
        nll, lse = self._look(hidden, targets, again=True)
        gradient = torch.zeros_like(hidden, dtype=lse.dtype)
        for low, high, weight in self._tiles(False):
            for part in self._chunks(len(targets)):
                p = wide(hidden[part] @ weight.t())
                p.sub_(lse[part, None]).exp_()
                inside, local = _inside(targets[part], low, high)
                p[inside, local] -= 1.0
                gradient[part].add_(p.mul_(scale).to(weight.dtype) @ weight)
        del hidden
        gradient = gradient.to(x.dtype)
        x.zero_()
        x[where] = self.kernels.rms_norm_backward(rows, self.norm, self.eps, gradient, torch.zeros_like(rows))
        return nll.sum().float(), x

    def _look(self, hidden: Tensor, targets: Tensor, again: bool) -> tuple[Tensor, Tensor]:
        """Negative log likelihood and log-sum-exp of each token, float32; `again` says that a second pass follows."""
        dtype = wide(hidden[:0]).dtype
        lse = torch.full(targets.shape, float("-inf"), dtype=dtype, device=hidden.device)
        wanted = torch.zeros_like(lse)
        for low, high, weight in self._tiles(again):
            for part in self._chunks(len(targets)):
                logits = wide(hidden[part] @ weight.t())
                inside, local = _inside(targets[part], low, high)
                wanted[part].index_put_((inside,), logits[inside, local])
                torch.logaddexp(lse[part], torch.logsumexp(logits, -1), out=lse[part])
        return lse - wanted, lse

    def _tiles(self, again: bool) -> Iterator[tuple[int, int, Tensor]]:
        for number, (low, high) in enumerate(self.bounds):
            then = self.bounds[number + 1] if number + 1 < len(self.bounds) else self.bounds[0] if again else None
            yield low, high, self.head.tile(low, high, then)

    def _chunks(self, count: int) -> Iterator[slice]:
        size = self.chunk_tokens or count
        for low in range(0, count, size):
            yield slice(low, min(low + size, count))


def labelled(labels_BT: Tensor) -> int:
    """Tokens that the loss of these rows is over."""
    return int((labels_BT[:, 1:] != IGNORE).sum())


def _next(labels_BT: Tensor) -> Tensor:
    """The label that each position predicts, int64 [N]; the last position of a row predicts nothing."""
    targets = torch.full_like(labels_BT, IGNORE)
    targets[:, :-1] = labels_BT[:, 1:]
    return targets.reshape(-1)


def _inside(targets: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Which tokens' labels lie in a tile, and where in it."""
    inside = ((targets >= low) & (targets < high)).nonzero().squeeze(1)
    return inside, targets[inside] - low
