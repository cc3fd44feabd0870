"""GaLore (Zhao et al., 2024): AdamW on gradients that are projected onto their largest singular
vectors.

Of a matrix's gradient G [m, n] the shorter side is projected: with Q [r, min(m, n)] of orthonormal
rows, the largest singular vectors of that side, the low gradient is G Q^T if m >= n and Q G else.
Adam runs on it, and the weight gets alpha times its step projected back. Every `refresh` steps Q
comes anew from the gradient at hand; the moments stay as they are, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ondevice.runtime_ops.layer_adam import AdamStep, torch_step


@dataclass
class Projected:
    """One matrix, or a stack of them (the experts of a layer), each with its own basis.

    Attributes:
        weight: [..., m, n].
        basis: Q, float32 [..., r, min(m, n)]; None before the first step.
        m, v: Adam's moments of the low gradient, float32 [..., m, r] if m >= n, else [..., r, n].
    """

    weight: nn.Parameter
    basis: Tensor | None = None
    m: Tensor | None = None
    v: Tensor | None = None

    @property
    def tall(self) -> bool:
        return self.weight.shape[-2] >= self.weight.shape[-1]

    def low(self, gradient: Tensor, basis: Tensor) -> Tensor:
        """The projected gradient of [..., m, n]."""
        return gradient @ basis.mT if self.tall else basis @ gradient

    def back(self, low: Tensor, basis: Tensor) -> Tensor:
        """Return what lies in the subspace as [..., m, n]."""
        return low @ basis if self.tall else basis.mT @ low


class GaloreAdamW:
    """GaLore on some matrices, AdamW on the other parameters, with one rate and without weight
    decay.

    Args:
        projected: matrices whose gradients are projected; a matrix with a side shorter than `rank`
            keeps all of it.
        others: parameters updated as they are.
        rank: r.
        refresh: steps between two decompositions.
        alpha: of the projected update.
    """

    def __init__(
        self, projected: Iterable[nn.Parameter], others: Iterable[nn.Parameter], rank: int = 16, refresh: int = 200,
        alpha: float = 0.25,
    ) -> None:  # fmt: skip
        self.rank, self.refresh, self.alpha, self.count = rank, refresh, alpha, 0
        self.entries = [Projected(weight) for weight in projected]
        self.others = list(others)
        self.adamw = (
            torch.optim.AdamW(self.others, lr=0.0, weight_decay=0.0, fused=True)
            if self.others
            else None
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step with the parameters' `.grad`, which are cleared."""
        for entry in self.entries:
            self.step_one(entry, learning_rate)
        if self.adamw is not None:
            self.adamw.param_groups[0]["lr"] = learning_rate
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
        self.count += 1

    def tensors(self) -> Iterator[Tensor]:
        """The state: bases and moments."""
        for entry in self.entries:
            yield from (t for t in (entry.basis, entry.m, entry.v) if t is not None)
        if self.adamw is not None:
            yield from (
                t for state in self.adamw.state.values() for t in state.values() if t.numel() > 1
            )

    @torch.no_grad()
    def step_one(self, entry: Projected, learning_rate: float) -> None:
        """One matrix's part of `step`; whoever calls it counts the steps in `count`."""
        if entry.weight.grad is None:
            return
        gradient = entry.weight.grad.float()
        if entry.basis is None or self.count % self.refresh == 0:
            entry.basis = largest_vectors(gradient, self.rank)
        low = entry.low(gradient, entry.basis)
        if entry.m is None or entry.v is None:
            entry.m, entry.v = torch.zeros_like(low), torch.zeros_like(low)
        change = torch.zeros_like(low)
        torch_step(change, low, entry.m, entry.v, AdamStep(1.0, step=self.count + 1))
        entry.weight.add_(entry.back(change, entry.basis), alpha=learning_rate * self.alpha)
        entry.weight.grad = None


def largest_vectors(gradient: Tensor, rank: int) -> Tensor:
    """The largest singular vectors of the shorter side of [..., m, n]: [..., min(rank, m, n),
    min(m, n)], orthonormal.

    They are the eigenvectors of the smaller of G^T G and G G^T, which on a GPU is far faster than a
    singular value decomposition of G.
    """
    tall = gradient.shape[-2] >= gradient.shape[-1]
    gram = gradient.mT @ gradient if tall else gradient @ gradient.mT
    vectors = torch.linalg.eigh(gram).eigenvectors  # ascending, in columns
    return vectors[..., -min(rank, gram.shape[-1]) :].mT.flip(-2).contiguous()
