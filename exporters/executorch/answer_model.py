"""A whole decoder that answers: keys and values are its own buffers, and the adapter is an input.

The form is ExecuTorch's: norms and rotations are products, which XNNPACK takes, and attention reads
the cache up only to the present token, in the operator that ExecuTorch's own language models call.
Weights stay constants, so that a backend packs them once, when the program is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ondevice.core.errors import ModelError
from ondevice.core.traits import beyond_llama

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ondevice.artifact.adapter import Adapter
    from ondevice.models.load import LoadedModel

KNOWN = ("norms", "rotary", "score_scale", "embedding_scale", "residual_scale", "logit_scale")
"""Traits of a block that differ from Llama's and are computed here; of norms, those of q and k."""


@dataclass(frozen=True)
class LoraPlace:
    """Where one linear layer's adapter lies in the input: Aᵀ float32 [inputs, rank] at `a`, then Bᵀ
    times alpha / rank, [rank, outputs], at `b`."""

    linear: str
    a: int
    b: int
    inputs: int
    outputs: int


def layout(dims: Any, linears: Sequence[str], rank: int) -> tuple[LoraPlace, ...]:
    """Place the adapters of linear layers, by their full names, one behind the other."""
    pairs = []
    at = 0
    for name in linears:
        inputs, outputs = dims.linear_shape(name.rpartition(".")[2])
        pairs.append(LoraPlace(name, at, at + rank * inputs, inputs, outputs))
        at += rank * (inputs + outputs)
    return tuple(pairs)


def flatten(adapter: Adapter, pairs: Sequence[LoraPlace], rank: int) -> np.ndarray:
    """Return an adapter as the program takes it, float32 [n]; layers that it lacks are zero."""
    flat = np.zeros(size_of(pairs, rank), np.float32)
    for pair in pairs:
        if pair.linear in adapter.linears:
            a, b = adapter.pair(pair.linear)
            flat[pair.a : pair.b] = a.T.reshape(-1)
            flat[pair.b : pair.b + rank * pair.outputs] = (
                b.T * (adapter.alpha / adapter.rank)
            ).reshape(-1)
    return flat


def size_of(pairs: Sequence[LoraPlace], rank: int) -> int:
    """Return how many elements the adapter's vector has."""
    return pairs[-1].b + rank * pairs[-1].outputs if pairs else 0


def problems(dims: Any, context_tokens: int) -> list[str]:
    """Return every reason why a model has no such form."""
    if dims.whole or dims.experts:
        return [
            f"a program with packed weights cannot answer as {dims.family}: its blocks are not known one by one"
        ]
    found = [
        f"a program with packed weights cannot answer: {word}"
        for word in beyond_llama(dims.traits, KNOWN)
    ]
    places = {place for place, _ in dims.traits.norms}
    if (
        not {"before_attention", "before_mlp"}
        <= places
        <= {"before_attention", "before_mlp", "q", "k"}
    ):
        found.append("a program with packed weights cannot answer: norms behind attention or MLP")
    if not dims.gated:
        found.append("a program with packed weights cannot answer: an MLP without a gate")
    if dims.max_positions and context_tokens > dims.max_positions:
        found.append(
            f"export.context_tokens is {context_tokens}: the model takes {dims.max_positions}"
        )
    return found


class Norm(nn.Module):
    """RMSNorm over the last dimension, with the mean of squares as a product."""

    weight: Tensor
    average: Tensor

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", weight.detach().float())
        self.register_buffer("average", torch.full((1, weight.shape[0]), 1.0 / weight.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(functional.linear(x * x, self.average) + self.eps) * self.weight


class Adapted(nn.Module):
    """A linear layer, and next to it the adapter's pair if it has one: [1, T, inputs] -> [1, T,
    outputs]."""

    def __init__(self, layer: Any, pair: LoraPlace | None, rank: int) -> None:
        super().__init__()
        self.layer = linear(layer.weight, layer.bias)
        self.pair = pair
        self.rank = rank

    def forward(self, x: Tensor, adapter: tuple[Tensor, ...]) -> Tensor:
        y = self.layer(x)
        if self.pair is None:
            return y
        a = self.pair.a
        b = self.pair.b
        rank = self.rank
        down = adapter[0][a:b].view(1, self.pair.inputs, rank)
        up = adapter[0][b : b + rank * self.pair.outputs].view(1, rank, self.pair.outputs)
        return y + torch.bmm(torch.bmm(x, down), up)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a frozen float32 linear layer over that weight, which is not copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return layer


class AnswerBlock(nn.Module):
    """One block over new tokens, [1, T, D] -> [1, T, D]; `keys` and `values` are [1, context,
    kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor
    turn: Tensor

    def __init__(
        self, loaded: LoadedModel, number: int, context: int, pairs: dict[str, LoraPlace], rank: int
    ) -> None:
        super().__init__()
        dims = loaded.dims
        family = loaded.family
        self.dims = dims
        self.rotated = dims.traits.rotated(number)
        self.norms = nn.ModuleDict()
        for place, module in dims.traits.norms:
            weight = loaded.model.get_parameter(f"model.layers.{number}.{module}.weight")
            self.norms[place] = Norm(weight, dims.norm_eps)
        self.linears = nn.ModuleDict()
        for target in family.linear_targets:
            name = family.weight_path(number, target)
            self.linears[target] = Adapted(
                family.module(name), pairs.get(family.adapter_name(name)), rank
            )
        half, kept = dims.head_dim // 2, (1, context, dims.kv_heads, dims.head_dim)
        turn = torch.zeros(dims.head_dim, dims.head_dim)
        turn[range(half), range(half, 2 * half)] = -1.0
        turn[range(half, 2 * half), range(half)] = 1.0
        self.register_buffer("turn", turn)
        self.register_buffer("keys", torch.zeros(kept))
        self.register_buffer("values", torch.zeros(kept))

    def forward(
        self, x: Tensor, position: tuple[Tensor, Tensor], start: Any, adapter: tuple[Tensor, ...]
    ) -> Tensor:  # fmt: skip
        dims = self.dims
        linears = self.linears
        ops = torch.ops.llama
        h = self.norms["before_attention"](x)
        q = self._heads(linears["q_proj"](h, adapter), dims.heads, "q", position)
        k = self._heads(linears["k_proj"](h, adapter), dims.kv_heads, "k", position)
        v = linears["v_proj"](h, adapter).view(1, -1, dims.kv_heads, dims.head_dim)
        ops.update_cache(k, self.keys, start)
        ops.update_cache(v, self.values, start)
        scale = dims.traits.score_scale or None
        o = ops.custom_sdpa(q, self.keys, self.values, start, None, 0.0, True, scale)
        o = linears["o_proj"](o.view(1, -1, dims.heads * dims.head_dim), adapter)
        x = x + self._branch(o)
        h = self.norms["before_mlp"](x)
        gate = linears["gate_proj"](h, adapter)
        h = gate * torch.sigmoid(gate) * linears["up_proj"](h, adapter)
        return x + self._branch(linears["down_proj"](h, adapter))

    def _heads(self, x: Tensor, heads: int, norm: str, position: tuple[Tensor, Tensor]) -> Tensor:
        x = x.view(1, -1, heads, self.dims.head_dim)
        if norm in self.norms:
            x = self.norms[norm](x)
        # The other half of each head, negated if it is the first, is a product with ones.
        return (
            x * position[0] + functional.linear(x, self.turn) * position[1] if self.rotated else x
        )

    def _branch(self, x: Tensor) -> Tensor:
        scale = self.dims.traits.residual_scale
        if scale == 1.0:
            return x
        return x * scale


class AnswerModel(nn.Module):
    """New token ids int64 [1, T] behind `start` int64 [1] tokens -> logits float32 [1, vocab] of
    the next one.

    Args:
        loaded: a model in float32.
        context_tokens: most tokens of a conversation.
        linears: full names of the layers that an adapter is on; then `forward` takes its
            vector, see `layout`.
        rank: of the adapter.

    Raises:
        ModelError: the model has no such form.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, loaded: LoadedModel, context_tokens: int, linears: Sequence[str] = (), rank: int = 0
    ) -> None:
        super().__init__()
        if found := problems(loaded.dims, context_tokens):
            raise ModelError("; ".join(found))
        dims = loaded.dims
        family = loaded.family
        self.dims = dims
        self.context_tokens = context_tokens
        self.rank = rank
        self.pairs = layout(dims, linears, rank)
        tables = family.positions(context_tokens, "cpu", torch.float32)
        turning = next((i for i in range(dims.layers) if dims.traits.rotated(i)), 0)
        for name, table in zip(("cos", "sin"), family.layer_position(turning, tables)):
            self.register_buffer(name, table.reshape(context_tokens, 1, dims.head_dim).contiguous())
        self.embedding = nn.Embedding.from_pretrained(
            family.embedding.weight.detach().float(), freeze=True
        )
        by_name = {pair.linear: pair for pair in self.pairs}
        self.blocks = nn.ModuleList(
            AnswerBlock(loaded, number, context_tokens, by_name, rank)
            for number in range(dims.layers)
        )
        self.norm = Norm(loaded.model.get_parameter("model.norm.weight"), dims.norm_eps)
        head = (
            self.embedding.weight.clone()
            if dims.tied
            else loaded.model.get_parameter("lm_head.weight")
        )
        self.head = linear(head)

    @property
    def adapter_size(self) -> int:
        """Elements of the adapter's vector; 0 if none goes in."""
        return size_of(self.pairs, self.rank)

    def forward(self, ids: Tensor, start: Tensor, *adapter: Tensor) -> Tensor:
        traits = self.dims.traits
        tokens = ids.shape[1]
        begin = start[0].item()
        torch._check(begin >= 0)  # pyright: ignore[reportOperatorIssue]
        torch._check(begin < self.context_tokens)
        position = self.cos.narrow(0, begin, tokens), self.sin.narrow(0, begin, tokens)  # type: ignore[arg-type]
        x = self.embedding(ids)
        x = x if traits.embedding_scale == 1.0 else x * traits.embedding_scale
        for block in self.blocks:
            x = block(x, position, begin, adapter)
        logits = self.head(self.norm(x[:, -1:]))[:, 0]
        return logits if traits.logit_scale == 1.0 else logits * traits.logit_scale
