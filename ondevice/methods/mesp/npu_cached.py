"""Reading a prompt in blocks on an NPU: a function of each layer takes some tokens, and the keys and values of those
before.

There is no function of one token, which would hold the layer's weights once more: an answer's tokens go through the
same one, filled up. What depends on the place in the text, rotations and what is not yet read, is computed on the CPU
and goes in, for a compiled part has constants alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ondevice.core.manifest import port
from ondevice.core.program import NpuPart, ProgramModule
from ondevice.methods.mesp.cached import PREFILL_TOKENS, attend_cached, cache_ports
from ondevice.methods.mesp.npu import LARGEST, MASKED, NpuKernels, _Body, _Finished, largest
from ondevice.methods.mesp.torch.stages import Stages
from ondevice.methods.mesp.torch.weights import halves

if TYPE_CHECKING:
    from ondevice.core.manifest import TensorPort
    from ondevice.methods.mesp.block_functions import BlockFunctions

PREFILL = "block_prefill"


class PrefillBody(_Body):
    """New tokens [T, D], cos and sin [1, T, 1, h / 2] of their places, what of the cache is unread [1, 1, C], keys
    [K, h, C] and values [K, C, h] -> what the block adds to the tokens, their keys [K, h, T] and values [K, T, h]."""

    causal: Tensor

    def __init__(self, functions: BlockFunctions, layer: int, tokens: int, context: int) -> None:
        super().__init__(functions, layer, 1, tokens)
        self.cos = self.sin = self.mask = None  # type: ignore[assignment] - of the functions that see a whole row
        self.tokens, self.context, dims = tokens, context, functions.dims
        causal = torch.full((tokens, tokens), MASKED).triu(1)
        self.register_buffer("causal", causal.repeat(dims.heads // dims.kv_heads, 1)[None])

    def example_inputs(self, gradients: int = 0) -> tuple[Tensor, ...]:
        """Zeros of the shapes that `forward` takes."""
        dims, tokens = self.functions.dims, self.tokens
        shapes = [
            (tokens, dims.hidden),
            *[(1, tokens, 1, dims.head_dim // 2)] * 2,
            (1, 1, self.context),
        ]
        shapes += [
            (dims.kv_heads, dims.head_dim, self.context),
            (dims.kv_heads, self.context, dims.head_dim),
        ]
        for entry in self.functions.entries:
            sizes = entry.parameters
            shapes += [(sizes.rank, sizes.inputs), (sizes.rank, sizes.outputs)]
        return tuple(torch.zeros(shape) for shape in shapes)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        unread: Tensor,
        keys: Tensor,
        values: Tensor,
        *adapter: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims, block, s = self.functions.dims, self.block(adapter), self.stages()
        q, k, v = s.project(block, s.norm(block, x), 1)
        q, k = s.rope(block, q, k, (cos, sin))
        new = k[0].permute(1, 2, 0), v[0].permute(1, 0, 2)
        o = attend_cached(dims, q, (keys, values), new, unread, self.causal, contiguous=False)
        attended = s.linear(block, "o_proj", o)
        gate, up = s.gate_up(block, s.mlp_norm(block, x + attended))
        return attended + s.linear(block, "down_proj", s.act(gate, up)), *new

    def stages(self) -> Stages:
        """Return them with kernels whose mask is not used: attention here has its own."""
        return Stages(self.functions.dims, NpuKernels(self.causal, self.ones))


class NpuPrefill(_Finished):
    """Hidden states [T, D] behind `start` tokens -> [T, D], infinite where float16 was too small, keys and values."""

    cos: Tensor
    sin: Tensor
    places: Tensor
    news: Tensor

    def __init__(
        self, functions: BlockFunctions, body: nn.Module, tokens: int, context: int
    ) -> None:
        super().__init__(functions, body)
        # Tokens that fill a call up may stand behind the context.
        cos, sin = halves(functions.loaded.family.positions(context + tokens, "cpu", torch.float32))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("places", torch.arange(context))
        self.register_buffer("news", torch.arange(tokens))

    def forward(
        self, x: Tensor, start: Tensor, keys: Tensor, values: Tensor, adapter: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        at = start + self.news
        position = torch.index_select(self.cos, 1, at), torch.index_select(self.sin, 1, at)
        unread = torch.where(self.places < start, 0.0, MASKED).view(1, 1, -1)
        change, *new = self.body(x, *position, unread, keys, values, *self.matrices(adapter))
        return (
            x + torch.where(largest(x, change, *new) < LARGEST, change, float("inf")),
            new[0],
            new[1],
        )


def prefill_part(
    functions: BlockFunctions, adapter: TensorPort, layer: int, context: int
) -> NpuPart:
    """Return `block_prefill` of a layer, with the ports that it has on a CPU but for the weights."""
    dims, tokens = functions.dims, min(PREFILL_TOKENS, context)
    hidden = port("hidden", "hidden", (tokens, dims.hidden))
    start = port("start", "position", (1,), "int64", "tokens")
    inputs = (hidden, start, *cache_ports(dims, context), adapter)
    outputs = (hidden, *cache_ports(dims, tokens))
    body = PrefillBody(functions, layer, tokens, context)
    return NpuPart(PREFILL, body, body.example_inputs(), lambda name, delegate: ProgramModule(
        name, NpuPrefill(functions, delegate, tokens, context), inputs, outputs, per_layer=True))  # fmt: skip
