"""A whole MeSP step as one pure function: ids, labels, adapter and moments go in; loss, adapter and moments come out.

No automatic differentiation is inside, so it is a plain forward graph: `torch.export` takes it, and a runtime made for
inference runs it. Forward keeps block inputs, and every block's backward pass is over before the next begins, so that
a memory plan gives all of them the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ondevice.methods.mesp.layout import FlatLayout
from ondevice.methods.mesp.pairs import initial_tensors, pairs_of
from ondevice.methods.mesp.torch.graph import GraphBlock, GraphLinear, GraphStages, Position
from ondevice.nn.cross_entropy import IGNORE, tile_bounds

if TYPE_CHECKING:
    import numpy as np

    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class Table(nn.Module):
    """The embedding and, where it is tied, the head: tiles of rows, each a constant of its own.

    A slice of one large constant would be copied into a program's memory whenever the head is at it. A token's row
    is looked up in every tile and chosen, which costs little beside one layer.
    """

    def __init__(self, weight_VD: Tensor, tiles: int) -> None:
        super().__init__()
        self.bounds = tile_bounds(weight_VD.shape[0], tiles)
        for number, (low, high) in enumerate(self.bounds):
            self.register_buffer(f"tile_{number}", weight_VD[low:high].clone())

    def tiles(self) -> list[tuple[int, Tensor]]:
        """First row and rows of each."""
        return [(low, getattr(self, f"tile_{number}")) for number, (low, _) in enumerate(self.bounds)]

    def rows(self, ids_N: Tensor) -> Tensor:
        """[N, D]."""
        found: Tensor | None = None
        for low, weight in self.tiles():
            part = nn.functional.embedding((ids_N - low).clamp(0, weight.shape[0] - 1), weight)
            found = part if found is None else torch.where((ids_N >= low)[:, None], part, found)
        assert found is not None  # noqa: S101 - there is a tile
        return found


class MespProgram(nn.Module):
    """The step of a loaded float32 model.

    Args:
        loaded: weights are shared with it; its embedding and head are copied into tiles.
        config: `loss_tiles` are the head's tiles.
        lengths_tokens: lengths that the program is for; each has its own positions and mask.
    """

    def __init__(self, loaded: LoadedModel, config: MespConfig, lengths_tokens: tuple[int, ...]) -> None:
        super().__init__()
        self.loaded, self.family, self.dims, self.config = loaded, loaded.family, loaded.dims, config
        self.pairs = pairs_of(loaded.dims, type(loaded.family), config)
        self.layout = FlatLayout.build(self.pairs)
        self.model = loaded.model
        self.embedding = Table(loaded.family.embedding.weight.detach(), config.loss_tiles)
        self.head = self.embedding
        if not loaded.dims.tied:
            self.head = Table(loaded.family.head_weight.detach(), config.loss_tiles)
        for length in lengths_tokens:
            cos, sin = loaded.family.positions(length, "cpu", torch.float32)
            half = cos.shape[-1] // 2
            self.register_buffer(f"cos_{length}", cos[None, :, :, :half].clone())
            self.register_buffer(f"sin_{length}", sin[None, :, :, :half].clone())
            self.register_buffer(f"mask_{length}", torch.full((length, length), float("-inf")).triu(1))

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimizer's vectors."""
        return MOMENTS if self.config.optimizer == "adamw" else ()

    def initial(self, seed: int) -> np.ndarray:
        """The adapter that a run starts from, float32 [layout.size]."""
        return self.layout.to_flat(initial_tensors(self.pairs, seed))

    def train_step(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor,
        adapter: Tensor,
        moments: tuple[Tensor, ...],
        step: Tensor,
        rate: Tensor,
    ) -> tuple[Tensor, ...]:
        """Loss float32 [1], the new adapter, the new moments.

        Args:
            ids_BT, labels_BT: int64 [rows, tokens].
            adapter: float32 [layout.size]; moments likewise.
            step: int64 [1], from 0; learning rate float32 [1].
        """
        inputs, x, count = [], self.embedding.rows(ids_BT.reshape(-1)), self._count(labels_BT)
        stages, position, mask = self._stages(ids_BT)
        for i in range(self.dims.layers):
            inputs.append(x)
            x = stages.forward(self._block(i, adapter), x, position, mask)
        total, g = self._loss_and_gradient(stages, x, labels_BT, 1.0 / count)
        found: list[tuple[Tensor, ...]] = []
        for i in reversed(range(self.dims.layers)):
            gradients: dict[str, tuple[Tensor, Tensor]] = {}

            def learn(target: str, ga: Tensor, gb: Tensor, gradients: dict = gradients) -> None:
                gradients[target] = (ga, gb)

            g = stages.backward(self._block(i, adapter), inputs.pop(), g, position, mask, learn, last=i == 0)
            found.insert(0, self._updated(i, gradients, (adapter, *moments), step, rate))
        vectors = (torch.cat([one[number] for one in found]) for number in range(1 + len(moments)))
        return (total / count, *vectors)

    def evaluate(self, ids_BT: Tensor, labels_BT: Tensor, adapter: Tensor) -> tuple[Tensor, Tensor]:
        """Summed negative log likelihood and labelled tokens of each row, float32 [rows]."""
        stages, _, _ = self._stages(ids_BT)
        x = self._hidden(ids_BT, adapter)
        hidden, targets = stages.norm(self._final_norm(), x), self._next(labels_BT)
        lse, wanted = self._look(hidden, targets)
        active = (targets != IGNORE).to(torch.float32)
        rows = (ids_BT.shape[0], -1)
        return ((lse - wanted) * active).view(rows).sum(1), active.view(rows).sum(1)

    def next_token(self, ids_1T: Tensor, length: Tensor, adapter: Tensor) -> Tensor:
        """Logits float32 [vocab] behind the first `length` tokens."""
        x = self._hidden(ids_1T, adapter).index_select(0, length - 1)
        hidden = self._stages(ids_1T)[0].norm(self._final_norm(), x)
        return torch.cat([nn.functional.linear(hidden, weight)[0] for _, weight in self.head.tiles()])

    def gradients(self, ids_BT: Tensor, labels_BT: Tensor, adapter: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient of the adapter, as what SGD at rate 1 changes: for checks."""
        with torch.no_grad():
            sgd = self.config.model_copy(update={"optimizer": "sgd", "weight_decay": 0.0})
            kept, self.config = self.config, sgd
            try:
                one = torch.ones(1)
                loss, after = self.train_step(ids_BT, labels_BT, adapter, (), torch.zeros(1, dtype=torch.int64), one)
            finally:
                self.config = kept
        return loss, adapter - after

    def _hidden(self, ids_BT: Tensor, adapter: Tensor) -> Tensor:
        x = self.embedding.rows(ids_BT.reshape(-1))
        stages, position, mask = self._stages(ids_BT)
        for i in range(self.dims.layers):
            x = stages.forward(self._block(i, adapter), x, position, mask)
        return x

    def _stages(self, ids_BT: Tensor) -> tuple[GraphStages, Position, Tensor]:
        rows, length = ids_BT.shape
        dims = self.dims
        stages = GraphStages(rows, length, dims.heads, dims.kv_heads, dims.head_dim, dims.norm_eps)
        cos, sin, mask = (getattr(self, f"{name}_{length}") for name in ("cos", "sin", "mask"))
        return stages, (cos, sin), mask

    def _block(self, i: int, adapter: Tensor) -> GraphBlock:
        layer, linears = self.model.get_submodule(f"model.layers.{i}"), {}
        places = {entry.pair.target: entry for entry in self.layout.of_layer(i)}
        for target in self.family.linear_targets:
            linear, entry, a, b = self.family.linear(i, target), places.get(target), None, None
            if entry is not None:
                pair = entry.pair
                a = adapter[entry.a : entry.a + pair.rank * pair.inputs].view(pair.rank, pair.inputs)
                b = adapter[entry.b : entry.b + pair.rank * pair.outputs].view(pair.rank, pair.outputs)
            linears[target] = GraphLinear(linear.weight, linear.bias, a, b, self.config.scale)  # type: ignore[arg-type]
        norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)  # type: ignore[union-attr]
        return GraphBlock(norms, linears)  # type: ignore[arg-type]

    def _final_norm(self) -> Tensor:
        return self.model.get_parameter("model.norm.weight")

    def _updated(
        self, layer: int, gradients: dict, vectors: tuple[Tensor, ...], step: Tensor, rate: Tensor
    ) -> tuple[Tensor, ...]:
        """The layer's range of the adapter and of the moments, after SGD or AdamW."""
        config, pieces, at = self.config, [], self.layout.layer_range(layer)[0]
        low, high = self.layout.layer_range(layer)
        for entry in self.layout.of_layer(layer):
            for start, gradient in zip((entry.a, entry.b), gradients[entry.pair.target]):
                if start > at:
                    pieces.append(gradient.new_zeros(start - at))
                pieces.append(gradient.reshape(-1))
                at = start + gradient.numel()
        if high > at:
            pieces.append(vectors[0].new_zeros(high - at))
        g, value = torch.cat(pieces), vectors[0][low:high]
        if config.weight_decay:
            value = value * (1.0 - rate * config.weight_decay)
        if config.optimizer == "sgd":
            return (value - rate * g,)
        number = step.to(torch.float32) + 1.0
        m = vectors[1][low:high] * config.beta1 + g * (1.0 - config.beta1)
        v = vectors[2][low:high] * config.beta2 + g * g * (1.0 - config.beta2)
        first, second = (1.0 - torch.pow(beta, number) for beta in (config.beta1, config.beta2))
        return value - rate / first * m / (torch.sqrt(v / second) + config.eps), m, v

    def _count(self, labels_BT: Tensor) -> Tensor:
        return (labels_BT[:, 1:] != IGNORE).to(torch.float32).sum().clamp(min=1.0).view(1)

    def _next(self, labels_BT: Tensor) -> Tensor:
        """The label that each position predicts, int64 [N]."""
        last = torch.full((labels_BT.shape[0], 1), IGNORE, dtype=labels_BT.dtype)
        return torch.cat((labels_BT[:, 1:], last), 1).view(-1)

    def _look(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp and the label's logit of each position, float32 [N].

        Every tile waits for the one before it through the running maximum, so that a memory plan holds one.
        """
        maximum = total = wanted = None
        for low, weight in self.head.tiles():
            logits = nn.functional.linear(hidden, weight)
            local = targets - low
            inside = (local >= 0) & (local < weight.shape[0])
            picked = logits.gather(1, local.clamp(0, weight.shape[0] - 1)[:, None])[:, 0]
            picked = torch.where(inside, picked, torch.zeros_like(picked))
            top = logits.amax(-1)
            if maximum is None or total is None or wanted is None:
                maximum, wanted = top, picked
                total = (logits - top[:, None]).exp().sum(-1)
            else:
                larger = torch.maximum(maximum, top)
                total = total * (maximum - larger).exp() + (logits - larger[:, None]).exp().sum(-1)
                maximum, wanted = larger, wanted + picked
        assert maximum is not None and total is not None and wanted is not None  # noqa: S101 - there is a tile
        return maximum + total.log(), wanted

    def _loss_and_gradient(
        self, stages: GraphStages, x: Tensor, labels_BT: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The summed loss [1] and `scale` times its gradient in x; a tile's logits are computed twice."""
        hidden, targets = stages.norm(self._final_norm(), x), self._next(labels_BT)
        lse, wanted = self._look(hidden, targets)
        active = (targets != IGNORE).to(torch.float32)
        weights = (active * scale)[:, None]
        gradient: Tensor | None = None
        for low, weight in self.head.tiles():
            p = (nn.functional.linear(hidden, weight) - lse[:, None]).exp() * weights
            local = targets - low
            inside = (local >= 0) & (local < weight.shape[0])
            one = torch.where(inside[:, None], -weights, torch.zeros_like(weights))
            p = p.scatter_add(1, local.clamp(0, weight.shape[0] - 1)[:, None], one)
            part = torch.mm(p, weight)
            gradient = part if gradient is None else gradient + part
        assert gradient is not None  # noqa: S101 - there is a tile
        total = ((lse - wanted) * active).sum().view(1)
        return total, stages.norm_backward(self._final_norm(), x, gradient, torch.zeros_like(x))
