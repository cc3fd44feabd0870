"""Both passes over a model's blocks as CUDA graphs, one pair for each shape of a batch: a step of a
small model is then two launches and its loss, and does not wait for the CPU.

The loss stays outside, as its size is the number of labelled tokens. Graphs share their temporary
memory, since one runs at a time; and what a forward graph keeps for its backward graph lies there
too, since no other graph runs between the two. The memory is that of the largest shape: when a
larger one comes, all graphs are dropped and made again, so that smaller ones lie in its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.graphs import CudaRecord, Record, recorder

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.block import OnGradient
    from ondevice.methods.mesp.torch.model import Model
    from ondevice.methods.mesp.torch.weights import Weights

log = logging.getLogger(__name__)
TOKENS = 8192
"""Tokens of a batch that get graphs, at most."""
PRODUCTS = 750 * 10**9
"""Products of a block's forward pass, at most, over all tokens, if memory is scarce: graphs have
memory of their own, and the launches of more all but hide behind the kernels."""
SHAPES = 24
"""Shapes that get graphs; batches of other shapes run without."""
WARM = 1
"""Steps of a shape before its graphs: libraries choose their kernels."""
BUCKETS = 8
"""Lengths between a power of two and the next one that batches are padded to."""
SHORTEST = 32


def graphs_for(weights: Weights, config: MespConfig) -> StepGraphs | None:
    """Return where graphs are kept; None if passes cannot be graphs."""
    known = not weights.dims.experts and config.weight_placement == "resident"
    record = recorder(weights.device)
    if record is None or not known or not config.cuda_graphs:
        return None
    if config.recompute == "none":  # there is memory
        return StepGraphs(record)
    return StepGraphs(record, min(TOKENS, PRODUCTS // weights.dims.block_parameters))


def bucket(rows: int, length_tokens: int) -> int:
    """Return the length that such a batch is padded to, so that few shapes serve all lengths."""
    if rows * length_tokens > TOKENS:
        return length_tokens
    step = max(SHORTEST, (1 << (length_tokens - 1).bit_length()) // (2 * BUCKETS))
    padded = -(-length_tokens // step) * step
    return padded if rows * padded <= TOKENS else length_tokens


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


class StepGraphs:
    """Graphs by shape.

    Attributes:
        tokens: of a batch that gets graphs, at most.
        made: of each shape that has graphs.
    """

    def __init__(self, record: Record | CudaRecord, tokens: int = TOKENS) -> None:
        self.record: Record | CudaRecord | None = record
        self.tokens = tokens
        self.runs: dict[torch.Size, int] = {}
        self.made: dict[torch.Size, GraphedPasses] = {}
        self.memory: Tensor | None = None
        self.gradients: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def padded_length(self, rows: int, length_tokens: int) -> int:
        """Return the length that such a batch is padded to, with graphs or without: the bits are
        those of every other setting."""
        return bucket(rows, length_tokens)

    def passes(self, model: Model, ids_BT: Tensor) -> GraphedPasses | None:
        """Return the graphs of this shape, which are made if it has run before; None if it has
        none."""
        shape = ids_BT.shape
        if shape in self.made:
            return self.made[shape]
        self.runs[shape] = self.runs.get(shape, 0) + 1
        enough = (
            self.runs[shape] > WARM and len(self.made) < SHAPES and shape.numel() <= self.tokens
        )
        if self.record is None or not enough:
            return None
        if shape.numel() > max((s.numel() for s in self.made), default=shape.numel()):
            self.made = {}
            if isinstance(self.record, CudaRecord):
                self.record = self.record.again()
        try:
            self.made[shape] = self._make(self.record, model, ids_BT)
        except torch.OutOfMemoryError:
            log.warning("no memory for CUDA graphs of %d x %d tokens: steps run without", *shape)
            self.record = None
            return None
        return self.made[shape]

    def beside(self) -> AbstractContextManager[None]:
        """Return a context for what runs without a graph; see `CudaRecord.beside`."""
        if isinstance(self.record, CudaRecord):
            return self.record.beside()
        return nullcontext()

    def _make(self, record: Record, model: Model, ids_BT: Tensor) -> GraphedPasses:
        if ids_BT.is_cuda:
            torch.cuda.empty_cache()  # the graphs' memory is another than that of other steps
        rows, length = ids_BT.shape
        ids_BT = ids_BT.clone()
        x_ND = self._carrier(rows * length, model)
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

    def _carrier(self, tokens: int, model: Model) -> Tensor:
        """Return [tokens, D]: memory of the largest shape, of which smaller ones take a part."""
        width = model.dims.hidden
        dtype = model.weights.dtype
        if self.memory is None or self.memory.shape[0] < tokens:
            self.memory = torch.empty(tokens, width, dtype=dtype, device=model.weights.device)
        return self.memory[:tokens]

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
