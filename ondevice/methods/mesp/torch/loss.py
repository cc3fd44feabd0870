"""The cross-entropy and its gradient over tiles of the vocabulary, in two passes; logits never
exist at once.

The first pass carries each token's running maximum and sum of exponentials from tile to tile; the
second computes every tile's logits again and turns them into probabilities, which are the gradient.
A tile waits for the one before it through these sums, so that in an exported graph, too, a memory
plan holds one. Tiles are outside and chunks of tokens inside, because a tile of the head may come
from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ondevice.core.session import IGNORE
from ondevice.methods.mesp.torch.attention import cast
from ondevice.nn.cross_entropy import (
    exp_sums,
    float32_logits,
    label_logits,
    logits_gradient,
    tile_bounds,
    wide,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ondevice.methods.mesp.torch.kernels import TorchKernels


class Head(Protocol):
    """The output head, read in tiles of rows."""

    vocab: int

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Return its rows [high - low, D]; `then` is the tile that will be asked for next."""
        ...


class AnswerHead:
    """The rows of a head that stand for a task's answers, kept once read."""

    def __init__(self, head: Head, answers: tuple[int, ...]) -> None:
        self.head = head
        self.answers = answers
        self.vocab = len(answers)
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
        scale: factor of the logits.
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
    ) -> None:
        self.head = head
        self.norm_weight = norm
        self.eps = eps
        self.kernels = kernels
        self.scale = scale
        self.bounds = tile_bounds(head.vocab, tiles)
        self.chunk_tokens = chunk_tokens

    def row_nll(self, x: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]; only label tokens are
        computed."""
        targets = next_labels(labels_BT)
        where = (targets != IGNORE).nonzero().squeeze(1)
        rows = torch.zeros(labels_BT.shape[0], dtype=torch.float32, device=x.device)
        if where.numel() == 0:
            return rows
        lse, label = self.log_sum_exp(self.norm(x[where]), targets[where], again=False)
        return rows.index_add_(0, where // labels_BT.shape[1], (lse - label).float())

    def backward(self, x: Tensor, labels_BT: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the summed loss, float32 [], and `scale` times its gradient in the memory of
        `x`."""
        targets = next_labels(labels_BT)
        where = (targets != IGNORE).nonzero().squeeze(1)
        if where.numel() == 0:
            return torch.zeros((), device=x.device), x.zero_()
        rows = x[where]
        targets = targets[where]
        hidden = self.norm(rows)
        lse, label = self.log_sum_exp(hidden, targets, again=True)
        gradient = self.hidden_gradient(hidden, targets, lse, torch.full_like(lse, scale))
        del hidden
        gradient = gradient.to(x.dtype)
        x.zero_()
        x[where] = self.norm_backward(rows, gradient)
        return (lse - label).sum().float(), x

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
        """Return log-sum-exp of each token's logits, and its label's logit (0 without a label),
        float32 [n].

        Args:
            hidden: [n, D], normed.
            targets: int64 [n]; tokens without a label have one that is below 0.
            again: a second pass over the head follows.
        """
        chunks = list(zip(self._chunks(hidden), self._chunks(targets)))
        sums: list[tuple[Tensor, Tensor] | None] = [None] * len(chunks)
        label = torch.zeros_like(hidden[:, 0], dtype=wide(hidden[:0]).dtype)
        for low, weight in self._tiles(again):
            for number, ((h, t), label_h) in enumerate(zip(chunks, self._chunks(label))):
                logits = float32_logits(h, weight)
                label_h += label_logits(logits, t - low)
                sums[number] = exp_sums(sums[number], logits)
        maximum, total = (
            _joined([chunk_sums[i] for chunk_sums in sums if chunk_sums is not None])
            for i in range(2)
        )
        return maximum + total.log(), label

    def hidden_gradient(
        self, hidden: Tensor, targets: Tensor, lse: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the gradient of `hidden`, float32 [n, D]: `weights` [n] times (softmax - one-hot)
        W, summed over tiles."""
        chunks = list(zip(*(self._chunks(x) for x in (hidden, targets, lse, weights))))
        # Chunks are summed into one tensor: joined at the end, the gradient of a long row would be
        # there twice.
        summed = torch.zeros_like(hidden, dtype=lse.dtype) if len(chunks) > 1 else None
        sums: list[Tensor | None] = [None] if summed is None else list(self._chunks(summed))
        for low, weight in self._tiles(False):
            for number, (h, t, lse_of_h, w) in enumerate(chunks):
                p = logits_gradient(float32_logits(h, weight), t - low, lse_of_h, w)
                gradient = torch.mm(cast(p, weight.dtype), weight)
                before = sums[number]
                del p
                sums[number] = wide(gradient) if before is None else before.add_(gradient)
        gradient = sums[0] if summed is None else summed
        assert gradient is not None  # noqa: S101 - there is a tile
        return gradient

    def _tiles(self, again: bool) -> Iterator[tuple[int, Tensor]]:
        """First row and rows of each tile."""
        for number, (low, high) in enumerate(self.bounds):
            coming = self.bounds[number + 1 :] or (self.bounds if again else [None])
            yield low, self.head.tile(low, high, coming[0])

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        size = self.chunk_tokens or x.shape[0]
        return (x,) if x.shape[0] <= size else x.split(size)


def labelled(labels_BT: Tensor) -> int:
    """Count the tokens that the loss of these rows is over."""
    return int((labels_BT[:, 1:] != IGNORE).sum())


def next_labels(labels_BT: Tensor) -> Tensor:
    """Return the label that each position predicts, int64 [N]; the last position of a row predicts
    nothing."""
    last = torch.full(
        (labels_BT.shape[0], 1), IGNORE, dtype=labels_BT.dtype, device=labels_BT.device
    )
    return torch.cat((labels_BT[:, 1:], last), 1).view(-1)


def _joined(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks) if len(chunks) > 1 else chunks[0]
