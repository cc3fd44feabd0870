"""The same steps by automatic differentiation: what the hand-written backward pass, and a program of it, are held
against. Loss, weights and updates are the method's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ondevice.methods.mesp.torch.attention import cast, wide
from ondevice.methods.mesp.torch.model import Model
from ondevice.methods.mesp.torch.session import MespSession
from ondevice.methods.mesp.torch.stages import QKV, Block, Linear
from ondevice.nn.experts import peft_layout

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.stages import Position
    from ondevice.methods.mesp.torch.weights import Frozen
    from ondevice.models import LoadedModel

EXPERTS_NDIM = 3
"""Dimensions of a matrix of all experts."""


def reference_session(
    loaded: LoadedModel, config: MespConfig, seed: int, device: str | None = None
) -> MespSession:
    """Return a session of mesp whose gradients are autograd's, by one graph of all blocks."""
    session = MespSession(loaded, config, seed, device)
    session.model = AutogradModel(session.weights, session.optimizer, config)
    return session


class AutogradModel(Model):
    """A model whose blocks are differentiated by autograd; each is computed again in the backward pass."""

    @torch.no_grad()
    def forward_backward(
        self, ids_BT: Tensor, labels_BT: Tensor, scale: float, places_BT: Tensor | None = None
    ) -> Tensor:
        """See `Model.forward_backward`; of rows that are not packed."""
        assert places_BT is None  # noqa: S101 - the reference of a packed step is the step of its rows
        x, positions = self.weights.embed(ids_BT), self.weights.positions(ids_BT.shape[1])
        leaves: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        with torch.enable_grad():
            for i in range(self.dims.layers):
                with self.weights.block(i, self.above(i)) as frozen:
                    block = self.block(i, frozen)
                for target, layer in block.linears.items():
                    if layer.a is not None and layer.b is not None:
                        leaves[i, target] = (layer.a, layer.b)
                leaves |= {
                    (i, target): (pair.a_ERI, pair.b_EOR) for target, pair in block.pairs.items()
                }
                x = self.run_block(self.dims, block, x, positions(i), ids_BT.shape[0])
        total, g = self.loss.backward(x.detach().clone(), labels_BT, scale)
        gradients = iter(
            torch.autograd.grad(x, [leaf for pair in leaves.values() for leaf in pair], g)
        )
        for i, target in leaves:
            ga, gb = next(gradients).float(), next(gradients).float()
            self.on_gradient(i)(
                target, *(peft_layout(ga, gb) if ga.ndim == EXPERTS_NDIM else (ga, gb))
            )
        self.optimizer.flush()
        return total

    def run_block(self, *arguments: Any) -> Tensor:
        """Run `block_forward`, keeping its inputs alone for the backward pass."""
        y = checkpoint(block_forward, *arguments, use_reentrant=False)
        assert isinstance(y, Tensor)  # noqa: S101 - what `block_forward` gives
        return y

    def block(self, i: int, frozen: Frozen) -> Block:
        """See `Model.block`; A and B collect gradients."""
        block = super().block(i, frozen)
        linears = {target: _with_leaves(layer) for target, layer in block.linears.items()}
        return replace(
            block, linears=linears, pairs={name: pair.leaf() for name, pair in block.pairs.items()}
        )


def block_forward(
    dims: ModelDims, block: Block, x: Tensor, position: Position, rows: int
) -> Tensor:
    """Return a block in differentiable operations, [N, D] -> [N, D]: torch's attention, norms in float32."""
    traits = dims.traits
    n = _norm(block, "before_attention", x, dims.norm_eps)
    if traits.fused:
        own = (
            dims.heads * dims.head_dim,
            dims.kv_heads * dims.head_dim,
            dims.kv_heads * dims.head_dim,
        )
        q, k, v = _linear(block, "qkv_proj", n).split(own, -1)
    else:
        q, k, v = (_linear(block, target, n) for target in QKV)
    q, k = _norm(block, "q", q, dims.norm_eps), _norm(block, "k", k, dims.norm_eps)
    q, k, v = (tensor.reshape(rows, -1, heads, dims.head_dim)
               for tensor, heads in ((q, dims.heads), (k, dims.kv_heads), (v, dims.kv_heads)))  # fmt: skip
    if traits.rotated(block.layer):
        q, k = _rotate(q, position), _rotate(k, position)
    o = _attention(dims, block.layer, *(tensor.transpose(1, 2) for tensor in (q, k, v)))
    y = _linear(block, "o_proj", o.transpose(1, 2).reshape(x.shape[0], -1))
    m = x + _norm(block, "after_attention", y, dims.norm_eps) * traits.residual_scale
    n = _norm(block, "before_mlp", m, dims.norm_eps)
    if block.mlp is not None:
        return m + block.mlp(n, block.pairs)
    if traits.fused:
        gate, up = _linear(block, "gate_up_proj", n).chunk(2, -1)
    else:
        gate, up = _linear(block, "gate_proj", n), _linear(block, "up_proj", n)
    act = (
        functional.silu(gate)
        if traits.activation == "silu"
        else functional.gelu(gate, approximate="tanh")
    )
    y = _linear(block, "down_proj", act * up)
    return m + _norm(block, "after_mlp", y, dims.norm_eps) * traits.residual_scale


def _attention(dims: ModelDims, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, heads, T, h]: torch's own, or written out where scores have a cap or a window."""
    traits, length, grouped = dims.traits, q.shape[2], dims.heads != dims.kv_heads
    window, scale = traits.window(layer), traits.score_scale or dims.head_dim**-0.5
    if not traits.score_cap and not 0 < window < length:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    k, v = (x.repeat_interleave(dims.heads // dims.kv_heads, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * scale
    if traits.score_cap:
        scores = torch.tanh(scores / traits.score_cap) * traits.score_cap
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    seen = seen.triu(1 - window) if window else seen
    return torch.softmax(wide(scores.masked_fill(~seen, float("-inf"))), -1).to(v.dtype) @ v


def _with_leaves(layer: Linear) -> Linear:
    if layer.a is None or layer.b is None:
        return layer
    return replace(
        layer, a=layer.a.detach().requires_grad_(True), b=layer.b.detach().requires_grad_(True)
    )


def _linear(block: Block, target: str, x: Tensor) -> Tensor:
    layer = block.linears[target]
    y = functional.linear(x, layer.matrix.dense(), layer.bias)
    return y if layer.b is None else y + (layer.h(x) @ cast(layer.b, x.dtype)) * layer.scale


def _norm(block: Block, place: str, x: Tensor, eps: float) -> Tensor:
    weight = block.norms.get(place)
    if weight is None:
        return x
    x32 = wide(x.unflatten(-1, (-1, weight.shape[0])))
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (
        (weight * (x32 if weight.dtype != x.dtype else cast(x32, x.dtype))).to(x.dtype).flatten(-2)
    )


def _rotate(x: Tensor, position: Position) -> Tensor:
    cos, sin = position
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., width:]), -1)
