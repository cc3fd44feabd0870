"""The loss, sums of micro-batches, and clipping while updates overlap with the backward pass.

`EngineConfig.clip` states the three rules. Norms are squared and kept by unit, so they
add up whatever the order in which units arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.core.session import IGNORE
from ondevice.nn.cross_entropy import float32_logits
from ondevice.runtime_ops.layer_adam import AdamStep

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Device
    from ondevice.offload.units import Ranks, Unit, Units

TINY = 1e-6
"""Added to a norm before the division, as in `torch.nn.utils.clip_grad_norm_`."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: AdamW's settings, and squared gradient norms of this step and the
    last. One that is `adding` only adds its gradients to those of the next."""

    adam: AdamStep
    squares: dict[int, float]
    before: dict[int, float]
    adding: bool = False

    @property
    def norm(self) -> float:
        """The norm of the gradients that have come so far."""
        return math.sqrt(math.fsum(self.squares.values()))


class Clipping:
    """The running step and its norms."""

    def __init__(self, config: EngineConfig, units: Units, ranks: Ranks) -> None:
        self.limit = config.max_grad_norm
        self.rule = config.clip
        self.ranks = ranks
        self.config = config
        self.units = units
        self.count = len(units.all)
        self.now = Step(AdamStep(learning_rate=0.0), {}, {})

    @property
    def exact(self) -> bool:
        """True if updates wait for the norm of the complete gradient."""
        return self.limit is not None and self.rule == "global"

    def begin(self, step: int, learning_rate: float, adding: bool = False) -> None:
        """Begin the updates of step `step` (from 0), or the `adding` of gradients to it."""
        c = self.config
        adam = AdamStep(learning_rate, c.beta1, c.beta2, c.eps, c.weight_decay, step + 1)
        before = self.now.before if self.now.adding else self.now.squares
        self.now = Step(adam, {}, before, adding)

    def apply(self, now: Step, unit: Unit) -> AdamStep:
        """Return AdamW's settings for a unit whose norm is in `now`."""
        if self.limit is None:
            return now.adam
        own = math.sqrt(now.squares.get(unit.index, 0.0))
        if self.rule == "layer":
            norm = own
        elif self.exact:
            norm = now.norm
        elif not now.before:
            norm = own * math.sqrt(self.count)
        else:
            norm = max(own, math.sqrt(math.fsum(now.before.values())))
        return replace(now.adam, grad_scale=min(1.0, self.limit / (norm + TINY)))

    @property
    def exceeded(self) -> bool:
        """True if the gradients that have come so far are clipped, whatever the others are."""
        return self.limit is not None and self.now.norm + TINY > self.limit

    def scale(self, square: Tensor) -> Tensor:
        """Return the scale, float64 [1], for a unit whose squared norm is on the accelerator."""
        own = square.double().sqrt()
        if self.rule == "layer":
            norm = own
        elif not self.now.before:
            norm = own * math.sqrt(self.count)
        else:
            norm = own.clamp(min=math.sqrt(math.fsum(self.now.before.values())))
        return ((self.limit or 0.0) / (norm + TINY)).clamp(max=1.0)

    def norms(self) -> dict[str, Tensor]:
        """Return the last step's squared norms by unit for a checkpoint; empty if no step reads
        them."""
        if self.limit is None or self.rule != "previous":
            return {}
        squares = self.now.squares
        return {
            f"square/{u.key}": torch.tensor([squares.get(u.index, 0.0)], dtype=torch.float64)
            for u in self.units.all
        }

    def restore(self, arrays: Any) -> None:
        """Take back what `norms` gave."""
        norms = {unit.index: arrays.get(name) for name, unit in zip(self.norms(), self.units.all)}
        squares = {
            index: float(value[:1].item()) for index, value in norms.items() if value is not None
        }
        self.now = replace(self.now, squares=squares if any(squares.values()) else {})


def square(gradient: Tensor) -> Tensor:
    """Return the squared norm, float32 [1]."""
    return torch.linalg.vector_norm(gradient, dtype=torch.float32).square().reshape(1)


class Accumulator:
    """A float32 sum of the micro-batches' gradients: each is rounded to `dtype` once, and the sum
    once.

    Does nothing for float32 gradients or a single micro-batch."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self.device = device
        self.needed = dtype != torch.float32
        self.memory = device.empty(0, torch.float32)
        self.count = 0

    def begin(self, micro_batches: int) -> None:
        """Begin the sum of so many gradients."""
        self.several = self.needed and micro_batches > 1
        self.count = 0

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """Add a gradient, flat, and clear its memory for the next one."""
        if not self.several:
            return
        if self.memory.numel() < gradient.numel():
            self.memory = self.device.empty(gradient.numel(), torch.float32)
        total = self.memory[: gradient.numel()]
        total.add_(gradient) if self.count else total.copy_(gradient)
        gradient.zero_()
        self.count += 1

    @torch.no_grad()
    def finish(self, gradient: Tensor) -> None:
        """Write the sum over the last gradient."""
        if self.several and self.count:
            gradient.copy_(self.memory[: gradient.numel()])


class ChunkedLoss:
    """Loss over one micro-batch: logits of a chunk of tokens exist once and are never stored.

    A complete head needs one pass (`forward_backward`). A head in tiles of the vocabulary needs one
    pass for the log-sum-exp (`forward`) and one for the gradients (`backward`).

    Args:
        hidden_ND: [N, hidden], the normed hidden states in the compute dtype.
        labels_N: int64 [N], -100 for no label.
        scale: of the gradients: 1 / labelled tokens of the whole batch. `weigh` gives each token its
            own.
        chunk_tokens: tokens whose logits exist at once.

    Attributes:
        grad_hidden: [N, hidden], the gradient of `hidden_ND`, after the gradients' pass.
    """

    def __init__(
        self, hidden_ND: Tensor, labels_N: Tensor, scale: float, chunk_tokens: int
    ) -> None:
        self.hidden = hidden_ND
        self.labels = labels_N
        self.scale = scale
        self.chunk_tokens = chunk_tokens
        count = hidden_ND.shape[0]
        self.maximum = torch.full((count,), float("-inf"), device=hidden_ND.device)
        self.sum = torch.zeros_like(self.maximum)
        self.target = torch.zeros_like(self.maximum)
        self.grad_hidden = torch.zeros_like(hidden_ND)
        self.active = labels_N != IGNORE
        self.weights = self.active * scale

    def weigh(self, weights_B: Tensor) -> None:
        """Give the tokens of each row that row's scale, before the gradients' pass."""
        of_tokens = weights_B.repeat_interleave(len(self.active) // len(weights_B))
        self.weights = self.active * of_tokens.float()

    def row_nll(self, rows: int) -> Tensor:
        """Return negative log likelihood of each row, float64 [rows], after the first pass."""
        return self.tokens().double().view(rows, -1).sum(1)

    @torch.no_grad()
    def forward_backward(self, weight_VD: Tensor, grad_VD: Tensor) -> Tensor:
        """Return the summed loss, float32; adds the gradient of the head [V, hidden] to
        `grad_VD`."""
        total = torch.zeros((), device=self.hidden.device)
        for low in range(0, self.hidden.shape[0], self.chunk_tokens):
            chunk = slice(low, low + self.chunk_tokens)
            hidden = self.hidden[chunk]
            active = self.active[chunk]
            at = self.labels[chunk].clamp(min=0)[:, None]
            logits = float32_logits(hidden, weight_VD)
            logsumexp = logits.logsumexp(-1, keepdim=True)
            total += ((logsumexp - logits.gather(1, at))[:, 0] * active).sum()
            probability = logits.sub_(logsumexp).exp_()
            probability.scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32))
            scaled = probability.mul_(self.weights[chunk, None]).to(hidden.dtype)
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
            scaled = probability.mul_(self.weights[chunk, None]).to(self.hidden.dtype)
            self.grad_hidden[chunk].addmm_(scaled, weight_vD)
            grad_vD.addmm_(scaled.t(), self.hidden[chunk])

    def tokens(self) -> Tensor:
        """Return negative log likelihood of each token, float32 [N], 0 without a label."""
        return (self.maximum + self.sum.log() - self.target) * self.active

    def _inside(self, chunk: slice, first: int, rows: int) -> tuple[Tensor, Tensor]:
        labels = self.labels[chunk]
        inside = (labels >= first) & (labels < first + rows)
        return inside, (labels - first).clamp(0, rows - 1)[:, None]
