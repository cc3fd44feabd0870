"""Cross-entropy and its gradients in one pass over the tokens: logits of a chunk exist once and are never kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ondevice.core.session import IGNORE
from ondevice.nn.cross_entropy import float32_logits


class ChunkedLoss:
    """Loss over one micro-batch. A head that is there as a whole needs one pass (`forward_backward`); one that comes in
    tiles of the vocabulary a pass for the log-sum-exp (`forward`) and one for the gradients (`backward`).

    Args:
        hidden_ND: [N, hidden], the normed hidden states in the compute dtype.
        labels_N: int64 [N], -100 where there is no label.
        scale: of the gradients: 1 / labelled tokens of the whole batch.
        chunk_tokens: tokens whose logits exist at once.

    Attributes:
        grad_hidden: [N, hidden], the gradient of `hidden_ND`, after the gradients' pass.
    """

    def __init__(
        self, hidden_ND: Tensor, labels_N: Tensor, scale: float, chunk_tokens: int
    ) -> None:
        self.hidden, self.labels, self.scale, self.chunk_tokens = (
            hidden_ND,
            labels_N,
            scale,
            chunk_tokens,
        )
        count = hidden_ND.shape[0]
        self.maximum = torch.full((count,), float("-inf"), device=hidden_ND.device)
        self.sum, self.target = torch.zeros_like(self.maximum), torch.zeros_like(self.maximum)
        self.grad_hidden = torch.zeros_like(hidden_ND)
        self.active = labels_N != IGNORE

    @torch.no_grad()
    def forward_backward(self, weight_VD: Tensor, grad_VD: Tensor) -> Tensor:
        """Return the summed loss, float32; the gradient of the whole head [V, hidden] is added to `grad_VD`."""
        total = torch.zeros((), device=self.hidden.device)
        for low in range(0, self.hidden.shape[0], self.chunk_tokens):
            chunk = slice(low, low + self.chunk_tokens)
            hidden, active, at = (
                self.hidden[chunk],
                self.active[chunk],
                self.labels[chunk].clamp(min=0)[:, None],
            )
            logits = float32_logits(hidden, weight_VD)
            logsumexp = logits.logsumexp(-1, keepdim=True)
            total += ((logsumexp - logits.gather(1, at))[:, 0] * active).sum()
            probability = logits.sub_(logsumexp).exp_()
            probability.scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32))
            scaled = probability.mul_((active * self.scale)[:, None]).to(hidden.dtype)
            torch.mm(scaled, weight_VD, out=self.grad_hidden[chunk])
            grad_VD.addmm_(scaled.t(), hidden)
        return total

    @torch.no_grad()
    def forward(self, weight_vD: Tensor, first: int) -> None:
        """Run the first pass: rows `first` onwards of the head."""
        for low in range(0, self.hidden.shape[0], self.chunk_tokens):
            chunk = slice(low, low + self.chunk_tokens)
            logits = float32_logits(self.hidden[chunk], weight_vD)
            larger = torch.maximum(self.maximum[chunk], logits.amax(-1))
            decayed = self.sum[chunk] * (self.maximum[chunk] - larger).exp()
            self.sum[chunk] = decayed + (logits - larger[:, None]).exp().sum(-1)
            self.maximum[chunk] = larger
            inside, at = self._inside(chunk, first, weight_vD.shape[0])
            self.target[chunk] += logits.gather(1, at)[:, 0] * inside

    @torch.no_grad()
    def backward(self, weight_vD: Tensor, first: int, grad_vD: Tensor) -> None:
        """Run the second pass over the same rows; adds to `grad_vD`."""
        logsumexp = self.maximum + self.sum.log()
        for low in range(0, self.hidden.shape[0], self.chunk_tokens):
            chunk = slice(low, low + self.chunk_tokens)
            probability = (
                float32_logits(self.hidden[chunk], weight_vD).sub_(logsumexp[chunk, None]).exp_()
            )
            inside, at = self._inside(chunk, first, weight_vD.shape[0])
            probability.scatter_add_(1, at, -inside[:, None].float())
            scaled = probability.mul_((self.active[chunk] * self.scale)[:, None]).to(
                self.hidden.dtype
            )
            self.grad_hidden[chunk].addmm_(scaled, weight_vD)
            grad_vD.addmm_(scaled.t(), self.hidden[chunk])

    def tokens(self) -> Tensor:
        """Return negative log likelihood of each token, float32 [N], 0 where there is no label; after the first
        pass."""
        return (self.maximum + self.sum.log() - self.target) * self.active

    def _inside(self, chunk: slice, first: int, rows: int) -> tuple[Tensor, Tensor]:
        labels = self.labels[chunk]
        inside = (labels >= first) & (labels < first + rows)
        return inside, (labels - first).clamp(0, rows - 1)[:, None]
