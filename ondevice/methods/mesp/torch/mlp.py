"""The MLP of a block: the gated one, or another whose gradient is autograd's; and what stands behind
it: a branch that reads the tokens' own embeddings for the layer, and a factor of the output."""

from __future__ import annotations

import torch
from torch import Tensor

from ondevice.methods.mesp.torch.block import Block, BlockLayers, Linear, OnGradient
from ondevice.methods.mesp.torch.kernels import Parts
from ondevice.nn.cross_entropy import cast, times
from ondevice.nn.experts import peft_layout
from ondevice.nn.low_rank import LowRank

GATE_UP: tuple[str, ...] = ("gate_proj", "up_proj")


class Mlp(BlockLayers):
    """The stages of the MLP."""

    def mlp_norm(self, block: Block, m: Tensor) -> Tensor:
        return self.normed(block, "before_mlp", m)

    def gate_up(self, block: Block, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N, F] each."""
        if self.traits.fused:
            gate, up = self.linear(block, "gate_up_proj", n).chunk(2, -1)
            return gate, up
        return self.linear(block, "gate_proj", n), self.linear(block, "up_proj", n)

    def mlp_parts(self) -> tuple[str, ...]:
        """Return the linear layers of the MLP."""
        return (*(("gate_up_proj",) if self.traits.fused else GATE_UP), "down_proj")

    def sums_parts(self, block: Block) -> bool:
        """Return True if the kernels of SwiGLU add the low-rank parts of the MLP's layers."""
        return (
            self.kernels.fused
            and self.traits.activation == "silu"
            and "after_mlp" not in block.norms
            and block.mlp is None
            and block.layer_input is None
            and "output_scale" not in block.mixer
        )

    def gate_up_apart(
        self, block: Block, n: Tensor, kept: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Parts]:
        """Return gate and up [N, F] of the frozen weights, and their low-rank parts.

        Args:
            kept: gate and up, if they are known.
        """
        if self.traits.fused:
            layer = block.linears["gate_up_proj"]
            gate, up = kept or self._frozen(layer, n).chunk(2, -1)
            if layer.b is None:
                return gate, up, (None, None)
            h = layer.h(n)
            halves = cast(layer.b, n.dtype).chunk(2, -1)
            return gate, up, tuple(LowRank(h, half, layer.scale) for half in halves)
        layers = [block.linears[target] for target in GATE_UP]
        gate, up = kept or [self._frozen(layer, n) for layer in layers]
        inner = self.inner(block, GATE_UP, n)
        return gate, up, tuple(self._part(*one, n.dtype) for one in zip(layers, inner, strict=True))

    def _frozen(self, layer: Linear, x: Tensor) -> Tensor:
        return self.kernels.frozen_linear(x, layer.matrix, layer.bias, None)

    @staticmethod
    def _part(layer: Linear, h: Tensor | None, dtype: torch.dtype) -> LowRank | None:
        if layer.b is None or h is None:
            return None
        return LowRank(h, cast(layer.b, dtype), layer.scale)

    def glu_down_backward(
        self,
        block: Block,
        gate_up: tuple[Tensor, Tensor],
        parts: Parts,
        g: Tensor,
        on_gradient: OnGradient,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up from that of the block's output; see
        `gate_up_apart`."""
        g = times(g, self.traits.residual_scale)
        layer = block.linears["down_proj"]
        gh = part = None
        if layer.a is not None:
            gh = self.lower(layer, g)
            part = LowRank(gh, cast(layer.a, g.dtype))
        gact = self.kernels.frozen_backward(g, layer.matrix, None)
        ggate, gup, act = self.kernels.swiglu_parts_backward(*gate_up, gact, (*parts, part))
        gradients, _ = self.lora_backward(block, "down_proj", act, g, gh)
        if gradients is not None:
            on_gradient("down_proj", *gradients)
        return ggate, gup

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) up, or with the activation that the block has, in new memory."""
        return self.kernels.glu(self.traits.activation, gate, up)

    def down(self, block: Block, m: Tensor, act: Tensor) -> Tensor:
        """Compute m + act Wd^T, in m's memory."""
        return self.join(block, "down_proj", "after_mlp", m, act)

    def down_backward(
        self, block: Block, gate: Tensor, up: Tensor, g: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        """Return gradient of the activation.

        The activation itself is computed only for the gradients of A and B, and freed before its
        gradient exists: of [N, F] there are never more than gate, up and one more.
        """
        gradients = None
        gh = None
        g = self.branch_gradient(block, "down_proj", "after_mlp", lambda: self.act(gate, up), g)
        if block.linears["down_proj"].a is not None:
            gradients, gh = self.lora_backward(block, "down_proj", self.act(gate, up), g)
        gact = self.input_backward(block, "down_proj", g, gh)
        if gradients is not None:
            on_gradient("down_proj", *gradients)
        return gact

    def act_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of gate and up, in the memory of up and g; gate is used up."""
        return self.kernels.glu_backward(self.traits.activation, gate, up, g)

    def gate_up_backward(
        self, block: Block, n: Tensor, ggate: Tensor, gup: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        """Return gradient of the MLP's norm."""
        if self.traits.fused:
            return self.linear_backward(
                block, "gate_up_proj", n, torch.cat((ggate, gup), -1), on_gradient
            )
        parts = dict(zip(GATE_UP, (ggate, gup), strict=True))
        gn = self.inputs_backward(block, n, parts, on_gradient, last=False)
        assert gn is not None  # noqa: S101 - something below is trained
        return gn

    def other_mlp(self, block: Block, m: Tensor) -> Tensor:
        """Compute m + an MLP that is not the gated one, in m's memory."""
        assert block.mlp is not None  # noqa: S101 - the caller looked
        y = block.mlp(self.mlp_norm(block, m), block.pairs)
        scale = self.traits.residual_scale
        if self.kernels.in_place:
            return m.add_(y, alpha=scale)
        return m + times(y, scale)

    def other_mlp_backward(
        self, block: Block, m: Tensor, g: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        """Compute g + the gradient of m through such an MLP, in g's memory; a router's weights have
        their part.

        Gradients of the experts' pairs are called back as PEFT lays them out: A [experts * rank,
        inputs], B [rank * experts, outputs].
        """
        assert block.mlp is not None  # noqa: S101 - the caller looked
        n = self.mlp_norm(block, m)
        with torch.enable_grad():
            leaf = n.detach().requires_grad_(True)
            pairs = {name: pair.leaf() for name, pair in block.pairs.items()}
            leaves = [tensor for pair in pairs.values() for tensor in (pair.a_ERI, pair.b_EOR)]
            gy = times(g, self.traits.residual_scale)
            gn, *learned = torch.autograd.grad(block.mlp(leaf, pairs), [leaf, *leaves], gy)
        for number, target in enumerate(pairs):
            on_gradient(target, *peft_layout(*learned[2 * number : 2 * number + 2]))
        return self.mlp_norm_backward(block, m, gn, g)

    def mlp_norm_backward(self, block: Block, m: Tensor, gn: Tensor, g: Tensor) -> Tensor:
        """Compute g + the gradient of m from that of its norm; in g's memory."""
        return self.normed_backward(block, "before_mlp", m, gn, g)


class BehindMlp(BlockLayers):
    """The stages behind the MLP, of a chunk of tokens; `p` is their part of `Block.layer_input`."""

    def has_behind(self, block: Block) -> bool:
        """Return True if something stands behind the block's MLP."""
        return block.layer_input is not None or "output_scale" in block.mixer

    def behind(self, block: Block, y: Tensor, p: Tensor | None) -> Tensor:
        """Compute (y + norm(out(act(gate(y)) p))) scale, in y's memory."""
        if p is not None:
            gated = self.kernels.glu(self.traits.activation, self.linear(block, "layer_gate", y), p)
            y = self.join(block, "layer_out", "after_layer_input", y, gated)
        return self._scaled(block, y)

    def behind_backward(
        self, block: Block, y: Tensor, p: Tensor | None, g: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        """Return the gradient of y from that of the block's output, in g's memory."""
        g = self._scaled(block, g)
        if p is None:
            return g
        activation = self.traits.activation
        gate = self.linear(block, "layer_gate", y)
        gated = self.kernels.glu(activation, gate, p)
        g_out = self.branch_gradient(block, "layer_out", "after_layer_input", lambda: gated, g)
        ggated = self.linear_backward(block, "layer_out", gated, g_out, on_gradient)
        del g_out
        ggate, _ = self.kernels.glu_backward(activation, gate, p.clone(), ggated)
        del gate, ggated
        return self.linear_backward(block, "layer_gate", y, ggate, on_gradient, g)

    def _scaled(self, block: Block, x: Tensor) -> Tensor:
        scale = block.mixer.get("output_scale")
        if scale is None:
            return x
        if self.kernels.in_place:
            return x.mul_(scale.to(x.dtype))
        return x * scale
