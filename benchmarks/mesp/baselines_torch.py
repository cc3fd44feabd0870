"""Gradients by automatic differentiation with mesp's own loss, weights, streaming and updates, to
compare with.

MeBP's, block by block: each block's own graph, its gradients applied and dropped; and one graph of
all blocks that keeps every activation. `ondevice.methods.mesp.torch.reference` has the same graph
with each block computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.methods.mesp.torch.block import Block
from ondevice.methods.mesp.torch.graphed import graphs_for
from ondevice.methods.mesp.torch.reference import (
    AutogradModel,
    autograd_blocks,
    leaves_of,
    with_leaves,
)
from ondevice.methods.mesp.torch.session import MespSession
from ondevice.methods.mesp.torch.stages import Blocks

if TYPE_CHECKING:
    from ondevice.methods.mesp.torch.block import OnGradient
    from ondevice.methods.mesp.torch.kernels import Position


def blockwise_session(
    loaded: Any, config: Any, seed: int, device: str | None = None
) -> MespSession:
    """A session of mesp whose blocks are differentiated by autograd, one at a time."""
    session = MespSession(loaded, config, seed, device)
    model: Any = session.model  # of a family whose block is known
    model.graphs = None
    model.blocks = BlockwiseBlocks(autograd_blocks(model.dims).stages, None)
    return session


def autodiff_session(loaded: Any, config: Any, seed: int, device: str | None = None) -> MespSession:
    """A session of mesp whose gradients are autograd's, by one graph of all blocks that keeps every
    activation."""
    session = MespSession(loaded, config, seed, device)
    graphs = graphs_for(session.weights, config)
    session.model = StoredModel(session.weights, session.optimizer, config, graphs)
    return session


class StoredModel(AutogradModel):
    """See `AutogradModel`; nothing is computed again."""

    def run_block(self, *arguments: Any) -> Tensor:
        return self.blocks.forward(*arguments)


class BlockwiseBlocks(Blocks):
    """See `Blocks`."""

    def backward(
        self,
        block: Block,
        x: Tensor,
        g: Tensor,
        position: Position,
        rows: int,
        on_gradient: OnGradient,
        last: bool = False,
        kept: Any = None,
    ) -> Tensor:
        block = with_leaves(block)
        leaves = leaves_of(block)
        with torch.enable_grad():
            entered = x.detach().requires_grad_(not last)
            y = self.forward(block, entered, position, rows)
            wanted = [
                *([] if last else [entered]),
                *(leaf for pair in leaves.values() for leaf in pair),
            ]
            gradients = list(torch.autograd.grad(y, wanted, g))
        gx = g if last else gradients.pop(0)
        for target in leaves:
            on_gradient(target, gradients.pop(0).float(), gradients.pop(0).float())
        return gx
