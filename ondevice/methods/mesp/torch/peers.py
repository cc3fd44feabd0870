"""What the hand-written backward pass is held against: automatic differentiation over the same weights and pairs.

`autodiff` keeps everything, `checkpoint` keeps block inputs and computes each block again in backward, `blockwise`
does that by hand, one block's graph at a time with its gradients applied and dropped (MeBP). Loss, weights, streaming
and updates are those of the method itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ondevice.methods.mesp.torch.stages import QKV

if TYPE_CHECKING:
    from ondevice.methods.mesp.torch.stages import Block, Learn, Position
    from ondevice.models import ModelDims


class AutodiffBlocks:
    """The block in differentiable operations: torch's attention, norms in float32."""

    def __init__(self, dims: ModelDims) -> None:
        self.dims = dims

    def forward(self, block: Block, x: Tensor, position: Position, rows: int) -> Tensor:
        """[N, D] -> [N, D]."""
        n = self._norm(x, block.norms[0])
        q, k, v = (self._linear(block, target, n).view(rows, -1, heads, self.dims.head_dim).transpose(1, 2)
                   for target, heads in zip(QKV, (self.dims.heads, *[self.dims.kv_heads] * 2)))  # fmt: skip
        q, k = _rotate(q, position), _rotate(k, position)
        grouped = self.dims.heads != self.dims.kv_heads
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        m = x + self._linear(block, "o_proj", o.transpose(1, 2).reshape(x.shape[0], -1))
        n = self._norm(m, block.norms[1])
        act = functional.silu(self._linear(block, "gate_proj", n)) * self._linear(block, "up_proj", n)
        return m + self._linear(block, "down_proj", act)

    def backward(
        self, block: Block, x: Tensor, g: Tensor, position: Position, rows: int, learn: Learn, last: bool = False
    ) -> Tensor:
        """As `Blocks.backward`, by a graph of this block alone."""
        leaves = self.leaves(block)
        with torch.enable_grad():
            entered = x.detach().requires_grad_(not last)
            y = self.forward(block, entered, position, rows)
            wanted = [*([] if last else [entered]), *(leaf for pair in leaves.values() for leaf in pair)]
            found = list(torch.autograd.grad(y, wanted, g))
        gx = g if last else found.pop(0)
        for target in leaves:
            learn(target, found.pop(0).float(), found.pop(0).float())
        return gx

    def leaves(self, block: Block) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B by target, made to collect gradients."""
        pairs = {t: (layer.a, layer.b) for t, layer in block.linears.items() if layer.a is not None}
        return {t: (a.requires_grad_(True), b.requires_grad_(True)) for t, (a, b) in pairs.items() if b is not None}

    def checkpointed(self, block: Block, x: Tensor, position: Position, rows: int) -> Tensor:
        """`forward` that keeps its input alone."""
        result = checkpoint(self.forward, block, x, position, rows, use_reentrant=False)
        assert isinstance(result, Tensor)  # noqa: S101 - what `forward` gives
        return result

    def _linear(self, block: Block, target: str, x: Tensor) -> Tensor:
        layer = block.linears[target]
        y = functional.linear(x, layer.matrix.dense(), layer.bias)
        h = layer.h(x)
        return y if h is None or layer.b is None else y + functional.linear(h, layer.b.to(x.dtype)) * layer.scale

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.dims.norm_eps)
        return weight * x32.to(x.dtype)


def _rotate(x: Tensor, position: Position) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = position
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
