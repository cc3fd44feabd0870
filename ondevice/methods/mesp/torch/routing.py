"""A mixture of experts without the experts: the router and the expert for all tokens, forward and
backward by hand. Who runs the block computes each expert on the tokens that chose it.

With p = softmax(n R^T), or the sigmoid, a token's experts are the K largest of p, or of p and a
bias. Their weights w are these p, or these p over their sum s, times a factor c, which each expert
may have for itself. Gradients go through the weights, not through the choice.

Next to an MLP, experts and router read the block's middle through norms of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.methods.mesp.torch.block import Block, BlockLayers, Routed
from ondevice.nn.cross_entropy import times


class Routing(BlockLayers):
    """The stages of a block whose experts are computed elsewhere."""

    def routed(self, block: Block, m: Tensor) -> Tensor:
        """Return the middle m and the expert for all, [N, D]; the chosen experts are to be added."""
        routed = block.routed
        assert routed is not None  # noqa: S101 - the caller looked
        n = self.normed(block, self._place(block), m)
        routed.normed = n
        _, chosen, _ = self._routing(routed, self._read(block, m, n))
        routed.weights = self._weighted(block, chosen)
        if routed.shared_gate is None:
            return m
        return m + self._share(routed, n) * self._for_all(routed, n)

    def routed_backward(self, block: Block, m: Tensor, g: Tensor) -> Tensor:
        """Compute g + the gradient of m through router and experts, in g's memory."""
        routed = block.routed
        assert routed is not None and routed.gradients is not None  # noqa: S101 - given by the caller
        place = self._place(block)
        n = self.normed(block, place, m)
        gn, gw = routed.gradients
        p, chosen, total = self._routing(routed, self._read(block, m, n))
        gw = self._weighted(block, gw)
        if routed.traits.normalised:
            inner = (gw * chosen).sum(-1, keepdim=True)
            gw = torch.where(chosen > 0.0, (gw - inner) / total, 0.0)
        if routed.traits.scores == "sigmoid":
            logits = p * (1.0 - p) * gw
        else:
            logits = p * (gw - (gw * p).sum(-1, keepdim=True))
        gread = torch.mm(logits, routed.router)
        factor = self._own_norm(block)
        if factor is not None:
            g = self.kernels.rms_norm_backward(m, factor, self.dims.norm_eps, gread, g)
        else:
            gn = gn + gread
        if routed.shared_gate is not None:
            gn = self._for_all_backward(routed, n, g, gn)
        return self.normed_backward(block, place, m, gn, g)

    @staticmethod
    def _place(block: Block) -> str:
        """Return the place of the norm that experts read."""
        return "before_experts" if "before_experts" in block.norms else "before_mlp"

    def _own_norm(self, block: Block) -> Tensor | None:
        """Return the factor of the router's own norm, [D]; None if it reads what experts read."""
        scale = block.mixer.get("router_scale")
        return None if scale is None else scale * self.dims.hidden**-0.5

    def _read(self, block: Block, m: Tensor, n: Tensor) -> Tensor:
        """Return what the router reads, [N, D]."""
        factor = self._own_norm(block)
        return n if factor is None else self.kernels.rms_norm(m, factor, self.dims.norm_eps)

    def _weighted(self, block: Block, x: Tensor) -> Tensor:
        """Return [N, experts] times the factor of the weights, and each expert's own."""
        assert block.routed is not None  # noqa: S101 - the caller looked
        x = times(x, block.routed.traits.scale)
        own = block.mixer.get("expert_scale")
        return x if own is None else x * own

    @staticmethod
    def _routing(routed: Routed, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return p [N, experts], w / c [N, experts] and s [N, 1]."""
        logits = functional.linear(n, routed.router)
        traits = routed.traits
        p = torch.sigmoid(logits) if traits.scores == "sigmoid" else torch.softmax(logits, -1)
        scores = p if routed.bias is None else p + routed.bias
        experts = torch.topk(scores, routed.active, -1)[1]
        chosen = p.gather(1, experts)
        total = chosen.sum(-1, keepdim=True) + traits.least
        if traits.normalised:
            chosen = chosen / total
        return p, torch.zeros_like(p).scatter(1, experts, chosen), total

    @staticmethod
    def _share(routed: Routed, n: Tensor) -> Tensor:
        """Return the weight of the expert for all, [N, 1]."""
        assert routed.shared_gate is not None  # noqa: S101 - the caller looked
        return torch.sigmoid(functional.linear(n, routed.shared_gate))

    def _for_all(self, routed: Routed, n: Tensor) -> Tensor:
        """Return the expert for all, without its weight."""
        gate, up = (self._routed_product(routed, part, n) for part in ("gate_proj", "up_proj"))
        return self._routed_product(
            routed, "down_proj", self.kernels.glu(self.traits.activation, gate, up)
        )

    def _for_all_backward(self, routed: Routed, n: Tensor, g: Tensor, gn: Tensor) -> Tensor:
        """Return gn + the gradient of n through the expert for all and its weight."""
        assert routed.shared_gate is not None  # noqa: S101 - the caller looked
        share = self._share(routed, n)
        backward = self.kernels.frozen_backward
        gate, up = (self._routed_product(routed, part, n) for part in ("gate_proj", "up_proj"))
        act = self.kernels.glu(self.traits.activation, gate, up)
        gact = backward(g, routed.shared["down_proj"], None)
        # <g, down act> is <g down, act>: the expert's output itself is not computed.
        gshare = (gact * act).sum(-1, keepdim=True) * share * (1.0 - share)
        ggate, gup = self.kernels.glu_backward(self.traits.activation, gate, up, gact * share)
        gn = backward(ggate, routed.shared["gate_proj"], gn)
        gn = backward(gup, routed.shared["up_proj"], gn)
        return gn + gshare * routed.shared_gate

    def _routed_product(self, routed: Routed, part: str, x: Tensor) -> Tensor:
        return self.kernels.frozen_linear(x, routed.shared[part], None, None)
