"""The cross-entropy and its gradient over tiles of the vocabulary, in two passes; logits never exist at once.

The first pass carries each token's running maximum and sum of exponentials from tile to tile; the second computes
every tile's logits again and turns them into probabilities, which are the gradient. A tile waits for the one before
it through these sums, so that in an exported graph, too, a memory plan holds one. Tiles are outside and chunks of
tokens inside, because a tile of the head may come from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ondevice.core.session import IGNORE
from ondevice.methods.mesp.torch.attention import cast, wide
from ondevice.nn.cross_entropy import float32_logits, tile_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ondevice.methods.mesp.torch.kernels import TorchKernels

Sums = tuple[Tensor, Tensor, Tensor]
"""Of each token so far: the largest logit, the sum of exponentials below it, the label's logit; float32 [n] each."""


class Head(Protocol):
    """The output head, read in tiles of rows."""

    vocab: int

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Return its rows [high - low, D]; `then` is the tile that will be asked for next."""
        ...


class AnswerHead:
    """The rows of a head that stand for a task's answers, kept once read."""

    def __init__(self, head: Head, answers: tuple[int, ...]) -> None:
        self.head, self.answers, self.vocab = head, answers, len(answers)
        self.rows: Tensor | None = None

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        if self.rows is None:
            self.rows = torch.cat([self.head.tile(row, row + 1).clone() for row in self.answers])
        return self.rows[low:high]


class Loss:
    """Final norm, head and cross-entropy over [N, D].

    Args:
        tiles: of the vocabulary.
        chunk_tokens: tokens whose logits exist at once; None is all.
        scale: factor of the logits; `cap` is c of c tanh(logit / c), 0 is none.
    """

    def __init__(
        self,
        head: Head,
        norm: Tensor,
        eps: float,
        kernels: TorchKernels,
        tiles: int,
        chunk_tokens: int | None,
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> None:
        self.head, self.norm_weight, self.eps, self.kernels = head, norm, eps, kernels
        self.scale, self.cap = scale, cap
        self.bounds, self.chunk_tokens = tile_bounds(head.vocab, tiles), chunk_tokens

    def row_nll(self, x: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]; only labelled tokens are computed."""
        targets = next_labels(labels_BT)
        where = (targets != IGNORE).nonzero().squeeze(1)
        rows = torch.zeros(labels_BT.shape[0], dtype=torch.float32, device=x.device)
        if where.numel() == 0:
            return rows
        lse, wanted = self.log_sum_exp(self.norm(x[where]), targets[where], again=False)
        return rows.index_add_(0, where // labels_BT.shape[1], (lse - wanted).float())

    def backward(self, x: Tensor, labels_BT: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the summed loss, float32 [], and `scale` times its gradient in the memory of `x`, which is used up."""
        targets = next_labels(labels_BT)
        where = (targets != IGNORE).nonzero().squeeze(1)
        if where.numel() == 0:
            return torch.zeros((), device=x.device), x.zero_()
        rows, targets = x[where], targets[where]
        hidden = self.norm(rows)
        lse, wanted = self.log_sum_exp(hidden, targets, again=True)
        gradient = self.hidden_gradient(hidden, targets, lse, torch.full_like(lse, scale))
        del hidden
        gradient = gradient.to(x.dtype)
        x.zero_()
        x[where] = self.norm_backward(rows, gradient)
        return (lse - wanted).sum().float(), x

    def norm(self, x: Tensor) -> Tensor:
        """Return the norm of [n, D], times the logits' factor."""
        normed = self.kernels.rms_norm(x, self.norm_weight, self.eps)
        return normed if self.scale == 1.0 else normed * self.scale

    def norm_backward(self, x: Tensor, gn: Tensor) -> Tensor:
        """Return the gradient of x from that of its norm."""
        gn = gn if self.scale == 1.0 else gn * self.scale
        return self.kernels.rms_norm_backward(
            x, self.norm_weight, self.eps, gn, torch.zeros_like(x)
        )

    def log_sum_exp(self, hidden: Tensor, targets: Tensor, again: bool) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp of each token's logits, and its label's logit (0 where there is none), float32 [n].

        Args:
            hidden: [n, D], normed.
            targets: int64 [n]; tokens without a label have one that is below 0.
            again: a second pass over the head follows.
        """
        chunks = list(zip(self._chunks(hidden), self._chunks(targets)))
        sums: list[Sums | None] = [None] * len(chunks)
        for low, weight in self._tiles(again):
            for number, (h, t) in enumerate(chunks):
                sums[number] = next_sums(sums[number], self._logits(h, weight), t - low)
        maximum, total, wanted = (
            _joined([chunk_sums[i] for chunk_sums in sums if chunk_sums is not None])
            for i in range(3)
        )
        return maximum + total.log(), wanted

    def hidden_gradient(
        self, hidden: Tensor, targets: Tensor, lse: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the gradient of `hidden`, float32 [n, D]: `weights` [n] times (softmax - one-hot) W, summed over
        tiles."""
        chunks = list(zip(*(self._chunks(x) for x in (hidden, targets, lse, weights))))
        # Chunks are summed into one tensor: joined at the end, the gradient of a long row would be there twice.
        summed = torch.zeros_like(hidden, dtype=lse.dtype) if len(chunks) > 1 else None
        sums: list[Tensor | None] = [None] if summed is None else list(self._chunks(summed))
        for low, weight in self._tiles(False):
            for number, (h, t, lse_of_h, w) in enumerate(chunks):
                logits = self._logits(h, weight)
                slope = (
                    1.0 - (logits / self.cap) ** 2 if self.cap else None
                )  # of the cap, by what it gave
                p = logits_gradient(logits, t - low, lse_of_h, w)
                p = p if slope is None else p.mul_(slope)
                gradient, before = torch.mm(cast(p, weight.dtype), weight), sums[number]
                del p, logits, slope
                sums[number] = wide(gradient) if before is None else before.add_(gradient)
        gradient = sums[0] if summed is None else summed
        assert gradient is not None  # noqa: S101 - there is a tile
        return gradient

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """A tile's logits, float32 [n, S]."""
        logits = float32_logits(hidden, weight)
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def _tiles(self, again: bool) -> Iterator[tuple[int, Tensor]]:
        """First row and rows of each tile."""
        for number, (low, high) in enumerate(self.bounds):
            then = (
                self.bounds[number + 1]
                if number + 1 < len(self.bounds)
                else self.bounds[0]
                if again
                else None
            )
            yield low, self.head.tile(low, high, then)

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        size = self.chunk_tokens or x.shape[0]
        return (x,) if x.shape[0] <= size else x.split(size)


def labelled(labels_BT: Tensor) -> int:
    """Count the tokens that the loss of these rows is over."""
    return int((labels_BT[:, 1:] != IGNORE).sum())


def next_labels(labels_BT: Tensor) -> Tensor:
    """Return the label that each position predicts, int64 [N]; the last position of a row predicts nothing."""
    last = torch.full(
        (labels_BT.shape[0], 1), IGNORE, dtype=labels_BT.dtype, device=labels_BT.device
    )
    return torch.cat((labels_BT[:, 1:], last), 1).view(-1)


def next_sums(before: Sums | None, logits: Tensor, local: Tensor) -> Sums:
    """Add one more tile to the sums.

    Args:
        before: None for the first tile.
        logits: float32 [n, S], the tile's, which are used up.
        local: int64 [n], the label's place in the tile; below 0 or from S on where the label is in another.
    """
    inside, at = _inside(local, logits.shape[1])
    wanted = logits.gather(1, at)[:, 0]
    wanted = torch.where(inside, wanted, torch.zeros_like(wanted))
    top = logits.amax(-1)
    if before is None:
        return top, logits.sub_(top[:, None]).exp_().sum(-1), wanted
    maximum, total, earlier = before
    larger = torch.maximum(maximum, top)
    total = total * (maximum - larger).exp() + logits.sub_(larger[:, None]).exp_().sum(-1)
    return larger, total, earlier + wanted


def logits_gradient(logits: Tensor, local: Tensor, lse: Tensor, weights: Tensor) -> Tensor:
    """Return `weights` [n] times (softmax - one-hot) of one tile, [n, S], in the memory of its `logits`.

    Args:
        local: int64 [n], as in `next_sums`; `lse` [n] is the log-sum-exp over all tiles.
    """
    p = logits.sub_(lse[:, None]).exp_()
    inside, at = _inside(local, logits.shape[1])
    # The one is taken off before the weight is multiplied in: a difference near zero keeps its digits.
    return p.scatter_add_(1, at, -cast(inside, p.dtype)[:, None]).mul_(weights[:, None])


def _inside(local: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Find the labels in a tile of so many rows, and a place in it for each, [n, 1]: no shape depends on labels."""
    return (local >= 0) & (local < rows), local.clamp(0, rows - 1)[:, None]


def _joined(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks) if len(chunks) > 1 else chunks[0]
