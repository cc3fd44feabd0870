"""Algorithm 1 as the paper writes it: 2q perturbed copies of B are the state, and the update lags
one step.

The package keeps B once and makes its noise again; the tests hold both against each other, and
`benchmarks.prge.options` measures the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ondevice.methods.prge.layout import NOISE_TENSOR
from ondevice.methods.prge.step import PrgeProgram


class CopiesState:
    """B[0..q-1] (plus) and B[q..2q-1] (minus), float32 [2q, size], and the projected gradients
    still to apply."""

    def __init__(self, adapter_P: Tensor, queries: int) -> None:
        self.copies = adapter_P[None].repeat(2 * queries, 1)
        self.pending = torch.zeros(queries, device=adapter_P.device)
        self.learning_rate = torch.zeros(1, device=adapter_P.device)

    def step(
        self,
        program: PrgeProgram,
        ids_BT: Tensor,
        labels_BT: Tensor,
        seed: Tensor,
        step: Tensor,
        learning_rate: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Lines 2 to 7: recover the last noise, restore, update, perturb anew, run. Losses [2q] and
        gradients [q]."""
        self.perturb(program, seed, step)
        losses = program.losses(
            ids_BT, labels_BT, lambda start, count: self.copies[:, start : start + count]
        )
        self.pending, self.learning_rate = program.projected_gradients(losses), learning_rate
        return losses, self.pending

    def perturb(self, program: PrgeProgram, seed: Tensor, step: Tensor) -> None:
        """Lines 2 to 6: the pending update is applied and the copies carry the noise of `step`."""
        q, epsilon = program.config.queries, program.config.perturbation_scale
        difference = self._difference()
        update = self._update(difference, epsilon)
        z = program.noise(seed, step, NOISE_TENSOR, q, 0, program.layout.size) * epsilon
        plus = self.copies[:q] - difference - update + z
        minus = self.copies[q:] + difference - update - z
        self.copies = torch.cat([plus, minus])

    def _difference(self) -> Tensor:
        q = self.copies.shape[0] // 2
        return (self.copies[:q] - self.copies[q:]) / 2

    def _update(self, difference: Tensor, epsilon: float) -> Tensor:
        q = self.copies.shape[0] // 2
        coefficients = self.learning_rate / q * self.pending
        return (coefficients[:, None] * difference / epsilon).sum(0, keepdim=True)

    def master(self, epsilon: float) -> Tensor:
        """B without perturbation and with the pending update applied, float32 [size]."""
        difference = self._difference()
        q = self.copies.shape[0] // 2
        return ((self.copies[:q] - difference) - self._update(difference, epsilon)).mean(0)
