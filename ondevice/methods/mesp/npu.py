"""MeSP's functions of one block for an NPU that computes in float16: frozen weights are constants
of the compiled part, and A and B go in.

Compiled are a block's forward pass and its whole backward pass, recomputation included. What
float16 cannot hold stays on the CPU in float32: the residual stream between blocks, embedding, head
and loss (`blocks`), and the update. The gradient of the loss is multiplied by a loss scale, as
float16's smallest number is 6e-8; the backward pass is linear in it, so the update divides by it
again.

A prompt is read in blocks of tokens, by a function that takes the keys and values of those before.
No function takes one token, which would store the layer's weights once more: a call with few tokens
is filled up. The CPU computes what depends on the position, as a compiled part has only constants.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ondevice.core.manifest import port
from ondevice.core.program import (
    FUSED,
    Agreement,
    BuiltProgram,
    GraphProgram,
    NpuPart,
    ProgramModule,
)
from ondevice.core.session import OPTIMIZER_STEP
from ondevice.core.traits import beyond_llama
from ondevice.methods.mesp import agreement, blocks, program
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.methods.mesp.cached import PREFILL_TOKENS, attend_cached, cache_ports
from ondevice.methods.mesp.npu_kernels import NpuKernels
from ondevice.methods.mesp.torch.block import Block, Linear
from ondevice.methods.mesp.torch.kernels import Dense, Scores
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.methods.mesp.torch.weights import factor, halves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import TensorPort
    from ondevice.core.program import Batch
    from ondevice.core.session import ProgramSession
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel

LOSS_SCALE = 1024.0
"""Of the first step. On SmolLM2 hidden states' gradients are below 0.1 and those of A and B below
1.1, their median above 2e-4; so times this all are far from both ends of float16."""
LARGEST = 65504.0
"""Of float16. The NPU's simulator gives this number if a result is larger, and never an infinite
one."""
GRADIENT_LIMIT = LARGEST / 4
"""Gradients beyond it count as overflown: those inside the compiled part are not seen, and may be
larger than what goes in and comes out."""
MASKED = -1e4
"""Added to the scores of tokens to come; float16 has no -1e30."""
LAYERS = "model.layers."
"""Weights that are in the compiled parts."""
PREFILL = "block_prefill"
IN_NPU = (
    "norms", "norm_offset", "activation", "rotary", "fused", "rotary_width", "windows",
    "score_scale", "embedding_scale",
)  # fmt: skip
"""Traits of a block with which functions in QNN's simulator were held against float32."""


class _Stages(Stages):
    """Stages of the graph of all layers: a layer's window is in its mask, which is a constant."""

    def scores(self, block: Block, length_tokens: int) -> Scores:
        return replace(super().scores(block, length_tokens), window=0)


class _Body(nn.Module):
    """The compiled part of one layer's function: hidden states and A, B of every adapter go in, in
    the order of `BlockFunctions.entries`.

    All layers have one graph, that of layer `like`, which rotates q and k if any does: one that does
    not turns them by an angle of 0.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor
    ones: Tensor
    head_ones: Tensor

    def __init__(
        self, functions: BlockFunctions, layer: int, rows: int, length_tokens: int
    ) -> None:
        super().__init__()
        self.functions = functions
        self.rows = rows
        family = functions.loaded.family
        dims = functions.dims
        traits = dims.traits
        self.like = next((i for i in range(dims.layers) if traits.rotated(i)), 0)
        tables = family.positions(length_tokens, "cpu", torch.float32)
        cos, sin = halves(family.layer_position(layer, tables))
        if not traits.rotated(layer):
            cos = torch.ones_like(cos)
            sin = torch.zeros_like(sin)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        unseen = torch.full((length_tokens, length_tokens), MASKED)
        mask = unseen.triu(1)
        if window := traits.window(layer):
            mask = mask + unseen.tril(-window)
        self.register_buffer("mask", mask)
        self.register_buffer("ones", torch.ones(dims.hidden))
        self.register_buffer("head_ones", torch.ones(dims.head_dim))
        for place, module in traits.norms_of(layer):
            norm: Any = family.layer(layer).get_submodule(module)
            self.register_buffer(f"norm_{place}", factor(dims, norm.weight.detach()))
        for target in family.linear_targets:
            linear: Any = family.linear(layer, target)
            self.register_buffer(f"{target}_weight", linear.weight.detach())
            self.register_buffer(
                f"{target}_bias", None if linear.bias is None else linear.bias.detach()
            )

    def example_inputs(self, gradients: int) -> tuple[Tensor, ...]:
        """Zeros: hidden states, as many as there are `gradients` of them, and A, B."""
        count = self.rows * self.mask.shape[0]
        tensors = [torch.zeros(count, self.functions.dims.hidden) for _ in range(1 + gradients)]
        for entry in self.functions.entries():
            sizes = entry.parameters
            tensors += [
                torch.zeros(sizes.rank, sizes.inputs),
                torch.zeros(sizes.rank, sizes.outputs),
            ]
        return tuple(tensors)

    def stages(self) -> Stages:
        return _Stages(self.functions.dims, NpuKernels(self.mask, self.ones, self.head_ones))

    @property
    def position(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin

    def block(self, tensors: tuple[Tensor, ...]) -> Block:
        functions = self.functions
        linears = {}
        pairs = dict(
            zip(
                (entry.parameters.target for entry in functions.entries()),
                zip(tensors[::2], tensors[1::2]),
                strict=True,
            )
        )
        for target in functions.loaded.family.linear_targets:
            a, b = pairs.get(target, (None, None))
            weight = getattr(self, f"{target}_weight")
            bias = getattr(self, f"{target}_bias")
            linears[target] = Linear(Dense(weight), bias, a, b, functions.config.scale)
        norms = functions.dims.traits.norms_of(self.like)
        return Block(
            {place: getattr(self, f"norm_{place}") for place, _ in norms}, linears, self.like
        )

    def change(self, block: Block, x: Tensor, o: Tensor) -> Tensor:
        """Return what the block adds to `x`, [N, D], with attention's output `o` [N, H h]."""
        s = self.stages()
        attended = s.normed(block, "after_attention", s.linear(block, "o_proj", o))
        gate, up = s.gate_up(block, s.mlp_norm(block, x + attended))
        y = s.linear(block, "down_proj", s.act(gate, up))
        return attended + s.normed(block, "after_mlp", y)


class ForwardBody(_Body):
    """[N, D] -> what the block adds to it, [N, D]: the sum is float32, on the CPU.

    Some of SmolLM2's hidden states are 23,700, where float16 has steps of 16.
    """

    def forward(self, x: Tensor, *adapter: Tensor) -> Tensor:
        block = self.block(adapter)
        s = self.stages()
        q, k, v = s.project(block, s.norm(block, x), self.rows)
        q, k = s.rope(block, q, k, self.position)
        return self.change(block, x, s.attend(block, q, k, v)[0])


class BackwardBody(_Body):
    """The block's input and its output's gradient, [N, D] each -> the input's gradient, and those
    of A and B."""

    def forward(self, x: Tensor, g: Tensor, *adapter: Tensor) -> tuple[Tensor, ...]:
        gradients: dict[str, tuple[Tensor, Tensor]] = {}

        def keep(target: str, ga: Tensor, gb: Tensor) -> None:
            gradients[target] = (ga, gb)

        g = Blocks(self.stages(), None).backward(
            self.block(adapter), x, g, self.position, self.rows, keep
        )
        listed = [
            gradient
            for entry in self.functions.entries()
            for gradient in gradients[entry.parameters.target]
        ]
        return (g, *listed)


def largest(*tensors: Tensor) -> Tensor:
    """Return the largest magnitude of all, [1]."""
    return torch.stack([tensor.abs().amax() for tensor in tensors]).amax().view(1)


class _Finished(nn.Module):
    """A function of one layer around its compiled part."""

    def __init__(self, functions: BlockFunctions, body: nn.Module) -> None:
        super().__init__()
        self.functions = functions
        self.body = body

    def matrices(self, adapter: Tensor) -> list[Tensor]:
        """Return A and B of every entry, from the layer's range of the adapter."""
        return [matrix for entry in self.functions.entries() for matrix in entry.pair(adapter)]


class NpuForward(_Finished):
    """[N, D] -> [N, D]; infinite if float16 was too small for a hidden state."""

    def forward(self, x: Tensor, adapter: Tensor) -> Tensor:
        (change,) = self.body(x, *self.matrices(adapter))
        return x + torch.where(largest(x, change) < LARGEST, change, float("inf"))


class NpuBackward(_Finished):
    """As `blocks.BlockBackward`, of a gradient that is `loss_scale` times too large; the results
    are not finite if float16 was too small for it."""

    def forward(
        self, x: Tensor, g: Tensor, step: Tensor, rate: Tensor, loss_scale: Tensor, *vectors: Tensor
    ) -> tuple[Tensor, ...]:
        functions = self.functions
        before = g
        (g, *listed) = self.body(x, g, *self.matrices(vectors[0]))
        unscaled = torch.where(
            largest(before, *listed) < GRADIENT_LIMIT, 1.0 / loss_scale, float("inf")
        )
        gradients = {
            entry.parameters.target: (ga * unscaled, gb * unscaled)
            for entry, ga, gb in zip(functions.entries(), listed[::2], listed[1::2], strict=True)
        }
        return g, *functions.updated(functions.gradient(gradients), vectors, step, rate)


class PrefillBody(_Body):
    """New tokens [T, D], cos and sin [1, T, 1, h / 2] of their places, what of the cache is unread
    [1, 1, C], keys [K, h, C] and values [K, C, h] -> what the block adds to the tokens, their keys
    [K, h, T] and values [K, T, h]."""

    causal: Tensor

    def __init__(self, functions: BlockFunctions, layer: int, tokens: int, context: int) -> None:
        super().__init__(functions, layer, 1, tokens)
        self.cos = self.sin = self.mask = None  # type: ignore[assignment] - of the functions that see a whole row
        self.tokens = tokens
        self.context = context
        dims = functions.dims
        causal = torch.full((tokens, tokens), MASKED).triu(1)
        self.register_buffer("causal", causal.repeat(dims.heads // dims.kv_heads, 1)[None])

    def example_inputs(self, gradients: int = 0) -> tuple[Tensor, ...]:
        """Zeros of the shapes that `forward` takes."""
        dims = self.functions.dims
        tokens = self.tokens
        shapes = [
            (tokens, dims.hidden),
            *[(1, tokens, 1, dims.head_dim // 2)] * 2,
            (1, 1, self.context),
        ]
        shapes += [
            (dims.kv_heads, dims.head_dim, self.context),
            (dims.kv_heads, self.context, dims.head_dim),
        ]
        for entry in self.functions.entries():
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
        dims = self.functions.dims
        block = self.block(adapter)
        s = self.stages()
        q, k, v = s.project(block, s.norm(block, x), 1)
        q, k = s.rope(block, q, k, (cos, sin))
        new = k[0].permute(1, 2, 0), v[0].permute(1, 0, 2)
        o = attend_cached(
            q, (keys, values), new, unread, self.causal, dims.head_dim**-0.5, contiguous=False
        )
        return self.change(block, x, o), *new

    def stages(self) -> Stages:
        """Return them with kernels whose mask is not used: attention here has its own."""
        return _Stages(self.functions.dims, NpuKernels(self.causal, self.ones, self.head_ones))


class NpuPrefill(_Finished):
    """Hidden states [T, D] behind `start` tokens -> [T, D], infinite if float16 was too small, keys
    and values."""

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
    """Return `block_prefill` of a layer, with the ports that it has on a CPU but for the
    weights."""
    dims = functions.dims
    tokens = min(PREFILL_TOKENS, context)
    hidden = port("hidden", "hidden", (tokens, dims.hidden))
    start = port("start", "position", (1,), "int64", "tokens")
    inputs = (hidden, start, *cache_ports(dims, context), adapter)
    outputs = (hidden, *cache_ports(dims, tokens))
    body = PrefillBody(functions, layer, tokens, context)
    return NpuPart(
        PREFILL,
        body,
        body.example_inputs(),
        lambda name, delegate: ProgramModule(
            name,
            NpuPrefill(functions, delegate, tokens, context),
            inputs,
            outputs,
            per_layer=True,
        ),
    )


def problems(config: MespConfig, export: ExportConfig, dims: ModelDims) -> list[str]:
    """Settings that a program does not have."""
    problems = program.problems(config, export, dims, IN_NPU, "a program of mesp for the NPU")
    if export.quantize != "none":
        problems.append(
            f"export.quantize is {export.quantize}: mesp on the NPU has float16 weights, none"
        )
    if export.shared_context and (beyond := beyond_llama(dims.traits)):
        problems.append(
            "export.context_tokens on the NPU is for blocks like Llama's; this model's have "
            f"{', '.join(beyond)}"
        )
    if export.next_token and export.batch_size != 1:
        problems.append(
            "next_token needs batch_size 1 on the NPU: more rows would store the blocks again"
        )
    return problems


def build(loaded: LoadedModel, config: MespConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """Embedding and head as on the CPU; `parts` are the functions of each layer.

    An evaluation has as many rows as a step: a forward pass for another number would store the
    blocks again.
    """
    (length,) = export.lengths_tokens
    rows = export.batch_size
    context = export.shared_context
    plain = blocks.build(loaded, config, export.model_copy(update={"eval_batch_size": rows}), seed)
    functions: BlockFunctions = plain.eager
    size = f"{rows}x{length}"
    hidden = port("hidden", "hidden", (rows * length, loaded.dims.hidden))
    gradient = port("gradient", "gradient", hidden.shape)
    ranges = [
        port(name, "state", (functions.layer_size,)) for name in ("adapter", *functions.moments)
    ]
    scalars = [
        port(OPTIMIZER_STEP, "counter", (1,), "int64"),
        port("learning_rate", "learning_rate", (1,)),
    ]
    scalars.append(port("loss_scale", "loss_scale", (1,)))

    def parts(layer: int) -> tuple[NpuPart, ...]:
        forward = ForwardBody(functions, layer, rows, length)
        backward = BackwardBody(functions, layer, rows, length)
        backward_inputs = (hidden, gradient, *scalars, *ranges)
        answers = (prefill_part(functions, ranges[0], layer, context),) if context else ()
        return (
            NpuPart(f"block_forward_{size}", forward, forward.example_inputs(0), lambda name, body: ProgramModule(
                name, NpuForward(functions, body), (hidden, ranges[0]), (hidden,), per_layer=True)),
            NpuPart(f"block_backward_{size}", backward, backward.example_inputs(1), lambda name, body: ProgramModule(
                name, NpuBackward(functions, body), backward_inputs, (gradient, *ranges), per_layer=True)),
            *answers,
        )  # fmt: skip

    def on_cpu(name: str) -> bool:
        """Blocks are compiled, so their functions in fused operators are left out; a row by itself,
        and one token by itself, have no function of a block here."""
        of_one_row = () if rows == 1 else (f"embed_1x{length}",)
        if name.startswith(("block_", FUSED)):
            return False
        return name not in ("embed_decode", *of_one_row)

    return replace(
        plain,
        modules=tuple(module for module in plain.modules if on_cpu(module.name)),
        kinds=(),  # one graph for all layers
        weights={
            name: value for name, value in plain.weights.items() if not name.startswith(LAYERS)
        },
        parts=parts,
        loss_scale=LOSS_SCALE,
        eval_batch_size=rows,
    )


def compare(
    session: ProgramSession, built: BuiltProgram, batches: Iterable[Batch], learning_rate: float
) -> Agreement:
    """As `agreement.compare`, against float32; the share is the least cosine of a tensor's
    gradient."""
    result = agreement.compare(session, built, batches, learning_rate)
    return replace(result, shares={"min_gradient_cosine": result.values["min_gradient_cosine"]})


QNN = GraphProgram(problems, build, compare)
