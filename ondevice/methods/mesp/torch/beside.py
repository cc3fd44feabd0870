"""Experts that stand next to a block's MLP, as in Gemma 4: both read the block's middle m through
norms of their own, and their sum has another norm before it is added to m.

    y = m + norm(norm(MLP(norm(m))) + norm(experts(m)))

The MLP is differentiated by hand. So are router and norms if the experts are computed elsewhere
(`Routed`); else autograd differentiates the experts with their router, and nothing around them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ondevice.methods.mesp.torch.block import Block, OnGradient
from ondevice.methods.mesp.torch.mlp import BehindMlp, Mlp
from ondevice.methods.mesp.torch.routing import Routing
from ondevice.nn.cross_entropy import times
from ondevice.nn.experts import peft_layout

Backward = Callable[[Tensor, Tensor], Tensor]
"""Takes the gradients of the experts' part of the sum and of m, and adds the first's to the second."""


class Beside(Mlp, BehindMlp, Routing):
    """The stages of an MLP with experts next to it, and of what stands behind both."""

    def has_beside(self, block: Block) -> bool:
        """Return True if experts stand next to the block's MLP."""
        return "after_dense" in block.norms

    def beside(self, block: Block, m: Tensor) -> Tensor:
        """Return y, [N, D], in m's memory; m itself if the experts are computed elsewhere, with what
        they and `joined_elsewhere` need in `Block.routed`."""
        gate, up = self.gate_up(block, self.mlp_norm(block, m))
        dense = self.linear(block, "down_proj", self.act(gate, up))
        dense = self.normed(block, "after_dense", dense)
        if block.routed is not None:
            block.routed.dense = dense
            return self.routed(block, m)
        assert block.mlp is not None  # noqa: S101 - the block has experts
        return self._join(block, m, dense + block.mlp(m, block.pairs))

    def joined_elsewhere(
        self, block: Block, m: Tensor, dense: Tensor, experts: Tensor, p: Tensor | None
    ) -> Tensor:
        """Return the block's output from its middle, its normed MLP and the sum of its experts,
        [N, D] each."""
        total = dense + self.normed(block, "after_experts", experts)
        return super().behind(block, self._join(block, m, total), p)

    def behind(self, block: Block, y: Tensor, p: Tensor | None) -> Tensor:
        """See `BehindMlp.behind`; y itself if the experts are still to be computed."""
        if self.has_beside(block) and block.routed is not None:
            return y
        return super().behind(block, y, p)

    def joined_elsewhere_backward(
        self,
        block: Block,
        parts: tuple[Tensor, Tensor, Tensor],
        p: Tensor | None,
        g: Tensor,
    ) -> Tensor:
        """Return the gradient of the sum of the experts, [N, D], from that of the block's output;
        `parts` are what `joined_elsewhere` takes."""
        m, dense, experts = parts
        total = dense + self.normed(block, "after_experts", experts)
        g = self._total_backward(block, m, total, p, g, lambda *_: None)[1]
        return self.normed_backward(block, "after_experts", experts, g)

    def beside_backward(
        self, block: Block, m: Tensor, p: Tensor | None, g: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        """Return the gradient of m from that of the block's output, in g's memory."""
        n = self.mlp_norm(block, m)
        gate, up = self.gate_up(block, n)
        down = self.linear(block, "down_proj", self.act(gate, up))
        experts, experts_backward = self._experts(block, m, on_gradient)
        total = self.normed(block, "after_dense", down) + experts
        g, gtotal = self._total_backward(block, m, total, p, g, on_gradient)
        del total, experts
        g = experts_backward(gtotal, g)
        del experts_backward
        gdown = self.normed_backward(block, "after_dense", down, gtotal)
        del down, gtotal
        act = self.act(gate, up)
        gact = self.linear_backward(block, "down_proj", act, gdown, on_gradient)
        del act, gdown
        ggate, gup = self.act_backward(gate, up, gact)
        del gate, up, gact
        gn = self.gate_up_backward(block, n, ggate, gup, on_gradient)
        return self.mlp_norm_backward(block, m, gn, g)

    def _join(self, block: Block, m: Tensor, total: Tensor) -> Tensor:
        """Compute m + the norm of the sum, in m's memory."""
        y = self.normed(block, "after_mlp", total)
        scale = self.traits.residual_scale
        if self.kernels.in_place:
            return m.add_(y, alpha=scale)
        return m + times(y, scale)

    def _total_backward(
        self,
        block: Block,
        m: Tensor,
        total: Tensor,
        p: Tensor | None,
        g: Tensor,
        on_gradient: OnGradient,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of m without the branch, in g's memory, and of the sum, from that of
        the block's output."""
        if self.has_behind(block):
            y = self._join(block, m.clone(), total)
            g = self.behind_backward(block, y, p, g, on_gradient)
        scaled = times(g, self.traits.residual_scale)
        return g, self.normed_backward(block, "after_mlp", total, scaled)

    def _experts(self, block: Block, m: Tensor, on_gradient: OnGradient) -> tuple[Tensor, Backward]:
        """Return the experts' part of the sum, and its backward pass."""
        routed = block.routed
        if routed is not None:
            assert routed.total is not None  # noqa: S101 - given by the caller
            part = self.normed(block, "after_experts", routed.total)
            return part, lambda gtotal, g: self.routed_backward(block, m, g)
        assert block.mlp is not None  # noqa: S101 - the block has experts
        with torch.enable_grad():
            leaf = m.detach().requires_grad_(True)
            pairs = {name: pair.leaf() for name, pair in block.pairs.items()}
            leaves = [tensor for pair in pairs.values() for tensor in (pair.a_ERI, pair.b_EOR)]
            part = block.mlp(leaf, pairs)

        def backward(gtotal: Tensor, g: Tensor) -> Tensor:
            gm, *learned = torch.autograd.grad(part, [leaf, *leaves], gtotal)
            for number, target in enumerate(pairs):
                on_gradient(target, *peft_layout(*learned[2 * number : 2 * number + 2]))
            return g.add_(gm)

        return part.detach(), backward
