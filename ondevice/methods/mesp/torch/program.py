"""A whole MeSP step as one pure function: ids, labels, adapter and moments go in; loss, adapter and moments come out.

No automatic differentiation is inside, so it is a plain forward graph: `torch.export` takes it, and a runtime made for
inference runs it. Forward keeps block inputs, and every block's backward pass is over before the next begins, so that
a memory plan gives all of them the same bytes. The stages and their order are the eager session's own (`stages`,
`model`, `loss`), with operations for a graph (`kernels.GraphKernels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ondevice.core.session import IGNORE, MOMENTS
from ondevice.methods.mesp.lora import FlatEntry, FlatLayout, initial_tensors, lora_parameters
from ondevice.methods.mesp.torch.kernels import GraphKernels
from ondevice.methods.mesp.torch.loss import Loss, next_labels
from ondevice.methods.mesp.torch.model import Blocks
from ondevice.methods.mesp.torch.stages import Block, Linear, Position, Stages
from ondevice.methods.mesp.torch.weights import Dense, halves
from ondevice.nn.cross_entropy import tile_bounds

if TYPE_CHECKING:
    import numpy as np

    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel


class Table(nn.Module):
    """The embedding and, where it is tied, the head: tiles of rows, each a constant of its own.

    A slice of one large constant would be copied into a program's memory whenever the head is at it. A token's row
    is looked up in every tile and chosen, which costs little beside one layer.
    """

    def __init__(self, weight_VD: Tensor, tiles: int) -> None:
        super().__init__()
        self.vocab = weight_VD.shape[0]
        self.bounds = tile_bounds(self.vocab, tiles)
        for number, (low, high) in enumerate(self.bounds):
            self.register_buffer(f"tile_{number}", weight_VD[low:high].clone())

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """See `loss.Head`."""
        return getattr(self, f"tile_{self.bounds.index((low, high))}")

    def rows(self, ids_N: Tensor) -> Tensor:
        """Return [N, D]."""
        rows: Tensor | None = None
        for low, high in self.bounds:
            looked_up = nn.functional.embedding(
                (ids_N - low).clamp(0, high - low - 1), self.tile(low, high)
            )
            rows = (
                looked_up if rows is None else torch.where((ids_N >= low)[:, None], looked_up, rows)
            )
        assert rows is not None  # noqa: S101 - there is a tile
        return rows


class MespProgram(nn.Module):
    """The step of a loaded float32 model.

    Args:
        loaded: weights are shared with it; its embedding and head are copied into tiles.
        config: `loss_tiles` are the head's tiles.
        lengths_tokens: lengths that the program is for; each has its own positions and mask.
    """

    def __init__(
        self, loaded: LoadedModel, config: MespConfig, lengths_tokens: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.loaded, self.family, self.dims, self.config = (
            loaded,
            loaded.family,
            loaded.dims,
            config,
        )
        self.parameters_of_run = lora_parameters(
            loaded.dims, type(loaded.family), config, ("windows",), "a program of a whole step"
        )
        self.layout = FlatLayout.build(self.parameters_of_run)
        self.model = loaded.model
        self.embedding = Table(loaded.family.embedding.weight.detach(), config.loss_tiles)
        self.head = self.embedding
        if not loaded.dims.tied:
            self.head = Table(loaded.family.head_weight.detach(), config.loss_tiles)
        for length in lengths_tokens:
            cos, sin = halves(loaded.family.positions(length, "cpu", torch.float32))
            self.register_buffer(f"cos_{length}", cos)
            self.register_buffer(f"sin_{length}", sin)
            self.register_buffer(
                f"mask_{length}", torch.full((length, length), float("-inf")).triu(1)
            )

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimizer's vectors."""
        return MOMENTS if self.config.optimizer == "adamw" else ()

    def initial(self, seed: int) -> np.ndarray:
        """Return the adapter that a run starts from, float32 [layout.size]."""
        return self.layout.to_flat(initial_tensors(self.parameters_of_run, seed))

    def train_step(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor,
        adapter: Tensor,
        moments: tuple[Tensor, ...],
        step: Tensor,
        rate: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return loss float32 [1], the new adapter, the new moments.

        Args:
            ids_BT, labels_BT: int64 [rows, tokens].
            adapter: float32 [layout.size]; moments likewise.
            step: int64 [1], from 0; learning rate float32 [1].
        """
        rows, count = ids_BT.shape[0], self._count(labels_BT)
        blocks, loss, position = self._computes(ids_BT)
        inputs, x = [], self.embedding.rows(ids_BT.reshape(-1))
        for i in range(self.dims.layers):
            inputs.append(x)
            x = blocks.forward(self._block(i, adapter), x, position, rows)
        total, g = self._loss_and_gradient(loss, x, labels_BT, 1.0 / count)
        ranges: list[tuple[Tensor, ...]] = []
        for i in reversed(range(self.dims.layers)):
            gradients: dict[str, tuple[Tensor, Tensor]] = {}

            def keep(target: str, ga: Tensor, gb: Tensor, gradients: dict = gradients) -> None:
                gradients[target] = (ga, gb)

            g = blocks.backward(
                self._block(i, adapter), inputs.pop(), g, position, rows, keep, last=i == 0
            )
            bounds, vectors = self.layout.layer_range(i), (adapter, *moments)
            entries = self.layout.of_layer(i)
            ranges.insert(0, updated(self.config, entries, bounds, gradients, vectors, step, rate))
        vectors = (
            torch.cat([values[number] for values in ranges]) for number in range(1 + len(moments))
        )
        return (total / count, *vectors)

    def evaluate(self, ids_BT: Tensor, labels_BT: Tensor, adapter: Tensor) -> tuple[Tensor, Tensor]:
        """Return summed negative log likelihood and labelled tokens of each row, float32 [rows]."""
        loss, targets = self._computes(ids_BT)[1], next_labels(labels_BT)
        lse, wanted = loss.log_sum_exp(
            loss.norm(self._hidden(ids_BT, adapter)), targets, again=False
        )
        active = (targets != IGNORE).to(torch.float32)
        rows = (ids_BT.shape[0], -1)
        return ((lse - wanted) * active).view(rows).sum(1), active.view(rows).sum(1)

    def next_token(self, ids_1T: Tensor, length: Tensor, adapter: Tensor) -> Tensor:
        """Return logits float32 [vocab] behind the first `length` tokens."""
        x = self._hidden(ids_1T, adapter).index_select(0, length - 1)
        hidden = self._computes(ids_1T)[1].norm(x)
        return torch.cat(
            [nn.functional.linear(hidden, self.head.tile(*tile))[0] for tile in self.head.bounds]
        )

    def gradients(
        self, ids_BT: Tensor, labels_BT: Tensor, adapter: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return loss and gradient of the adapter, as what SGD at rate 1 changes: for checks."""
        with torch.no_grad():
            sgd = self.config.model_copy(update={"optimizer": "sgd", "weight_decay": 0.0})
            kept, self.config = self.config, sgd
            try:
                rate = torch.ones(1)
                loss, after = self.train_step(
                    ids_BT, labels_BT, adapter, (), torch.zeros(1, dtype=torch.int64), rate
                )
            finally:
                self.config = kept
        return loss, adapter - after

    def _hidden(self, ids_BT: Tensor, adapter: Tensor) -> Tensor:
        """The last block's output, [N, D]."""
        blocks, _, position = self._computes(ids_BT)
        x = self.embedding.rows(ids_BT.reshape(-1))
        for i in range(self.dims.layers):
            x = blocks.forward(self._block(i, adapter), x, position, ids_BT.shape[0])
        return x

    def _computes(self, ids_BT: Tensor) -> tuple[Blocks, Loss, Position]:
        """Blocks, loss and positions for rows of this length."""
        length, dims = ids_BT.shape[1], self.dims
        cos, sin, mask = (getattr(self, f"{name}_{length}") for name in ("cos", "sin", "mask"))
        kernels, norm = GraphKernels(mask), self.model.get_parameter("model.norm.weight")
        loss = Loss(self.head, norm, dims.norm_eps, kernels, self.config.loss_tiles, None)
        return Blocks(Stages(dims, kernels), None), loss, (cos, sin)

    def _block(self, i: int, adapter: Tensor) -> Block:
        layer, linears = self.model.get_submodule(f"model.layers.{i}"), {}
        entries = {entry.parameters.target: entry for entry in self.layout.of_layer(i)}
        for target in self.family.linear_targets:
            linear, entry, a, b = self.family.linear(i, target), entries.get(target), None, None
            if entry is not None:
                lora = entry.parameters
                a = adapter[entry.a : entry.a + lora.rank * lora.inputs].view(
                    lora.rank, lora.inputs
                )
                b = adapter[entry.b : entry.b + lora.rank * lora.outputs].view(
                    lora.rank, lora.outputs
                )
            linears[target] = Linear(Dense(linear.weight), linear.bias, a, b, self.config.scale)  # type: ignore[arg-type]
        norms = {place: layer.get_submodule(name).weight for place, name in self.dims.traits.norms}
        return Block(norms, linears, i)  # type: ignore[arg-type]

    def _count(self, labels_BT: Tensor) -> Tensor:
        return (labels_BT[:, 1:] != IGNORE).to(torch.float32).sum().clamp(min=1.0).view(1)

    def _loss_and_gradient(
        self, loss: Loss, x: Tensor, labels_BT: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The summed loss [1] and `scale` times its gradient in x.

        All positions are computed, those without a label with weight 0: a graph's shapes cannot depend on labels.
        """
        hidden, targets = loss.norm(x), next_labels(labels_BT)
        lse, wanted = loss.log_sum_exp(hidden, targets, again=True)
        active = (targets != IGNORE).to(torch.float32)
        gradient = loss.hidden_gradient(hidden, targets, lse, active * scale)
        return ((lse - wanted) * active).sum().view(1), loss.norm_backward(x, gradient)


def updated(
    config: MespConfig,
    entries: tuple[FlatEntry, ...],
    bounds: tuple[int, int],
    gradients: dict[str, tuple[Tensor, Tensor]],
    vectors: tuple[Tensor, ...],
    step: Tensor,
    rate: Tensor,
) -> tuple[Tensor, ...]:
    """Return a layer's range of the adapter and of the moments, after SGD or AdamW.

    Args:
        entries: the layer's; `bounds` is its range of `vectors`.
        gradients: of A and B by target.
        step: int64 [1], updates so far.
    """
    ranges, (low, high) = [], bounds
    at = low
    for entry in entries:
        for start, gradient in zip((entry.a, entry.b), gradients[entry.parameters.target]):
            if start > at:
                ranges.append(gradient.new_zeros(start - at))
            ranges.append(gradient.reshape(-1))
            at = start + gradient.numel()
    if high > at:
        ranges.append(vectors[0].new_zeros(high - at))
    g, value = torch.cat(ranges), vectors[0][low:high]
    if config.weight_decay:
        value = value * (1.0 - rate * config.weight_decay)
    if config.optimizer == "sgd":
        return (value - rate * g,)
    number = step.to(torch.float32) + 1.0
    m = vectors[1][low:high] * config.beta1 + g * (1.0 - config.beta1)
    v = vectors[2][low:high] * config.beta2 + g * g * (1.0 - config.beta2)
    first, second = (1.0 - torch.pow(beta, number) for beta in (config.beta1, config.beta2))
    return value - rate / first * m / (torch.sqrt(v / second) + config.eps), m, v
