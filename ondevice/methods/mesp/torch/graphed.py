"""Both passes over a model's blocks as CUDA graphs, one pair for each shape of a batch: a step of a
small model is then two launches and its loss, and does not wait for the CPU.

The loss stays outside, as its size is the number of labelled tokens. What a forward graph keeps for
its backward graph lies in the memory that all graphs share (`offload.shapes`), since no other graph
runs between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.graphs import CudaRecord, Record, recorder
from ondevice.offload.shapes import TOKENS, ShapeGraphs, empty_cache, most_tokens

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.block import OnGradient
    from ondevice.methods.mesp.torch.model import Model
    from ondevice.methods.mesp.torch.weights import Weights


def graphs_for(weights: Weights, config: MespConfig) -> StepGraphs | None:
    """Return where graphs are kept; None if passes cannot be graphs."""
    known = not weights.dims.experts and config.weight_placement == "resident"
    record = recorder(weights.device)
    if record is None or not known or not config.cuda_graphs:
        return None
    if config.recompute == "none":  # there is memory
        return StepGraphs(record)
    return StepGraphs(record, most_tokens(weights.dims.block_parameters))


@dataclass
class GraphedPasses:
    """The two graphs of a shape, and the memory that they share with their caller."""

    ids_BT: Tensor
    x_ND: Tensor
    """The last block's output, then its gradient."""
    gradients: dict[tuple[int, str], tuple[Tensor, Tensor]]
    replay: Callable[[], None]
    replay_back: Callable[[], None]
    work: tuple[Callable[[], None], ...]
    """What the graphs do; it holds the tensors that they read, such as the rotations."""
    host: list[Tensor]
    """Host memory in which inputs of blocks wait; a larger batch has another."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the last block's output [N, D], to be overwritten with its gradient."""
        self.ids_BT.copy_(ids_BT)
        self.replay()
        return self.x_ND

    def backward(self, model: Model) -> None:
        """Give every gradient to the optimizer."""
        self.replay_back()
        for (layer, part), (ga, gb) in self.gradients.items():
            if model.optimizer.accumulate:  # the next part's are written over these
                ga = ga.clone()
                gb = gb.clone()
            model.on_gradient(layer)(part, ga, gb.t())
        model.optimizer.flush()


class StepGraphs(ShapeGraphs[GraphedPasses]):
    """Graphs by shape."""

    def __init__(self, record: Record | CudaRecord | None, tokens: int = TOKENS) -> None:
        super().__init__(record, tokens)
        self.gradients: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def passes(self, model: Model, ids_BT: Tensor) -> GraphedPasses | None:
        """Return the graphs of this shape, or None; see `of_shape`."""
        return self.of_shape(ids_BT.shape, lambda record: self._make(record, model, ids_BT))

    def _make(self, record: Record, model: Model, ids_BT: Tensor) -> GraphedPasses:
        if ids_BT.is_cuda:
            empty_cache()
        rows, length = ids_BT.shape
        ids_BT = ids_BT.clone()
        like = torch.empty(
            model.dims.hidden, dtype=model.weights.dtype, device=model.weights.device
        )
        x_ND = self.carrier(rows * length, like)
        self.gradients = self.gradients or _places(model)
        positions = model.positions(ids_BT, None)
        pairs = [positions(i) for i in range(model.dims.layers)]
        kept = [model.kept(i) for i in range(model.dims.layers)]

        def forward() -> None:
            x_ND.copy_(model.run_forward(ids_BT, pairs.__getitem__, kept))

        def backward() -> None:
            model.run_backward(x_ND, pairs.__getitem__, rows, kept, self._collect, lambda _: None)

        replay = record(forward)
        replay_back = record(backward)
        work = (forward, backward)
        host = model.inputs.host
        return GraphedPasses(ids_BT, x_ND, self.gradients, replay, replay_back, work, host)

    def _collect(self, layer: int) -> OnGradient:
        """Return a callback that copies a layer's gradients to where the optimizer reads them."""

        def collect(target: str, ga: Tensor, gb: Tensor) -> None:
            # In the order of a pass without graphs, in which their norm is summed.
            a, b = self.gradients[layer, target] = self.gradients.pop((layer, target))
            a.copy_(ga)
            b.copy_(gb.t())

        return collect


def _places(model: Model) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return memory of every gradient by layer and part, in the shapes of A and B."""
    optimizer = model.optimizer
    places = {}
    for layer in range(model.dims.layers):
        for part in model.dims.block_linears(layer):
            lora = optimizer.parameters.get((layer, model.dims.traits.path(part)))
            if lora is not None:
                a, b = (optimizer.tensors[name] for name in (lora.a_name, lora.b_name))
                places[layer, part] = torch.empty_like(a), torch.empty_like(b)
    return places
