"""Cross-entropy that never holds a whole batch's logits: the vocabulary is walked in tiles.

P-RGE's appendix A.8 names this as future work. The running maximum and the running sum of
exponentials (the "online" log-sum-exp) are carried from tile to tile, so each tile is dead before
the next is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.core.session import IGNORE, Weigh

Scale = float | Callable[[Tensor], Tensor]
"""Factor of a loss: one of all rows, or a function of each row's loss to its own."""


class WeighedRows:
    """The `Scale` of rows that a function of all their losses weighs.

    Attributes:
        loss: what the function returned; NaN before it was called.
    """

    def __init__(self, weigh: Weigh) -> None:
        self.weigh = weigh
        self.loss = float("nan")

    def __call__(self, nll_B: Tensor) -> Tensor:
        """Return each row's weight, float64 [B], from its negative log likelihood."""
        self.loss, weights = self.weigh(nll_B.cpu().numpy())
        return torch.from_numpy(weights).to(nll_B.device)


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


def float32_logits(hidden_ND: Tensor, weight_VD: Tensor, cap: float = 0.0) -> Tensor:
    """Return hidden W^T, in float32 if both are half precision: rounded logits would all but hide
    the difference of two losses. On a GPU the product leaves its float32 sums as they are. With a
    `cap` a logit z is cap * tanh(z / cap)."""
    if cap:
        return float32_logits(hidden_ND, weight_VD).div_(cap).tanh_().mul_(cap)
    if hidden_ND.dtype not in (torch.bfloat16, torch.float16):
        return functional.linear(hidden_ND, weight_VD)
    if hidden_ND.is_cuda and hidden_ND.ndim == 2:
        return torch.ops.aten.mm.dtype(hidden_ND, weight_VD.t(), torch.float32)
    return hidden_ND.float() @ weight_VD.float().t()


def wide(x: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`; without an operation, which a graph would hold, if it has it."""
    return x if x.dtype == dtype else x.to(dtype)


def times(x: Tensor, factor: float) -> Tensor:
    """Return x * factor; without an operation if the factor is 1."""
    return x if factor == 1.0 else x * factor


def joined(chunks: list[Tensor], dim: int = 0) -> Tensor:
    """Join chunks; one is returned as it is."""
    return torch.cat(chunks, dim) if len(chunks) > 1 else chunks[0]


def row_chunks(x: Tensor, size: int | None) -> tuple[Tensor, ...]:
    """Split [N, ...] into views of so many rows; None or enough is `x` itself."""
    if size is None or x.shape[0] <= size:
        return (x,)
    return x.split(size)


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
    ones = cast(inside, p.dtype)
    return p.scatter_add_(1, at, -ones[:, None]).mul_(weights[:, None])


def capped_gradient(
    logits: Tensor, local: Tensor, lse: Tensor, weights: Tensor, cap: float
) -> Tensor:
    """Return what `logits_gradient` does, of the logits before their cap."""
    slope = cap_slope(logits, cap)
    gradient = logits_gradient(logits, local, lse, weights)
    if slope is None:
        return gradient
    return gradient.mul_(slope)


def _inside(local: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Find the labels in a tile, and a column for each, [n, 1]: no shape depends on labels."""
    return (local >= 0) & (local < rows), local.clamp(0, rows - 1)[:, None]


def label_columns(labels_N: Tensor, tokens_A: Tensor) -> Tensor:
    """Return the index of each label among some tokens, int64 [N]; -100 if it is not one of
    them."""
    same_NA = (labels_N[:, None] == tokens_A[None]).to(torch.int64)
    index_N = (same_NA * torch.arange(tokens_A.shape[0], device=labels_N.device)).sum(1)
    return torch.where(same_NA.sum(1) > 0, index_N, torch.full_like(index_N, IGNORE))


def cap_slope(logits: Tensor, cap: float) -> Tensor | None:
    """Return the derivative of capped logits by what was capped, from the capped ones; None without
    a cap."""
    if not cap:
        return None
    return 1.0 - (logits / cap).square_()


def token_nll(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tiles: int = 8, cap: float = 0.0
) -> Tensor:
    """Compute the negative log likelihood of each label, 0 if it is -100; only label tokens are
    computed.

    Args:
        hidden_ND: [N, hidden], any float dtype.
        weight_VD: [vocabulary, hidden], the output head.
        labels_N: int64 [N].
        tiles: vocabulary tiles; at most N * vocabulary / tiles logits exist at once.
        cap: of the logits; 0: no cap.

    Returns:
        float32 [N]; float64 of a float64 model.
    """
    active = (labels_N != IGNORE).nonzero().squeeze(1)
    result = torch.zeros(
        labels_N.shape[0], dtype=wide(hidden_ND[:0]).dtype, device=hidden_ND.device
    )
    if active.numel() == 0:
        return result
    nll = _TiledNll.apply(hidden_ND[active], weight_VD, labels_N[active], tiles, cap)
    return result.index_put((active,), nll)


class _TiledNll(torch.autograd.Function):
    """The online log-sum-exp forward; backward computes each tile's logits again instead of keeping
    them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, tiles: int, cap: float
    ) -> Tensor:
        target_N = (wide(hidden_ND) * wide(weight_VD[labels_N])).sum(-1)
        if cap:
            target_N = cap * torch.tanh(target_N / cap)
        sums = None
        for low, high in tile_bounds(weight_VD.shape[0], tiles):
            sums = exp_sums(sums, float32_logits(hidden_ND, weight_VD[low:high], cap))
        assert sums is not None  # noqa: S101 - there is a tile
        maximum, total = sums
        logsumexp = maximum + total.log()
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, logsumexp)
        ctx.tiles = tiles
        ctx.cap = cap
        return logsumexp - target_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_ND, weight_VD, labels_N, logsumexp = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = grad_weight = None
        if need_hidden:
            grad_hidden = torch.zeros_like(hidden_ND)
        if need_weight:
            grad_weight = torch.zeros_like(weight_VD)
        for low, high in tile_bounds(weight_VD.shape[0], ctx.tiles):
            logits = float32_logits(hidden_ND, weight_VD[low:high], ctx.cap)
            scaled = capped_gradient(logits, labels_N - low, logsumexp, grad_N, ctx.cap)
            scaled = scaled.to(hidden_ND.dtype)
            if grad_hidden is not None:
                grad_hidden += scaled @ weight_VD[low:high]
            if grad_weight is not None:
                grad_weight[low:high] = scaled.t() @ hidden_ND
        return grad_hidden, grad_weight, None, None, None


class Norms(Protocol):
    """The norm before the head, forward and backward; see `methods.mesp.torch.kernels`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor
    ) -> Tensor: ...

    def loss_rows(
        self, logits: Tensor, targets: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...


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
        scale: factor of the logits; `cap` their soft cap, 0 for none.
        once: compute the logits of a few tokens over the whole vocabulary once, instead of those of
            all tokens tile by tile and twice: a third of the products less, for a head in memory.
    """

    def __init__(
        self,
        head: Head,
        norm: Tensor,
        eps: float,
        kernels: Norms,
        tiles: int,
        chunk_tokens: int | None,
        scale: float = 1.0,
        once: bool = False,
        cap: float = 0.0,
    ) -> None:
        self.head = head
        self.once = once and not cap
        self.cap = cap
        self.tiles = tiles
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
        nll = self.token_nll(x[where], targets[where])
        return rows.index_add_(0, where // labels_BT.shape[1], nll)

    def token_nll(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log likelihood of each label [n] from its [n, D], float32."""
        lse, label = self.log_sum_exp(self.norm(x), labels, again=False)
        return (lse - label).float()

    def backward(
        self, x: Tensor, labels_BT: Tensor, scale: Scale, labelled: Labelled | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss, float32 [], and `scale` times its gradient in the memory of `x`.

        A function of the rows' losses, float32 [B], gives each row its own scale.

        Args:
            labelled: `find_labelled` of the labels, if it is known.
        """
        where, targets = labelled or find_labelled(labels_BT)
        if where.numel() == 0:
            return torch.zeros((), device=x.device), x.zero_()
        if self.once and not callable(scale):
            return self.backward_once(x, where, targets, scale), x
        rows = x[where]
        hidden = self.norm(rows)
        lse, label = self.log_sum_exp(hidden, targets, again=True)
        if callable(scale):
            row_of = where // labels_BT.shape[1]
            nll = torch.zeros(labels_BT.shape[0], dtype=torch.float64, device=x.device)
            weights = scale(nll.index_add_(0, row_of, (lse - label).double()))[row_of].to(lse)
        else:
            weights = torch.full_like(lse, scale)
        gradient = self.hidden_gradient(hidden, targets, lse, weights)
        del hidden
        gradient = gradient.to(x.dtype)
        x.zero_()
        x[where] = self.norm_backward(rows, gradient)
        return (lse - label).sum().float(), x

    def backward_once(self, x: Tensor, where: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Return the summed loss, float32 [], and put `scale` times its gradient into `x` [N, D]."""
        weight = self.head.tile(0, self.head.vocab)
        size = once_tokens(self.head.vocab, self.chunk_tokens)
        losses = []
        for places, labels in zip(where.split(size), targets.split(size), strict=True):
            rows = x[places]
            hidden = self.norm(rows)
            logits = float32_logits(hidden, weight)
            nll, p = self.kernels.loss_rows(logits, labels, scale, weight.dtype)
            losses.append(nll.sum())
            x[places] = self.norm_backward(rows, torch.mm(p, weight, out=hidden))
            del logits, p
        other = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        other[where] = False
        x.masked_fill_(other[:, None], 0.0)
        return torch.stack(losses).sum().float()

    def norm(self, x: Tensor) -> Tensor:
        """Return the norm of [n, D], times the logits' factor."""
        normed = self.kernels.rms_norm(x, self.norm_weight, self.eps)
        return times(normed, self.scale)

    def norm_backward(self, x: Tensor, gn: Tensor) -> Tensor:
        """Return the gradient of x from that of its norm."""
        gn = times(gn, self.scale)
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
                logits = float32_logits(h, weight, self.cap)
                label_h += label_logits(logits, t - low)
                sums[number] = exp_sums(sums[number], logits)
        maximum, total = (
            joined([chunk_sums[i] for chunk_sums in sums if chunk_sums is not None])
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
        summed = None
        sums: list[Tensor | None] = [None]
        if len(chunks) > 1:
            summed = torch.zeros_like(hidden, dtype=lse.dtype)
            sums = list(self._chunks(summed))
        for low, weight in self._tiles(False):
            for number, (h, t, lse_of_h, w) in enumerate(chunks):
                logits = float32_logits(h, weight, self.cap)
                p = capped_gradient(logits, t - low, lse_of_h, w, self.cap)
                del logits
                gradient = torch.mm(cast(p, weight.dtype), weight)
                before = sums[number]
                del p
                sums[number] = wide(gradient) if before is None else before.add_(gradient)
        if summed is not None:
            return summed
        assert sums[0] is not None  # noqa: S101 - there is a tile
        return sums[0]

    def _tiles(self, again: bool) -> Iterator[tuple[int, Tensor]]:
        """First row and rows of each tile."""
        for number, (low, high) in enumerate(self.bounds):
            coming = self.bounds[number + 1 :] or (self.bounds if again else [None])
            yield low, self.head.tile(low, high, coming[0])

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        return row_chunks(x, self.chunk_tokens)


Labelled = tuple[Tensor, Tensor]
"""Places [n] of the tokens that predict a label, among all, and their labels [n]; int64."""
ONCE_TOKENS = (128, 512)
"""Tokens whose logits over the whole vocabulary exist at once, at least and at most: enough that
reading the head costs about as much as the product."""
ONCE_BYTES = 160 << 20
"""Between the two, the bytes of these logits, float32."""


def once_tokens(vocab: int, most: int | None) -> int:
    """Return how many tokens have logits at once."""
    low, high = ONCE_TOKENS
    size = min(max(ONCE_BYTES // (4 * vocab) // 64 * 64, low), high)
    return min(size, most or size)


def find_labelled(labels_BT: Tensor) -> Labelled:
    """Return the labelled places; on a GPU this waits for the work before it."""
    targets = next_labels(labels_BT)
    where = (targets != IGNORE).nonzero().squeeze(1)
    return where, targets[where]


def next_labels(labels_BT: Tensor) -> Tensor:
    """Return the label that each position predicts, int64 [N]; the last position of a row predicts
    nothing."""
    last = torch.full(
        (labels_BT.shape[0], 1), IGNORE, dtype=labels_BT.dtype, device=labels_BT.device
    )
    return torch.cat((labels_BT[:, 1:], last), 1).view(-1)
