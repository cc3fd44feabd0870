"""The same steps by automatic differentiation of the forward stages: what an exported program is
held against. Loss, weights and updates are the method's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ondevice.methods.mesp.torch.block import Block, Linear
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.methods.mesp.torch.graphed import graphs_for
from ondevice.methods.mesp.torch.model import Model, in_order
from ondevice.methods.mesp.torch.session import MespSession
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.nn.cross_entropy import Scale
from ondevice.nn.experts import peft_layout

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.kernels import Scores
    from ondevice.methods.mesp.torch.weights import Frozen
    from ondevice.models import LoadedModel

EXPERTS_NDIM = 3
"""Dimensions of a matrix of all experts."""


def reference_session(
    loaded: LoadedModel, config: MespConfig, seed: int, device: str | None = None
) -> MespSession:
    """Return a session of mesp whose gradients are autograd's, by one graph of all blocks."""
    session = MespSession(loaded, config, seed, device)
    graphs = graphs_for(session.weights, config)
    session.model = AutogradModel(session.weights, session.optimizer, config, graphs)
    return session


class AutogradKernels(GraphKernels):
    """Operations that autograd differentiates: nothing is in place, and attention is PyTorch's
    own."""

    name = "autograd"

    def __init__(self) -> None:
        super().__init__(torch.zeros(0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Any]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seen = None
        length = q.shape[2]
        if how.window:
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device)
            seen = seen.tril().triu(1 - how.window)
        grouped = q.shape[1] != k.shape[1]
        o = functional.scaled_dot_product_attention(
            q, k, v, seen, is_causal=seen is None, scale=how.scale, enable_gqa=grouped
        )
        return o.transpose(1, 2), None


def autograd_blocks(dims: ModelDims) -> Blocks:
    """Return blocks whose forward pass autograd differentiates."""
    return Blocks(Stages(dims, AutogradKernels()), None)


class AutogradModel(Model):
    """A model whose blocks are differentiated by autograd; each is computed again in the backward
    pass."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.blocks = autograd_blocks(self.dims)

    @torch.no_grad()
    def forward_backward(
        self, ids_BT: Tensor, labels_BT: Tensor, scale: Scale, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """See `Model.forward_backward`; of rows that are not packed."""
        assert position_ids_BT is None  # noqa: S101 - a packed step's reference is its rows' step
        x = self._begin(ids_BT)
        positions = self.weights.positions(ids_BT.shape[1])
        leaves: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        with torch.enable_grad():
            for i, then in in_order(range(self.dims.layers)):
                with self.weights.block(i, then) as frozen:
                    block = self.block(i, frozen)
                leaves |= {(i, target): pair for target, pair in leaves_of(block).items()}
                x = self.run_block(block, x, positions(i), ids_BT.shape[0])
        total, g = self.loss.backward(x.detach().clone(), labels_BT, scale)
        gradients = iter(
            torch.autograd.grad(x, [leaf for pair in leaves.values() for leaf in pair], g)
        )
        for i, target in leaves:
            ga = next(gradients).float()
            gb = next(gradients).float()
            if ga.ndim == EXPERTS_NDIM:
                ga, gb = peft_layout(ga, gb)
            self.on_gradient(i)(target, ga, gb)
        self.optimizer.flush()
        return total

    def run_block(self, *arguments: Any) -> Tensor:
        """Run a block, and save only its inputs for the backward pass."""
        y = checkpoint(self.blocks.forward, *arguments, use_reentrant=False)
        assert isinstance(y, Tensor)  # noqa: S101 - the type of `Blocks.forward`
        return y

    def block(self, i: int, frozen: Frozen) -> Block:
        """See `Model.block`; A and B collect gradients."""
        return with_leaves(super().block(i, frozen))


def with_leaves(block: Block) -> Block:
    """Return the block with A and B as leaves of a graph."""

    def leaf(layer: Linear) -> Linear:
        if layer.a is None or layer.b is None:
            return layer
        a, b = (value.detach().requires_grad_(True) for value in (layer.a, layer.b))
        return replace(layer, a=a, b=b)

    linears = {target: leaf(layer) for target, layer in block.linears.items()}
    return replace(
        block, linears=linears, pairs={name: pair.leaf() for name, pair in block.pairs.items()}
    )


def leaves_of(block: Block) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by target."""
    leaves = {}
    for target, layer in block.linears.items():
        if layer.a is not None and layer.b is not None:
            leaves[target] = (layer.a, layer.b)
    return leaves | {target: (pair.a_ERI, pair.b_EOR) for target, pair in block.pairs.items()}
