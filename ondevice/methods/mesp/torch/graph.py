"""The stages once more, as functions without memory of their own: what a program for a phone is made of.

Same names and formulas as `stages`; here nothing is changed in place, B is [rank, outputs], shapes are fixed, and only
operators are used that a stock ExecuTorch runtime has. Every product is written so that frozen weights are read where
they lie: x W^T is one linear, g W one product, and of a transposed weight there is never a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.methods.mesp.memory import TILE_NUMBERS, TILE_TOKENS

Position = tuple[Tensor, Tensor]
"""cos and sin, [1, 1, tokens, head_dim / 2] each."""
Learn = Callable[[str, Tensor, Tensor], None]
"""Takes a target and the gradients of its A [rank, inputs] and B [rank, outputs]."""
QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class GraphLinear:
    """y = x W^T + bias + scale (x A^T) B; A and B None where there is no pair."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    scale: float


@dataclass(frozen=True)
class GraphBlock:
    """One block: its norms' weights and its linears by target."""

    norms: tuple[Tensor, Tensor]
    linears: dict[str, GraphLinear]


@dataclass(frozen=True)
class GraphStages:
    """Stages of blocks with these sizes; N = rows * tokens."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    def linear(self, layer: GraphLinear, x: Tensor) -> Tensor:
        """[N, inputs] -> [N, outputs]."""
        y = functional.linear(x, layer.weight, layer.bias)
        if layer.a is None or layer.b is None:
            return y
        return y + torch.mm(functional.linear(x, layer.a), layer.b * layer.scale)

    def pair_backward(self, layer: GraphLinear, x: Tensor, g: Tensor) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
        """Gradients of A and B (Eqs. 10 and 12), and that of h (Eq. 11); empty without a pair."""
        if layer.a is None or layer.b is None:
            return None, g
        gh = functional.linear(g, layer.b * layer.scale)
        h = functional.linear(x, layer.a)
        return (torch.mm(gh.t(), x), torch.mm(h.t(), g) * layer.scale), gh

    def input_backward(self, layer: GraphLinear, g: Tensor, gh: Tensor) -> Tensor:
        """Gradient of the input (Eq. 13)."""
        gx = torch.mm(g, layer.weight)
        return gx if layer.a is None else gx + torch.mm(gh, layer.a)

    def linear_backward(self, block: GraphBlock, target: str, x: Tensor, g: Tensor, learn: Learn) -> Tensor:
        """Gradient of the input; the pair learns."""
        layer = block.linears[target]
        gradients, gh = self.pair_backward(layer, x, g)
        if gradients is not None:
            learn(target, *gradients)
        return self.input_backward(layer, g, gh)

    def norm(self, weight: Tensor, x: Tensor) -> Tensor:
        """RMSNorm of [N, D]."""
        return x * self._scale(x) * weight

    def norm_backward(self, weight: Tensor, x: Tensor, gn: Tensor, g: Tensor) -> Tensor:
        """g + the gradient of x from that of its norm (appendix A.3)."""
        r, gw = self._scale(x), gn * weight
        mean = (gw * x).mean(-1, keepdim=True)
        return g + (gw - x * (mean * r * r)) * r

    def _scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)

    def project(self, block: GraphBlock, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """n -> q [rows, heads, tokens, head_dim], k and v with their own heads."""
        q, k, v = (self._by_head(self.linear(block.linears[target], n)) for target in QKV)
        return q, k, v

    def rope(self, x: Tensor, position: Position, sign: float = 1.0) -> Tensor:
        """Rotate [rows, heads, tokens, head_dim]; backwards with sign -1, which is the gradient too."""
        cos, sin = position
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin * sign, second * cos + first * sin * sign), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """[N, heads * head_dim]; `mask` is additive, [tokens, tokens]."""
        keys, values = self._stacked(k), self._stacked(v)
        parts = []
        for low, high in self._tiles():
            p = self._probabilities(q, keys, mask, low, high)
            parts.append(self._split(torch.bmm(p, values[:, :high]), high - low))
        return self._by_token(torch.cat(parts, 2) if len(parts) > 1 else parts[0])

    def attend_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, by head (appendix A.2); the scores of a tile of queries exist at once."""
        g, keys, values = self._by_head(g), self._stacked(k), self._stacked(v)
        gqs: list[Tensor] = []
        gk = gv = None
        for low, high in reversed(self._tiles()):  # the last tile sees all keys
            p = self._probabilities(q, keys, mask, low, high)
            tile, grad = self._grouped(q[:, :, low:high]), self._grouped(g[:, :, low:high])
            part_v = torch.bmm(p.transpose(1, 2), grad)
            gp = torch.bmm(grad, values[:, :high].transpose(1, 2))
            gs = p * (gp - (gp * p).sum(-1, keepdim=True)) * self.head_dim**-0.5
            part_k = torch.bmm(gs.transpose(1, 2), tile)
            gqs.insert(0, self._split(torch.bmm(gs, keys[:, :high]), high - low))
            gk, gv = _add_first(gk, part_k), _add_first(gv, part_v)
        assert gk is not None and gv is not None  # noqa: S101 - there is a tile
        shape = (self.rows, self.kv_heads, self.tokens, self.head_dim)
        return torch.cat(gqs, 2) if len(gqs) > 1 else gqs[0], gk.view(shape), gv.view(shape)

    def _tiles(self) -> list[tuple[int, int]]:
        size = max(TILE_TOKENS, TILE_NUMBERS // (self.rows * self.heads * self.tokens))
        return [(low, min(low + size, self.tokens)) for low in range(0, self.tokens, size)]

    def _probabilities(self, q: Tensor, keys: Tensor, mask: Tensor, low: int, high: int) -> Tensor:
        """[rows * kv heads, group * queries, keys]."""
        tile = self._grouped(q[:, :, low:high] * self.head_dim**-0.5)
        scores = torch.bmm(tile, keys[:, :high].transpose(1, 2))
        groups = self.heads // self.kv_heads
        seen = mask[low:high, :high].repeat(groups, 1)[None] if groups > 1 else mask[None, low:high, :high]
        return torch.softmax(scores + seen, -1)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(self.rows, self.tokens, -1, self.head_dim).transpose(1, 2)

    def _by_token(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(self.rows * self.tokens, -1)

    def _stacked(self, x: Tensor) -> Tensor:
        return x.reshape(self.rows * self.kv_heads, self.tokens, self.head_dim)

    def _grouped(self, x: Tensor) -> Tensor:
        """[rows, heads, queries, h] -> [rows * kv heads, group * queries, h]."""
        return x.reshape(self.rows * self.kv_heads, -1, self.head_dim)

    def _split(self, x: Tensor, queries: int) -> Tensor:
        return x.view(self.rows, self.heads, queries, self.head_dim)

    def forward(self, block: GraphBlock, x: Tensor, position: Position, mask: Tensor) -> Tensor:
        """The block's output [N, D]."""
        m = self._middle(block, x, position, mask)[3]
        n = self.norm(block.norms[1], m)
        gate, up = (self.linear(block.linears[target], n) for target in ("gate_proj", "up_proj"))
        return m + self.linear(block.linears["down_proj"], gate * torch.sigmoid(gate) * up)

    def _middle(
        self, block: GraphBlock, x: Tensor, position: Position, mask: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor]:
        """Rotated q, k and v, attention's output, the norm of x, and the residual stream behind attention."""
        n = self.norm(block.norms[0], x)
        q, k, v = self.project(block, n)
        q, k = self.rope(q, position), self.rope(k, position)
        o = self.attend(q, k, v, mask)
        return (q, k, v), o, n, x + self.linear(block.linears["o_proj"], o)

    def backward(
        self, block: GraphBlock, x: Tensor, g: Tensor, position: Position, mask: Tensor, learn: Learn, last: bool
    ) -> Tensor:
        """The gradient of x from that of the block's output; of nothing where `last`."""
        (q, k, v), o, _, m = self._middle(block, x, position, mask)
        gm = self._mlp_backward(block, m, g, learn)
        go = self.linear_backward(block, "o_proj", o, gm, learn)
        gq, gk, gv = self.attend_backward(go, q, k, v, mask)
        gq, gk = self.rope(gq, position, -1.0), self.rope(gk, position, -1.0)
        n = self.norm(block.norms[0], x)
        gn: Tensor | None = None
        for target, part in zip(QKV, (gq, gk, gv)):
            part = self._by_token(part)
            gradients, gh = self.pair_backward(block.linears[target], n, part)
            if gradients is not None:
                learn(target, *gradients)
            if not last:
                found = self.input_backward(block.linears[target], part, gh)
                gn = found if gn is None else gn + found
        return gm if gn is None else self.norm_backward(block.norms[0], x, gn, gm)

    def _mlp_backward(self, block: GraphBlock, m: Tensor, g: Tensor, learn: Learn) -> Tensor:
        n = self.norm(block.norms[1], m)
        gate, up = (self.linear(block.linears[target], n) for target in ("gate_proj", "up_proj"))
        s = torch.sigmoid(gate)
        silu = gate * s
        gact = self.linear_backward(block, "down_proj", silu * up, g, learn)
        gup, ggate = gact * silu, gact * up * (s + silu * (1.0 - s))
        gn = self.linear_backward(block, "gate_proj", n, ggate, learn)
        gn = gn + self.linear_backward(block, "up_proj", n, gup, learn)
        return self.norm_backward(block.norms[1], m, gn, g)


def _add_first(whole: Tensor | None, part: Tensor) -> Tensor:
    """`part`, of the first keys, added to `whole` of all keys."""
    if whole is None:
        return part
    count = part.shape[1]
    return torch.cat((whole[:, :count] + part, whole[:, count:]), 1)
