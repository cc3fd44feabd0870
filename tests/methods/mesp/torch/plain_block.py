"""A block in differentiable operations, written for itself: what the stages are held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.core.dims import ModelDims
from ondevice.core.traits import CONVOLUTION, DELTA, BlockTraits
from ondevice.methods.mesp.torch.block import Block
from ondevice.methods.mesp.torch.kernels import Position
from ondevice.nn.cross_entropy import cast, wide


def block_forward(
    dims: ModelDims, block: Block, x: Tensor, position: Position, rows: int
) -> Tensor:
    """Return a block in differentiable operations, [N, D] -> [N, D]: torch's attention, norms in float32."""
    n = _norm(block, "before_attention", x, dims.norm_eps)
    mixer = dims.traits.mixer(block.layer)
    if mixer == CONVOLUTION:
        y = _convolved(block, n, rows)
    elif mixer == DELTA:
        y = _corrected(dims, block, n, rows)
    else:
        y = _attended(dims, block, n, position, rows)
    return _after_the_mixer(dims, block, x, y)


def _convolved(block: Block, n: Tensor, rows: int) -> Tensor:
    """torch's own convolution of [rows, channels, tokens], with zeros on the left."""
    b, c, x = _linear(block, "conv_in", n).chunk(3, -1)
    return _linear(block, "conv_out", c * _taps(block, b * x, rows).flatten(0, 1))


def _taps(block: Block, x: Tensor, rows: int) -> Tensor:
    """Convolve [N, channels] -> [rows, tokens, channels]."""
    taps = block.mixer["taps"]
    x = functional.pad(x.unflatten(0, (rows, -1)).transpose(1, 2), (taps.shape[1] - 1, 0))
    return functional.conv1d(x, taps[:, None], groups=len(taps)).transpose(1, 2)


def _corrected(dims: ModelDims, block: Block, n: Tensor, rows: int) -> Tensor:
    """A gated delta rule, one token after the other."""
    key_heads, heads, key_width, width = dims.traits.delta
    mixed = functional.silu(_taps(block, _linear(block, "delta_qkv", n), rows))
    keys = key_heads * key_width
    q, k, v = mixed.split((keys, keys, heads * width), -1)
    q, k = (
        x.unflatten(-1, (key_heads, -1)).repeat_interleave(heads // key_heads, 2) for x in (q, k)
    )
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = v.unflatten(-1, (heads, -1))
    beta = torch.sigmoid(_linear(block, "delta_b", n)).unflatten(0, (rows, -1))
    a = _linear(block, "delta_a", n).unflatten(0, (rows, -1))
    left = torch.exp(-block.mixer["decay"].exp() * functional.softplus(a + block.mixer["step"]))
    state = n.new_zeros(rows, heads, key_width, width)
    outputs = []
    for t in range(v.shape[1]):
        state = state * left[:, t, :, None, None]
        wrong = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * wrong)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * key_width**-0.5))
    o = torch.stack(outputs, 1).flatten(0, 1)
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + dims.norm_eps) * block.mixer["gate_norm"]
    z = functional.silu(_linear(block, "delta_z", n))
    return _linear(block, "delta_out", o.flatten(1) * z)


def _attended(dims: ModelDims, block: Block, n: Tensor, position: Position, rows: int) -> Tensor:
    traits = dims.traits
    if traits.fused:
        own = (
            dims.heads * dims.head_dim,
            dims.kv_heads * dims.head_dim,
            dims.kv_heads * dims.head_dim,
        )
        q, k, v = _linear(block, "qkv_proj", n).split(own, -1)
    else:
        same = traits.keys_as_values and traits.keys_as_values[block.layer]
        parts = ("q_proj", "k_proj", "k_proj" if same else "v_proj")
        q, k, v = (_linear(block, part, n) for part in parts)
    v = _norm(block, "v", v, dims.norm_eps)
    gate = None
    if traits.output_gate:
        q, gate = (x.flatten(1) for x in q.unflatten(-1, (dims.heads, -1)).chunk(2, -1))
    q, k = _norm(block, "q", q, dims.norm_eps), _norm(block, "k", k, dims.norm_eps)
    q, k, v = (tensor.reshape(rows, -1, heads, dims.head_dim)
               for tensor, heads in ((q, dims.heads), (k, dims.kv_heads), (v, dims.kv_heads)))  # fmt: skip
    if traits.rotated(block.layer):
        q, k = _rotate(q, position), _rotate(k, position)
    o = _attention(dims, block.layer, *(tensor.transpose(1, 2) for tensor in (q, k, v)))
    o = o.transpose(1, 2).reshape(n.shape[0], -1)
    return _linear(block, "o_proj", o if gate is None else o * torch.sigmoid(gate))


def _after_the_mixer(dims: ModelDims, block: Block, x: Tensor, y: Tensor) -> Tensor:
    traits = dims.traits
    m = x + _norm(block, "after_attention", y, dims.norm_eps) * traits.residual_scale
    n = _norm(block, "before_mlp", m, dims.norm_eps)
    if block.mlp is not None:
        return m + block.mlp(n, block.pairs)
    if traits.fused:
        gate, up = _linear(block, "gate_up_proj", n).chunk(2, -1)
    else:
        gate, up = _linear(block, "gate_proj", n), _linear(block, "up_proj", n)
    y = _linear(block, "down_proj", _act(traits, gate) * up)
    y = m + _norm(block, "after_mlp", y, dims.norm_eps) * traits.residual_scale
    if block.layer_input is not None:
        own = _act(traits, _linear(block, "layer_gate", y)) * block.layer_input
        own = _norm(block, "after_layer_input", _linear(block, "layer_out", own), dims.norm_eps)
        y = y + own * traits.residual_scale
    return y * block.mixer["output_scale"] if traits.output_scale else y


def _act(traits: BlockTraits, gate: Tensor) -> Tensor:
    if traits.activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh")


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
