"""What every row is held against: the method in plain PyTorch, float64, over transformers' own forward.

Nothing of `ondevice.methods` computes here. Noise is the numpy generator's, kept in memory; gradients are
autograd's; the optimizer is torch's AdamW, not fused; the loss is torch's cross_entropy over all logits.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from ondevice.models.tiny import tiny_model
from ondevice.runtime_ops import generator
from tests.methods.reference import Reference, in_double, plain_loss

Step = tuple[np.ndarray, np.ndarray]
"""Losses, projected gradients."""


class Plain(Protocol):
    """A method in memory. `apply` is the update of a step whose projected gradients are given."""

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int) -> Step: ...

    def apply(self, gradients: np.ndarray, step: int, learning_rate: float) -> None: ...

    def trained(self) -> dict[str, np.ndarray]: ...


class PlainPrge:
    """Eq. (1) with materialised noise, adapters merged into the weights."""

    def __init__(self, config: Any, seed: int, family: str, sizes: dict[str, Any]) -> None:
        self.reference = Reference(config, seed, family, **sizes)
        self.flat = np.zeros(self.reference.layout.size)

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int) -> Step:
        losses, gradients, _ = self.reference.step(self.flat, ids, labels, step, 0.0)
        return losses, gradients

    def apply(self, gradients: np.ndarray, step: int, learning_rate: float) -> None:
        config, size = self.reference.config, self.reference.layout.size
        draw = generator.normal if config.noise == "gaussian" else generator.rademacher
        z = draw(self.reference.seed, step, 0, config.queries, 0, size).astype(np.float64)
        self.flat = self.flat - learning_rate / config.queries * (gradients[:, None] * z).sum(0)

    def trained(self) -> dict[str, np.ndarray]:
        family, layout = self.reference.loaded.family, self.reference.layout
        names = {(entry.layer, entry.target): family.linear_name(entry.layer, entry.target) for entry in layout.entries}
        return layout.to_tensors(self.flat.astype(np.float32), names)


class PlainMezo:
    """Two forwards a query at theta + epsilon z and theta - epsilon z; theta itself never moves for them."""

    def __init__(self, config: Any, seed: int, family: str, sizes: dict[str, Any]) -> None:
        self.config, self.seed = config, seed
        self.model = in_double(tiny_model(family, **sizes).model)
        self.values = {name: value.detach().clone() for name, value in sorted(self.model.named_parameters())}

    def _z(self, step: int, query: int) -> dict[str, torch.Tensor]:
        number = step * self.config.queries + query
        return {
            name: torch.from_numpy(generator.normal(self.seed, number, tensor, 1, 0, value.numel())[0])
            .double()
            .view_as(value)
            for tensor, (name, value) in enumerate(self.values.items())
        }

    @torch.no_grad()
    def _loss(self, ids: np.ndarray, labels: np.ndarray, z: dict[str, torch.Tensor], scale: float) -> float:
        moved = {name: value + scale * z[name] for name, value in self.values.items()}
        output = torch.func.functional_call(self.model, moved, (torch.from_numpy(ids),), {"use_cache": False})
        return float(plain_loss(output.logits, torch.from_numpy(labels)))

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int) -> Step:
        epsilon, zs = self.config.perturbation_scale, [self._z(step, query) for query in range(self.config.queries)]
        plus, minus = (np.array([self._loss(ids, labels, z, sign * epsilon) for z in zs]) for sign in (1, -1))
        return np.concatenate([plus, minus]), (plus - minus) / (2 * epsilon)

    def apply(self, gradients: np.ndarray, step: int, learning_rate: float) -> None:
        for query, gradient in enumerate(gradients):
            z = self._z(step, query)
            for name in self.values:
                self.values[name] -= learning_rate / self.config.queries * gradient * z[name]

    def trained(self) -> dict[str, np.ndarray]:
        return {name: value.numpy() for name, value in self.values.items()}


class PlainFirstOrder:
    """Autograd and AdamW over an adapter or over all parameters; starts from the values that are given."""

    def __init__(self, config: Any, start: dict[str, np.ndarray], family: str, sizes: dict[str, Any]) -> None:
        self.config, self.model = config, in_double(tiny_model(family, **sizes).model)
        self.leaves = {name: torch.from_numpy(value.copy()).double() for name, value in start.items()}
        frozen = ".lora_A." if config.name == "lora-fa" else "nothing"
        trained = [leaf.requires_grad_(True) for name, leaf in self.leaves.items() if frozen not in name]
        kind = torch.optim.SGD if getattr(config, "optimizer", "") == "sgd" else torch.optim.AdamW
        self.optimizer = kind(trained, lr=0.0, weight_decay=config.weight_decay, foreach=False)

    def _weights(self) -> dict[str, torch.Tensor]:
        if self.config.name in ("full", "slideformer", "lsp"):
            return self.leaves
        scale, weights = self.config.alpha / self.config.rank, {}
        for name in self.leaves:
            if name.endswith(".lora_A.weight"):
                linear = name.removesuffix(".lora_A.weight")
                delta = self.leaves[f"{linear}.lora_B.weight"] @ self.leaves[name]
                weights[f"{linear}.weight"] = self.model.get_parameter(f"{linear}.weight") + scale * delta
        return weights

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int) -> Step:
        options = (torch.from_numpy(ids),), {"use_cache": False}
        output = torch.func.functional_call(self.model, self._weights(), *options)
        loss = plain_loss(output.logits, torch.from_numpy(labels))
        self.optimizer.zero_grad()
        loss.backward()
        return np.array([loss.item()]), np.array([])

    def apply(self, gradients: np.ndarray, step: int, learning_rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()

    def trained(self) -> dict[str, np.ndarray]:
        return {name: leaf.detach().numpy() for name, leaf in self.leaves.items()}
