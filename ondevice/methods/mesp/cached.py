"""Functions of one block that answer: the state that its mixer keeps is an input,
and only new tokens pass.

`prefill` reads `PREFILL_TOKENS` tokens of a prompt at once, `decode` one. The host keeps the cache,
as it keeps weights and adapter. It writes new columns of keys and new rows of values where they
belong; the states of a convolution and of a delta rule are replaced. So a conversation can be any
length up to the context, an adapter is changed by handing in another vector, and the weights file
is the training program's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.core.manifest import JOIN, LAYER_INPUT, port
from ondevice.core.program import ProgramModule
from ondevice.core.traits import CONVOLUTION, DELTA
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.methods.mesp.block_modules import BlockJoin, Embed, LayerInput, OneBlock, seen
from ondevice.methods.mesp.experts import join_ports, routing_ports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import TensorPort
    from ondevice.methods.mesp.torch.block import Block

PREFILL_TOKENS = 32


class BlockCached(OneBlock):
    """New tokens [T, D] behind `start` tokens that were read -> [T, D], and their state.

    Keys are kept [kv_heads, head_dim, context] and values [kv_heads, context, head_dim], rotated
    already: as the two products of attention read them. A block without keys of its own attends to
    another's, which has written those of the new tokens.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor
    news: Tensor
    causal: Tensor

    def __init__(
        self, functions: BlockFunctions, tokens: int, context: int, layer: int = 0
    ) -> None:
        super().__init__(functions, 1, context, layer)
        self.mask = None  # of the training functions, which see a whole row
        self.tokens = tokens
        window = functions.dims.traits.window(layer)
        self.window = window if window < context else 0
        self.register_buffer("places", torch.arange(context))
        self.register_buffer("news", torch.arange(tokens))
        self.register_buffer("causal", seen(tokens, self.window))

    def forward(self, x: Tensor, start: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        traits = self.functions.dims.traits
        fields: dict[str, Any] = {}
        if traits.layer_input:
            fields["layer_input"] = tensors[0]
            tensors = tensors[1:]
        keys, values, adapter, *frozen = tensors
        block = replace(self.block(adapter, tuple(frozen)), **fields)
        n = self.blocks.stages.norm(block, x)
        return self.end(block, x, *self.attended(block, n, (keys, values), start))

    def end(self, block: Block, x: Tensor, o: Tensor, *new: Tensor) -> tuple[Tensor, ...]:
        """Return the block's output from its mixer's, `new`, and the input of its experts."""
        stages = self.blocks.stages
        y = self.blocks._mlp(block, stages.out(block, x, o))
        mixed = () if block.routed is None else block.routed.taken()
        return stages.behind(block, y, block.layer_input), *new, *mixed

    def attended(
        self, block: Block, n: Tensor, cache: tuple[Tensor, Tensor], start: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the attention's output, [T, heads * head_dim], and the new keys and values if the
        block has its own."""
        stages = self.blocks.stages
        q, k, v, gate = stages.project_gated(block, n, 1)
        q, k = stages.rope(block, q, k, self.position(start + self.news))
        new: tuple[Tensor, ...] = ()
        if k is None or v is None:
            o = self.attend_written(q, cache, start)
        elif self.tokens == 1:  # as they lie, and nothing is copied
            new = k.view(*k.shape[2:], 1), v.view(v.shape[2], 1, v.shape[3])
            o = self.attend(q, (k, v), cache, new, start)
        else:
            new = k[0].permute(1, 2, 0).contiguous(), v[0].permute(1, 0, 2).contiguous()
            o = self.attend(q, (k, v), cache, new, start)
        return o if gate is None else o * torch.sigmoid(gate), *new

    def position(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the tokens' places, int64 [T], as the stages take them."""
        return torch.index_select(self.cos, 1, at), torch.index_select(self.sin, 1, at)

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        dims = self.functions.dims
        return dims.traits.score_scale or dims.head_width(self.layer) ** -0.5

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
        unread = torch.where(self.places < start, 0.0, float("-inf"))
        if self.window:
            unread = self.by_head(q, cache, unread + self.beyond(start))
        return attend_cached(q, cache, new, unread, self.by_head(q, cache, self.causal), self.scale)

    def attend_written(self, q: Tensor, cache: tuple[Tensor, Tensor], start: Tensor) -> Tensor:
        """Return what `attend` does, of a cache in which the new tokens are written."""
        hidden = self.places > (start + self.news)[:, None]
        mask = torch.where(hidden, float("-inf"), 0.0)
        if self.window:
            mask = mask + self.beyond(start)
        q, of_tokens = rows_of_heads(q, cache[1].shape[0], self.scale)
        p = torch.softmax(torch.bmm(q, cache[0]) + self.by_head(q, cache, mask), -1)
        return of_tokens(torch.bmm(p, cache[1]))

    def beyond(self, start: Tensor) -> Tensor:
        """Return the mask [T, context] of the tokens before each window."""
        first = (start + self.news - (self.window - 1))[:, None]
        return torch.where(self.places < first, float("-inf"), 0.0)

    def by_head(self, q: Tensor, cache: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Repeat a mask of the tokens, [T, ...], for the heads of queries that share keys."""
        group = self.functions.dims.heads // cache[1].shape[0]
        return mask[None].expand(group, -1, -1).reshape(group * self.tokens, -1)


class BlockRecurrent(BlockCached):
    """What `BlockCached` computes, of a short convolution or a gated delta rule: `count`, int64 [1],
    says how many of the tokens are real, and only these change the state."""

    past: Tensor

    def __init__(
        self, functions: BlockFunctions, tokens: int, context: int, layer: int = 0
    ) -> None:
        super().__init__(functions, tokens, context, layer)
        self.register_buffer("past", torch.arange(kept_tokens(functions.dims)))

    def forward(self, x: Tensor, count: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        stages = self.blocks.stages
        kept = len(state_shapes(self.functions.dims, self.layer))
        adapter, *frozen = tensors[kept:]
        block = self.block(adapter, tuple(frozen))
        n = stages.norm(block, x)
        last = count + self.past
        if self.functions.dims.traits.mixer(self.layer) == CONVOLUTION:
            return self.end(block, x, *stages.convolve_behind(block, n, tensors[0], last))
        real = torch.where(self.news < count, 1.0, 0.0)
        mixed = stages.correct_behind(block, n, tensors[0], tensors[1], last, real)
        return self.end(block, x, *mixed)


def rows_of_heads(q: Tensor, key_heads: int, scale: float) -> tuple[Tensor, Any]:
    """Return queries [1, T, heads, h] as [key_heads, heads / key_heads * T, h], times the scale, and
    the function that gives what has this form back as [T, heads * h]."""
    _, tokens, heads, width = q.shape
    group = heads // key_heads

    def of_tokens(o: Tensor) -> Tensor:
        o = o.view(key_heads, group, tokens, width).permute(2, 0, 1, 3)
        return o.reshape(tokens, heads * width)

    q = q.view(tokens, key_heads, group, width).permute(1, 2, 0, 3)
    return q.reshape(key_heads, group * tokens, width) * scale, of_tokens


def attend_cached(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    unread: Tensor,
    causal: Tensor,
    scale: float,
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
    context = cache[1].shape[1]
    q, of_tokens = rows_of_heads(q, cache[1].shape[0], scale)
    scores = torch.cat((torch.bmm(q, cache[0]) + unread, torch.bmm(q, new[0]) + causal), -1)
    p = torch.softmax(scores, -1)
    old = p[..., :context]
    young = p[..., context:]
    if contiguous:
        old = old.contiguous()
        young = young.contiguous()
    return of_tokens(torch.bmm(old, cache[1]) + torch.bmm(young, new[1]))


def kept_tokens(dims: ModelDims) -> int:
    """Return how many tokens before the next one a convolution's state has."""
    return max(1, dims.traits.taps - 1)


def state_shapes(dims: ModelDims, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a mixer without attention keeps, by role; {} of attention."""
    traits = dims.traits
    kept = kept_tokens(dims)
    if traits.mixer(layer) == CONVOLUTION:
        return {"conv_state": (kept, dims.hidden)}
    if traits.mixer(layer) == DELTA:
        _, heads, key_width, width = traits.delta
        own = (heads, key_width, width)
        return {"conv_state": (kept, traits.delta_channels), "delta_state": own}
    return {}


def cache_ports(dims: ModelDims, tokens: int, layer: int = 0) -> tuple[TensorPort, ...]:
    """Describe the keys and values of so many tokens that a layer attends to, or the states of its
    other mixer. Those of another layer have its number in their names."""
    if shapes := state_shapes(dims, layer):
        return tuple(port(role, role, shape) for role, shape in shapes.items())
    traits = dims.traits
    end = "" if traits.has_keys(layer) else f" {traits.key_layer(layer)}"
    heads = dims.key_heads(layer)
    width = dims.head_width(layer)
    return (
        port(f"keys{end}", "keys", (heads, width, tokens)),
        port(f"values{end}", "values", (heads, tokens, width)),
    )


def cached_module(
    cached: type[BlockCached],
    functions: BlockFunctions,
    name: str,
    tokens: int,
    context: int,
    adapter: TensorPort,
    layer: int,
) -> ProgramModule:
    """Return a function of a layer's block that reads so many tokens, with its ports."""
    dims = functions.dims
    traits = dims.traits
    hidden = port("hidden", "hidden", (tokens, dims.hidden))
    count = port("count", "length", (1,), "int64", "tokens")
    if traits.attends(layer):
        count = port("start", "position", (1,), "int64", "tokens")
    inputs = [hidden, count]
    if traits.layer_input:
        inputs.append(port("layer_input", "layer_input", (tokens, traits.layer_input)))
    inputs += [*cache_ports(dims, context, layer), adapter, *functions.frozen(layer)]
    kept = cache_ports(dims, tokens, layer) if traits.has_keys(layer) else ()
    outputs = (hidden, *kept, *routing_ports(functions, tokens, layer))
    block = cached(functions, tokens, context, layer)
    return ProgramModule(name, block, tuple(inputs), outputs)


def cached_modules(
    functions: BlockFunctions, adapter: TensorPort, context: int, layers: Sequence[tuple[str, int]]
) -> list[ProgramModule]:
    """Return `embed_prefill`, `block_prefill`, `embed_decode` and `block_decode` for a context of
    so many tokens; `layers` has the end of the name of each kind of block, and a layer of it."""
    dims = functions.dims
    modules = []
    for name, tokens in (("prefill", min(PREFILL_TOKENS, context)), ("decode", 1)):
        ids = port("ids", "ids", (1, tokens), "int64", "token id")
        hidden = port("hidden", "hidden", (tokens, dims.hidden))
        modules.append(
            ProgramModule(f"embed_{name}", Embed(functions), (ids, *functions.table), (hidden,))
        )
        if functions.layer_input:
            own = port("layer_input", "layer_input", (tokens, dims.traits.layer_input))
            given = (ids, hidden, *functions.layer_input)
            modules.append(
                ProgramModule(f"{LAYER_INPUT}{name}", LayerInput(functions), given, (own,))
            )
        for end, layer in layers:
            attends = dims.traits.attends(layer)
            kind = BlockCached if attends else BlockRecurrent
            full = f"block_{name}{end}"
            modules.append(cached_module(kind, functions, full, tokens, context, adapter, layer))
            if functions.beside:
                given = (*join_ports(functions, tokens), adapter, *functions.frozen(layer))
                join = BlockJoin(functions, 1, tokens, layer)
                modules.append(ProgramModule(f"{JOIN}{name}{end}", join, given, (hidden,)))
    return modules
