"""Functions of one block that answer: the keys and values of what was read are inputs, and only new
tokens pass.

`prefill` reads `PREFILL_TOKENS` tokens of a prompt at once, `decode` one. The host keeps the cache,
as it keeps weights and adapter, and writes the new columns and rows where they belong; so a
conversation can be any length up to the context, an adapter is changed by handing in another
vector, and the weights file is the training program's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.core.manifest import port
from ondevice.core.program import ProgramModule
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.methods.mesp.block_modules import Embed, OneBlock
from ondevice.methods.mesp.experts import routing_ports

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import TensorPort

PREFILL_TOKENS = 32


class BlockCached(OneBlock):
    """New tokens [T, D] behind `start` tokens that were read -> [T, D], and their keys and values.

    Keys are kept [kv_heads, head_dim, context] and values [kv_heads, context, head_dim], rotated
    already: as the two products of attention read them.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor
    news: Tensor
    causal: Tensor

    def __init__(self, functions: BlockFunctions, tokens: int, context: int) -> None:
        super().__init__(functions, 1, context)
        self.mask = None  # of the training functions, which see a whole row
        self.tokens = tokens
        self.register_buffer("places", torch.arange(context))
        self.register_buffer("news", torch.arange(tokens))
        self.register_buffer("causal", torch.full((tokens, tokens), float("-inf")).triu(1))

    def forward(
        self,
        x: Tensor,
        start: Tensor,
        keys: Tensor,
        values: Tensor,
        adapter: Tensor,
        *frozen: Tensor,
    ) -> tuple[Tensor, ...]:
        block = self.block(adapter, frozen)
        blocks = self.blocks
        stages = blocks.stages
        q, k, v = stages.project(block, stages.norm(block, x), 1)
        q, k = stages.rope(block, q, k, self.position(start + self.news))
        if self.tokens == 1:  # as they lie, and nothing is copied
            new = k.view(*k.shape[2:], 1), v.view(v.shape[2], 1, v.shape[3])
        else:
            new = k[0].permute(1, 2, 0).contiguous(), v[0].permute(1, 0, 2).contiguous()
        o = self.attend(q, (k, v), (keys, values), new, start)
        y = blocks._mlp(block, stages.out(block, x, o))
        mixed = () if block.routed is None else block.routed.taken()
        return y, *new, *mixed

    def position(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the tokens' places, int64 [T], as the stages take them."""
        return torch.index_select(self.cos, 1, at), torch.index_select(self.sin, 1, at)

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor],
        start: Tensor,
    ) -> Tensor:
        """Return the attention's output, [T, heads * head_dim]; `new` are the tokens' keys and values
        `kv` as the cache has them."""
        dims = self.functions.dims
        unread = torch.where(self.places < start, 0.0, float("-inf"))
        group = dims.heads // dims.kv_heads
        causal = self.causal[None].expand(group, -1, -1).reshape(group * self.tokens, self.tokens)
        return attend_cached(dims, q, cache, new, unread, causal)


def attend_cached(
    dims: ModelDims,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    unread: Tensor,
    causal: Tensor,
    contiguous: bool = True,
) -> Tensor:
    """Return the attention of new tokens to those before them and to each other, [T, heads *
    head_dim].

    Args:
        q: rotated queries, [1, T, heads, head_dim].
        cache: keys [kv_heads, head_dim, C] and values [kv_heads, C, head_dim]; `new` of the T
            tokens.
        unread: added to the scores of the cache, minus infinity where nothing was read yet.
        causal: added to the scores of the new tokens, [heads / kv_heads * T, T].
        contiguous: copy each side's probabilities, as the runtime's own products need it.
    """
    tokens = q.shape[1]
    context = cache[1].shape[1]
    group = dims.heads // dims.kv_heads
    q = q.view(tokens, dims.kv_heads, group, dims.head_dim).permute(1, 2, 0, 3)
    q = q.reshape(dims.kv_heads, group * tokens, dims.head_dim) * dims.head_dim**-0.5
    scores = torch.cat((torch.bmm(q, cache[0]) + unread, torch.bmm(q, new[0]) + causal), -1)
    p = torch.softmax(scores, -1)
    old = p[..., :context]
    young = p[..., context:]
    if contiguous:
        old = old.contiguous()
        young = young.contiguous()
    o = torch.bmm(old, cache[1]) + torch.bmm(young, new[1])
    o = o.view(dims.kv_heads, group, tokens, dims.head_dim).permute(2, 0, 1, 3)
    return o.reshape(tokens, dims.heads * dims.head_dim)


def cache_ports(dims: ModelDims, tokens: int) -> tuple[TensorPort, TensorPort]:
    """Describe the keys and values of so many tokens."""
    heads = dims.kv_heads
    width = dims.head_dim
    return (
        port("keys", "keys", (heads, width, tokens)),
        port("values", "values", (heads, tokens, width)),
    )


def cached_modules(
    functions: BlockFunctions, adapter: TensorPort, context: int
) -> list[ProgramModule]:
    """Return `embed_prefill`, `block_prefill`, `embed_decode` and `block_decode` for a context of
    so many tokens."""
    dims = functions.dims
    modules = []
    cache = cache_ports(dims, context)
    start = port("start", "position", (1,), "int64", "tokens")
    for name, tokens in (("prefill", min(PREFILL_TOKENS, context)), ("decode", 1)):
        ids = port("ids", "ids", (1, tokens), "int64", "token id")
        hidden = port("hidden", "hidden", (tokens, dims.hidden))
        modules.append(
            ProgramModule(f"embed_{name}", Embed(functions), (ids, *functions.table), (hidden,))
        )
        block = BlockCached(functions, tokens, context)
        inputs = (hidden, start, *cache, adapter, *functions.frozen())
        outputs = (hidden, *cache_ports(dims, tokens), *routing_ports(functions, tokens, 0))
        modules.append(ProgramModule(f"block_{name}", block, inputs, outputs))
    return modules
