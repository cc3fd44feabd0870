"""The reference of every row: the method in plain PyTorch, float64, over transformers' own forward.

Nothing of `ondevice.methods` computes here. Noise is the numpy generator's, kept in memory;
gradients are autograd's; the optimizer is torch's AdamW, not fused; the loss is torch's
cross_entropy over all logits.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from ondevice.core.registry import spec_of
from ondevice.models.load import tiny_model
from ondevice.runtime_ops import generator
from tests.methods.prge.reference import Reference
from tests.methods.reference import in_double, plain_loss

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
        names = {
            (entry.layer, entry.target): family.linear_name(entry.layer, entry.target)
            for entry in layout.entries
        }
        return layout.to_tensors(self.flat.astype(np.float32), names)


class PlainSubspace(PlainPrge):
    """The same in a subspace that is given: W + scale A R C with a diagonal R, and Adam on the
    estimate.

    Args:
        state: of a session that has taken its subspace, whose A and C are used.
    """

    def __init__(
        self, config: Any, seed: int, family: str, sizes: dict[str, Any], state: dict[str, Any]
    ) -> None:
        super().__init__(config, seed, family, sizes)
        held = self.reference
        self.factors = {
            entry: [
                torch.from_numpy(
                    state[f"subspace/{entry.layer}.{entry.target}.{name}"].copy()
                ).double()
                for name in "ac"
            ]
            for entry in held.base
        }
        held.merged = self._merged  # type: ignore[method-assign]
        self.mean, self.square, self.count = np.zeros_like(self.flat), np.zeros_like(self.flat), 0

    def _merged(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        held, weights = self.reference, {}
        for entry, (a, c) in self.factors.items():
            r = flat[entry.offset : entry.offset + entry.rank]
            name = held.loaded.family.linear_name(entry.layer, entry.target) + ".weight"
            weights[name] = (
                held.base[entry]
                + (held.config.alpha / held.config.rank) * (a @ torch.diag(r) @ c).T
            )
        return weights

    def apply(self, gradients: np.ndarray, step: int, learning_rate: float) -> None:
        config, size = self.reference.config, self.reference.layout.size
        z = generator.normal(self.reference.seed, step, 0, config.queries, 0, size).astype(
            np.float64
        )
        estimate = (gradients[:, None] * z).sum(0) / config.queries
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * estimate
        self.square = 0.999 * self.square + 0.001 * estimate**2
        mean, square = self.mean / (1 - 0.9**self.count), self.square / (1 - 0.999**self.count)
        self.flat = self.flat - learning_rate * mean / (np.sqrt(square) + 1e-8)

    def trained(self) -> dict[str, np.ndarray]:
        tensors = {}
        for entry, (a, c) in self.factors.items():
            name = self.reference.loaded.family.linear_name(entry.layer, entry.target)
            r = torch.from_numpy(self.flat[entry.offset : entry.offset + entry.rank])
            tensors[f"{name}.lora_A.weight"] = a.T.numpy()
            tensors[f"{name}.lora_B.weight"] = (r[:, None] * c).T.numpy()
        return tensors


class PlainMezo:
    """Two forwards a query at theta + epsilon z and theta - epsilon z; theta itself never moves for
    them."""

    def __init__(self, config: Any, seed: int, family: str, sizes: dict[str, Any]) -> None:
        self.config, self.seed = config, seed
        self.model = in_double(tiny_model(family, **sizes).model)
        self.values = {
            name: value.detach().clone() for name, value in sorted(self.model.named_parameters())
        }

    def _z(self, step: int, query: int) -> dict[str, torch.Tensor]:
        number = step * self.config.queries + query
        return {
            name: torch.from_numpy(
                generator.normal(self.seed, number, tensor, 1, 0, value.numel())[0]
            )
            .double()
            .view_as(value)
            for tensor, (name, value) in enumerate(self.values.items())
        }

    @torch.no_grad()
    def _loss(
        self, ids: np.ndarray, labels: np.ndarray, z: dict[str, torch.Tensor], scale: float
    ) -> float:
        moved = {name: value + scale * z[name] for name, value in self.values.items()}
        output = torch.func.functional_call(
            self.model, moved, (torch.from_numpy(ids),), {"use_cache": False}
        )
        return float(plain_loss(output.logits, torch.from_numpy(labels)))

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int) -> Step:
        epsilon, zs = (
            self.config.perturbation_scale,
            [self._z(step, query) for query in range(self.config.queries)],
        )
        plus, minus = (
            np.array([self._loss(ids, labels, z, sign * epsilon) for z in zs]) for sign in (1, -1)
        )
        return np.concatenate([plus, minus]), (plus - minus) / (2 * epsilon)

    def apply(self, gradients: np.ndarray, step: int, learning_rate: float) -> None:
        for query, gradient in enumerate(gradients):
            z = self._z(step, query)
            for name in self.values:
                self.values[name] -= learning_rate / self.config.queries * gradient * z[name]

    def trained(self) -> dict[str, np.ndarray]:
        return {name: value.numpy() for name, value in self.values.items()}


class PlainFirstOrder:
    """Autograd and AdamW over an adapter or over all parameters; starts from the values that are
    given."""

    def __init__(
        self, config: Any, start: dict[str, np.ndarray], family: str, sizes: dict[str, Any]
    ) -> None:
        self.config, self.model = config, in_double(tiny_model(family, **sizes).model)
        self.leaves = {
            name: torch.from_numpy(value.copy()).double() for name, value in start.items()
        }
        frozen = ".lora_A." if config.name == "lora-fa" else "nothing"
        trained = [
            leaf.requires_grad_(True) for name, leaf in self.leaves.items() if frozen not in name
        ]
        kind = torch.optim.SGD if getattr(config, "optimizer", "") == "sgd" else torch.optim.AdamW
        self.optimizer = kind(trained, lr=0.0, weight_decay=config.weight_decay, foreach=False)

    def _weights(self) -> dict[str, torch.Tensor]:
        if spec_of(self.config).trains == "all":
            return self.leaves
        scale, weights = self.config.alpha / self.config.rank, {}
        for name in self.leaves:
            if name.endswith(".lora_A.weight"):
                linear = name.removesuffix(".lora_A.weight")
                delta = self.leaves[f"{linear}.lora_B.weight"] @ self.leaves[name]
                weights[f"{linear}.weight"] = (
                    self.model.get_parameter(f"{linear}.weight") + scale * delta
                )
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


class PlainRevffn(PlainFirstOrder):
    """The network of the settings in memory, transformers' own layers in float64, every activation
    stored."""

    def __init__(
        self, config: Any, start: dict[str, np.ndarray], family: str, sizes: dict[str, Any]
    ) -> None:
        super().__init__(config, start, family, sizes)
        self.layers = self.model.model.layers

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int) -> Step:
        weights = {name: leaf for name, leaf in self.leaves.items() if ".revffn." not in name}
        output = torch.func.functional_call(
            _Calls(self.model, self._forward), _prefixed(weights), (ids,)
        )
        loss = plain_loss(output, torch.from_numpy(labels))
        self.optimizer.zero_grad()
        loss.backward()
        return np.array([loss.item()]), np.array([])

    def _forward(self, ids: np.ndarray) -> torch.Tensor:
        core = self.model.model
        embedded = core.embed_tokens(torch.from_numpy(ids))
        self.position = core.rotary_emb(embedded, torch.arange(ids.shape[1])[None])
        hidden = (
            self._full(embedded)
            if self.config.coupling == "full"
            else self._half(*embedded.chunk(2, -1))
        )
        return self.model.lm_head(core.norm(hidden))

    def _full(self, h: torch.Tensor) -> torch.Tensor:
        """h[k+1] = (1 + g) h[k] - g h[k-1] + (1 - g) f(h[k]), the first step with h[-1] = h[0];
        what is read in the end is the sum of all changes."""
        before, g, total = h, 2.0**-self.config.gamma_bits, h
        for i in range(len(self.layers)):
            attention = self._attention(i, h, h)
            change = attention + self._mlp(i, h + attention)
            total = total + change
            h, before = (1 + g) * h - g * before + (1 - g) * change, h
        return total

    def _half(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`exact`: x += down(attention(up(y))), y += down(mlp(up(x))); `paper` takes the queries
        from x."""
        for i in range(len(self.layers)):
            up, down, mlp_up, mlp_down = (
                self.leaves[f"model.layers.{i}.revffn.{name}"]
                for name in ("attention_up", "attention_down", "mlp_up", "mlp_down")
            )
            queries = x if self.config.coupling == "paper" else y
            x = x + self._attention(i, queries @ up.T, y @ up.T) @ down.T
            y = y + self._mlp(i, x @ mlp_up.T) @ mlp_down.T
        return torch.cat((x, y), -1)

    def _mlp(self, i: int, h: torch.Tensor) -> torch.Tensor:
        return self.layers[i].mlp(self.layers[i].post_attention_layernorm(h))

    def _attention(self, i: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Written out: softmax over all scores, keys repeated for their groups."""
        layer, (cos, sin) = self.layers[i], (table[:, None].double() for table in self.position)
        own, width = layer.self_attn, layer.self_attn.head_dim
        read, seen = layer.input_layernorm(queries), layer.input_layernorm(keys)
        q, k, v = (
            project(h).unflatten(-1, (-1, width)).transpose(1, 2)
            for project, h in ((own.q_proj, read), (own.k_proj, seen), (own.v_proj, seen))
        )
        half = width // 2
        q, k = (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(2, 3) / width**0.5).masked_fill(future, float("-inf"))
        return own.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class _Calls(torch.nn.Module):
    """A module whose forward is `function`, so that `functional_call` can put leaves in the place
    of its weights."""

    def __init__(self, inner: Any, function: Any) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, ids: np.ndarray) -> torch.Tensor:
        return self.function(ids)


def _prefixed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"inner.{name}": value for name, value in weights.items()}
