"""P-RGE's step written down once more, in float64 and by another road.

An adapter is added to the weights (no bmm, no copies in a batch), the model is transformers' own
forward, the loss is torch's cross_entropy over all logits, and the noise is the numpy generator's,
kept in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.layout import NOISE_TENSOR, AdapterLayout
from ondevice.models import LoadedModel
from ondevice.models.load import tiny_model
from ondevice.runtime_ops import generator
from tests.methods.reference import in_double, plain_loss


def noise(config: Any, seed: int, step: int, count: int, tensor: int = NOISE_TENSOR) -> np.ndarray:
    """z float64 [q, count]."""
    draw = generator.normal if config.noise == "gaussian" else generator.rademacher
    return draw(seed, step, tensor, config.queries, 0, count).astype(np.float64)


class Reference:
    """The method's formulas over a float64 model; `flat` is the adapter as the program lays it out."""

    def __init__(self, config: PrgeConfig, seed: int, family: str = "llama", **sizes: Any) -> None:
        self.config, self.seed = config, seed
        self.loaded: LoadedModel = tiny_model(family, **sizes)
        self.model = in_double(self.loaded.model)
        self.layout = AdapterLayout.build(self.loaded.dims, config, seed)
        self.base = {entry: self._weight(entry).detach().clone() for entry in self.layout.entries}

    def _weight(self, entry: Any) -> torch.Tensor:
        return self.loaded.family.linear(entry.layer, entry.target).weight

    def merged(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The target weights W + (alpha / rank) (A B)^T for an adapter float64 [size]."""
        weights = {}
        for entry, base in self.base.items():
            a = torch.from_numpy(self.layout.frozen_a(entry)).double()
            b = flat[entry.offset : entry.offset + entry.count].reshape(entry.rank, entry.outputs)
            name = self.loaded.family.linear_name(entry.layer, entry.target) + ".weight"
            weights[name] = base + (self.config.alpha / self.config.rank) * (a @ b).T
        return weights

    def loss(self, flat: torch.Tensor, ids: np.ndarray, labels: np.ndarray) -> torch.Tensor:
        """Mean negative log likelihood a labelled token, float64, differentiable in `flat`."""
        tokens = torch.from_numpy(ids)
        output = torch.func.functional_call(
            self.model, self.merged(flat), (tokens,), {"use_cache": False}
        )
        return plain_loss(output.logits, torch.from_numpy(labels))

    def losses(
        self, flat: np.ndarray, z: np.ndarray, ids: np.ndarray, labels: np.ndarray
    ) -> np.ndarray:
        """Of every copy, in the program's order: plus then minus, or unperturbed then plus."""
        moved = self.config.perturbation_scale * z
        central = self.config.estimator == "central"
        copies = [*(flat + moved), *(flat - moved)] if central else [flat, *(flat + moved)]
        with torch.no_grad():
            return np.array(
                [float(self.loss(torch.from_numpy(copy), ids, labels)) for copy in copies]
            )

    def step(
        self, flat: np.ndarray, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses, projected gradients and the new adapter: Eq. (1) and ZO-SGD, or FZOO's estimator."""
        q, epsilon = self.config.queries, self.config.perturbation_scale
        z = noise(self.config, self.seed, step, self.layout.size)
        losses = self.losses(flat, z, ids, labels)
        if self.config.estimator == "central":
            gradients = (losses[:q] - losses[q:]) / (2 * epsilon)
        else:
            gradients = (losses[1:] - losses[0]) / np.std(losses[1:], ddof=1)
        return losses, gradients, flat - learning_rate / q * (gradients[:, None] * z).sum(0)

    def directional(
        self, flat: np.ndarray, z: np.ndarray, ids: np.ndarray, labels: np.ndarray
    ) -> np.ndarray:
        """The exact derivative of the loss along each z, by autograd."""
        point = torch.from_numpy(flat).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.loss(point, ids, labels), point)
        return z @ gradient.numpy()
