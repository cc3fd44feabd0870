"""A batch through all blocks: forward keeps block inputs, the head gives the loss and its gradient, backward learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.methods.mesp.memory import MLP_CHUNK_TOKENS, MLP_CHUNK_TOKENS_GPU
from ondevice.methods.mesp.torch.blocks import Blocks
from ondevice.methods.mesp.torch.kernels import choose
from ondevice.methods.mesp.torch.loss import Loss
from ondevice.methods.mesp.torch.peers import AutodiffBlocks
from ondevice.methods.mesp.torch.stages import Block, Linear, Stages
from ondevice.offload.activations import Activations
from ondevice.offload.device import open_device
from ondevice.offload.report import Timeline

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.updates import Updates
    from ondevice.methods.mesp.torch.weights import Frozen, Weights


class Passes:
    """Everything that computes; nothing here is kept from one call to the next."""

    def __init__(self, weights: Weights, updates: Updates, config: MespConfig) -> None:
        self.weights, self.updates, self.config, self.dims = weights, updates, config, weights.dims
        kernels = choose(config.kernels, weights.device.type)
        self.manual = config.gradients == "manual"
        stages = Stages(weights.dims, kernels, config.store_h)
        self.peer = AutodiffBlocks(weights.dims)
        usual = MLP_CHUNK_TOKENS if weights.device.type == "cpu" else MLP_CHUNK_TOKENS_GPU
        self.blocks: Any = Blocks(stages, config.mlp_chunk_tokens or usual) if self.manual else self.peer
        loss = (weights.norm, weights.dims.norm_eps, kernels, config.loss_tiles, config.loss_chunk_tokens)
        self.loss = Loss(weights, *loss)
        device = open_device(str(weights.device))
        self.timeline = Timeline(device)
        self.inputs = Activations(device, self.timeline, config.activations, None)

    @torch.no_grad()
    def nll(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Each row's summed negative log likelihood, float32 [B]."""
        x, position = self.weights.embed(ids_BT), self.weights.positions(ids_BT.shape[1])
        for i in range(self.dims.layers):
            with self.weights.block(i, self._above(i)) as frozen:
                x = self.blocks.forward(self._block(i, frozen), x, position, ids_BT.shape[0])
        return self.loss.nll(x, labels_BT)

    @torch.no_grad()
    def learn(self, ids_BT: Tensor, labels_BT: Tensor, scale: float) -> Tensor:
        """Forward and backward; every pair learns from `scale` times its gradient of the summed loss, which is given.

        Args:
            ids_BT: int64 [rows, tokens], all of them computed at once.
        """
        if self.config.gradients in ("autodiff", "checkpoint"):
            return self._learn_from_graph(ids_BT, labels_BT, scale)
        x, position = self.weights.embed(ids_BT), self.weights.positions(ids_BT.shape[1])
        layers, rows = self.dims.layers, ids_BT.shape[0]
        self.inputs.begin(layers, 1, x)
        for i in range(layers):
            self.inputs.save(i, 0, x)
            with self.weights.block(i, self._above(i)) as frozen:
                x = self.blocks.forward(self._block(i, frozen), x, position, rows)
        total, g = self.loss.learn(x, labels_BT, scale)
        del x
        for i in reversed(range(layers)):
            x = self.inputs.load(i, 0, tuple(g.shape))
            self.inputs.prefetch(i - 1, 0)
            with self.weights.block(i, i - 1 if i else None) as frozen:
                block = self._block(i, frozen)
                g = self.blocks.backward(block, x, g, position, rows, self._learner(i), last=i == 0)
            self.updates.flush()
            self.inputs.done(i, 0)
            del x
        self.timeline.take()
        return total

    def _learn_from_graph(self, ids_BT: Tensor, labels_BT: Tensor, scale: float) -> Tensor:
        """The same by one graph of all blocks."""
        x, position = self.weights.embed(ids_BT), self.weights.positions(ids_BT.shape[1])
        leaves: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        forward = self.peer.checkpointed if self.config.gradients == "checkpoint" else self.peer.forward
        with torch.enable_grad():
            for i in range(self.dims.layers):
                with self.weights.block(i, self._above(i)) as frozen:
                    block = self._block(i, frozen)
                leaves |= {(i, target): pair for target, pair in self.peer.leaves(block).items()}
                x = forward(block, x, position, ids_BT.shape[0])
        total, g = self.loss.learn(x.detach().clone(), labels_BT, scale)
        found = iter(torch.autograd.grad(x, [leaf for pair in leaves.values() for leaf in pair], g))
        for i, target in leaves:
            self._learner(i)(target, next(found).float(), next(found).float())
        self.updates.flush()
        return total

    def _above(self, i: int) -> int | None:
        return i + 1 if i + 1 < self.dims.layers else None

    def _learner(self, layer: int):
        return lambda target, ga, gb: self.updates.apply(self.updates.pairs[(layer, target)], ga, gb)

    def _block(self, i: int, frozen: Frozen) -> Block:
        linears = {}
        for target, (matrix, bias) in frozen.linears.items():
            pair = self.updates.pairs.get((i, target))
            a, b = (None, None) if pair is None else (self.updates.tensors[n] for n in (pair.a_name, pair.b_name))
            linears[target] = Linear(matrix, bias, a, b, self.config.scale)
        return Block(frozen.norms, linears)
