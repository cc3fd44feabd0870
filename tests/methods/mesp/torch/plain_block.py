"""A block in differentiable operations, written for itself: what the stages are held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.core.dims import ModelDims
from ondevice.methods.mesp.torch.kernels import Position
from ondevice.methods.mesp.torch.stages import QKV, Block
from ondevice.nn.cross_entropy import cast, wide


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
    """[B, heads, T, h]: torch's own, or written out if there is a window."""
    traits, length, grouped = dims.traits, q.shape[2], dims.heads != dims.kv_heads
    window, scale = traits.window(layer), traits.score_scale or dims.head_dim**-0.5
    if not 0 < window < length:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    k, v = (x.repeat_interleave(dims.heads // dims.kv_heads, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * scale
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    seen = seen.triu(1 - window)
    return torch.softmax(wide(scores.masked_fill(~seen, float("-inf"))), -1).to(v.dtype) @ v


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
