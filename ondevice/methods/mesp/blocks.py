"""MeSP's step as functions of one block, whose frozen weights are inputs: the paper's own unit (section 4.2).

A host calls the same two functions once a layer, with that layer's weights and its range of the adapter; so one small
program serves every depth, and lowering takes seconds. The stages are those of the whole program (`torch.program`).
The head goes over `HEAD_ROWS` labelled positions and one tile of the vocabulary at a time: a host hands in labelled
positions alone, so that a row with one label costs one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ondevice.artifact.manifest import AdapterEntry, Counter, StateTensor, TensorPort, port
from ondevice.core.program import BuiltProgram, ProgramModule
from ondevice.methods.mesp.lora import FlatEntry, FlatLayout, initial_tensors, lora_parameters
from ondevice.methods.mesp.torch.kernels import GraphKernels
from ondevice.methods.mesp.torch.model import Blocks
from ondevice.methods.mesp.torch.program import MOMENTS, updated
from ondevice.methods.mesp.torch.stages import Block, Linear, Stages
from ondevice.methods.mesp.torch.weights import Dense, halves

if TYPE_CHECKING:
    import numpy as np

    from ondevice.core.config import ExportConfig
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel

STEP = "optimizer_step"
"""The optimizer's count of its own updates; eager sessions have it under the same name."""
HEAD_ROWS = 32
"""Labelled positions of a head tile at once: enough that reading the tile does not cost more than the product."""
LOWEST = -1e30
"""The largest logit of no tile yet."""
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


class BlockFunctions:
    """The settings of a block program, and the tensors it takes; `compare` reads it.

    Attributes:
        layout: of the flat vector; each layer is a range of `layer_size` elements.
        frozen: ports of a block's weights, in the order of the functions' arguments.
        tile_rows: rows of the head that a tile has.
    """

    def __init__(self, loaded: LoadedModel, config: MespConfig) -> None:
        self.loaded, self.config, self.dims = loaded, config, loaded.dims
        self.parameters_of_run = lora_parameters(loaded.dims, type(loaded.family), config)
        self.layout = FlatLayout.build(self.parameters_of_run)
        self.layer_size = self.layout.size // self.dims.layers
        self.entries = self.layout.of_layer(0)
        self.tile_rows = -(-self.dims.vocab // config.loss_tiles)
        self.frozen = tuple(_frozen_ports(loaded))
        self.head = frozen_port("model.embed_tokens.weight" if self.dims.tied else "lm_head.weight",
                                (self.tile_rows, self.dims.hidden))  # fmt: skip
        self.norm = frozen_port("model.norm.weight", (self.dims.hidden,))
        self.table = frozen_port("model.embed_tokens.weight", (self.dims.vocab, self.dims.hidden))

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimizer's vectors."""
        return MOMENTS if self.config.optimizer == "adamw" else ()

    def initial(self, seed: int) -> np.ndarray:
        """The adapter that a run starts from, float32 [layout.size]."""
        return self.layout.to_flat(initial_tensors(self.parameters_of_run, seed))

    def weights(self) -> dict[str, np.ndarray]:
        """The frozen weights by name, float32, in the order in which a step reads them."""
        named = dict(self.loaded.model.named_parameters())
        names = [self.table.name]
        for layer in range(self.dims.layers):
            names += [frozen.name.format(layer=layer) for frozen in self.frozen]
        names += [self.norm.name] + ([] if self.dims.tied else [self.head.name])
        return {name: named[name].detach().float().contiguous().numpy() for name in names}

    def block(self, adapter: Tensor, frozen: tuple[Tensor, ...]) -> Block:
        """The block's tensors, from a function's arguments."""
        given, linears = dict(zip((one.name for one in self.frozen), frozen, strict=True)), {}
        entries = {entry.parameters.target: entry for entry in self.entries}
        for target in self.loaded.family.linear_targets:
            name = linear_name(self.loaded, target)
            entry, a, b = entries.get(target), None, None
            if entry is not None:
                sizes = entry.parameters
                a = adapter[entry.a : entry.a + sizes.rank * sizes.inputs].view(sizes.rank, sizes.inputs)
                b = adapter[entry.b : entry.b + sizes.rank * sizes.outputs].view(sizes.rank, sizes.outputs)
            bias = given.get(f"{name}.bias")
            linears[target] = Linear(Dense(given[f"{name}.weight"]), bias, a, b, self.config.scale)
        first, second = (given[f"model.layers.{{layer}}.{norm}"] for norm in NORMS)
        return Block((first, second), linears)


def linear_name(loaded: LoadedModel, target: str) -> str:
    """A linear layer's full name, `{layer}` for its number."""
    return f"model.layers.{{layer}}.{loaded.family.linear_parents[target]}.{target}"


def frozen_port(name: str, shape: tuple[int, ...]) -> TensorPort:
    """An input that a host takes from the weights file."""
    return port(name, "frozen", shape)


def _frozen_ports(loaded: LoadedModel) -> list[TensorPort]:
    dims, family = loaded.dims, loaded.family
    ports = [frozen_port(f"model.layers.{{layer}}.{norm}", (dims.hidden,)) for norm in NORMS]
    for target in family.linear_targets:
        name = linear_name(loaded, target)
        inputs, outputs = dims.linear_shape(target)
        ports.append(frozen_port(f"{name}.weight", (outputs, inputs)))
        if dims.linear_bias(target):
            ports.append(frozen_port(f"{name}.bias", (outputs,)))
    return ports


class Embed(nn.Module):
    """int64 [rows, tokens] -> [N, D]."""

    def forward(self, ids_BT: Tensor, table_VD: Tensor) -> Tensor:
        return functional.embedding(ids_BT.reshape(-1), table_VD)


class _OneBlock(nn.Module):
    """A function of one block for rows of one length."""

    def __init__(self, functions: BlockFunctions, rows: int, length_tokens: int) -> None:
        super().__init__()
        self.functions, self.rows = functions, rows
        cos, sin = halves(functions.loaded.family.positions(length_tokens, "cpu", torch.float32))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("mask", torch.full((length_tokens, length_tokens), float("-inf")).triu(1))

    @property
    def blocks(self) -> Blocks:
        return Blocks(Stages(self.functions.dims, GraphKernels(self.mask)), None)  # type: ignore[arg-type]


class BlockForward(_OneBlock):
    """[N, D] -> [N, D]."""

    def forward(self, x: Tensor, adapter: Tensor, *frozen: Tensor) -> Tensor:
        block, position = self.functions.block(adapter, frozen), (self.cos, self.sin)
        return self.blocks.forward(block, x, position, self.rows)  # type: ignore[arg-type]


class BlockBackward(_OneBlock):
    """The block's input and its output's gradient -> the input's gradient, and the layer's range of the adapter and
    of the moments after the update."""

    def forward(self, x: Tensor, g: Tensor, step: Tensor, rate: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        functions, gradients = self.functions, {}
        count = 1 + len(functions.moments)
        vectors, frozen = tensors[:count], tensors[count:]
        block, position = functions.block(vectors[0], frozen), (self.cos, self.sin)

        def keep(target: str, ga: Tensor, gb: Tensor) -> None:
            gradients[target] = (ga, gb)

        # The stages write into g, and what comes in is the caller's.
        g = self.blocks.backward(block, x, g.clone(), position, self.rows, keep)  # type: ignore[arg-type]
        bounds = (0, functions.layer_size)
        return (g, *updated(functions.config, functions.entries, bounds, gradients, vectors, step, rate))


class _HeadTile(nn.Module):
    """A function of `HEAD_ROWS` hidden states [C, D] and a tile of the head, [S, D], which begins at row `first` of
    the head; its first `skip` rows were in the tile before."""

    def __init__(self, functions: BlockFunctions) -> None:
        super().__init__()
        self.eps, self.kernels = functions.dims.norm_eps, GraphKernels(torch.zeros(0))
        self.register_buffer("columns", torch.arange(functions.tile_rows))

    def logits(self, x: Tensor, norm: Tensor, tile: Tensor, skip: Tensor) -> Tensor:
        logits = functional.linear(self.kernels.rms_norm(x, norm, self.eps), tile)
        return torch.where((self.columns < skip)[None], LOWEST, logits)  # type: ignore[operator]

    def is_target(self, targets: Tensor, first: Tensor, skip: Tensor) -> Tensor:
        """bool [C, S]."""
        columns: Tensor = self.columns  # type: ignore[assignment]
        return ((columns + first)[None] == targets[:, None]) & (columns >= skip)[None]


class HeadSums(_HeadTile):
    """The largest logit, the sum of exponentials below it and the target's logit, float32 [C] each, over the tiles so
    far."""

    def forward(
        self, x: Tensor, targets: Tensor, first: Tensor, skip: Tensor,
        maximum: Tensor, total: Tensor, wanted: Tensor, norm: Tensor, tile: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        logits = self.logits(x, norm, tile, skip)
        larger = torch.maximum(maximum, logits.amax(-1))
        total = total * (maximum - larger).exp() + (logits - larger[:, None]).exp().sum(-1)
        here = torch.where(self.is_target(targets, first, skip), logits, 0.0).sum(-1)
        return larger, total, wanted + here


class HeadGradient(_HeadTile):
    """The gradient of x so far and this tile's: `scale` [C] times (softmax - one-hot) W, through the norm."""

    def forward(
        self, x: Tensor, targets: Tensor, first: Tensor, skip: Tensor,
        maximum: Tensor, total: Tensor, wanted: Tensor, scale: Tensor, gradient: Tensor, norm: Tensor, tile: Tensor,
    ) -> Tensor:  # fmt: skip
        p = (self.logits(x, norm, tile, skip) - (maximum + total.log())[:, None]).exp()
        p = (p - self.is_target(targets, first, skip).to(p.dtype)) * scale[:, None]
        gn = torch.mm(p, tile)
        # Linear in gn, so that each tile's part may go through the norm by itself.
        return gradient + self.kernels.rms_norm_backward(x, norm, self.eps, gn, torch.zeros_like(x))


class HeadLogits(_HeadTile):
    """Logits [1, S] of one position."""

    def forward(self, x: Tensor, norm: Tensor, tile: Tensor) -> Tensor:
        return functional.linear(self.kernels.rms_norm(x, norm, self.eps), tile)


def build(loaded: LoadedModel, config: MespConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """See `GraphProgram.build`; `<function>_<rows>x<tokens>` for each number of rows and length."""
    functions = BlockFunctions(loaded, config)
    dims, hidden_size = loaded.dims, loaded.dims.hidden
    ranges = [port(name, "state", (functions.layer_size,)) for name in ("adapter", *functions.moments)]
    scalars = port(STEP, "counter", (1,), "int64"), port("learning_rate", "learning_rate", (1,))
    longest, modules = max(export.lengths_tokens), []
    for length in export.lengths_tokens:
        writes = {1} if export.next_token and length == longest else set()
        for rows in sorted({export.batch_size, export.eval_batch_size} | writes):
            size = f"{rows}x{length}"
            ids = port("ids", "ids", (rows, length), "int64", "token id")
            hidden = port("hidden", "hidden", (rows * length, hidden_size))
            modules.append(ProgramModule(f"embed_{size}", Embed(), (ids, functions.table), (hidden,)))
            forward = BlockForward(functions, rows, length)
            inputs = (hidden, ranges[0], *functions.frozen)
            modules.append(ProgramModule(f"block_forward_{size}", forward, inputs, (hidden,)))
        size = f"{export.batch_size}x{length}"
        hidden = port("hidden", "hidden", (export.batch_size * length, hidden_size))
        gradient = port("gradient", "gradient", hidden.shape)
        backward = BlockBackward(functions, export.batch_size, length)
        inputs = (hidden, gradient, *scalars, *ranges, *functions.frozen)
        modules.append(ProgramModule(f"block_backward_{size}", backward, inputs, (gradient, *ranges)))
    modules += _head_modules(functions, export)
    vectors = [port(one.name, "state", (functions.layout.size,)) for one in ranges]
    return BuiltProgram(
        eager=functions,
        loaded=loaded,
        modules=tuple(modules),
        state=tuple(
            StateTensor(name=one.name, dtype=one.dtype, shape=one.shape, role="optimizer" if number else "adapter")
            for number, one in enumerate(vectors)
        ),
        counters=(Counter(name=STEP, counts="updates"),),
        layout=tuple(map(layout_entry, functions.layout.entries)),
        first={"adapter": functions.initial(seed)},
        rank=config.rank,
        alpha=config.alpha,
        kernels="portable",
        shape="blocks",
        layers=dims.layers,
        weights=functions.weights(),
    )  # fmt: skip


def _head_modules(functions: BlockFunctions, export: ExportConfig) -> list[ProgramModule]:
    rows, width = (HEAD_ROWS,), functions.dims.hidden
    hidden, gradient = port("hidden", "hidden", (*rows, width)), port("gradient", "gradient", (*rows, width))
    sums = tuple(port(name, "tile_sums", rows) for name in ("maximum", "total", "wanted"))
    places: tuple[Any, ...] = (
        port("targets", "targets", rows, "int64", "token id"),
        port("first", "tile_first", (1,), "int64"),
        port("skip", "tile_skip", (1,), "int64"),
    )
    weights = (functions.norm, functions.head)
    modules = [
        ProgramModule("head_sums", HeadSums(functions), (hidden, *places, *sums, *weights), sums),
        ProgramModule(
            "head_gradient",
            HeadGradient(functions),
            (hidden, *places, *sums, port("scale", "token_scale", rows), gradient, *weights),
            (gradient,),
        ),
    ]
    if export.next_token:
        one = port("hidden", "hidden", (1, width))
        logits = port("logits", "logits", (1, functions.tile_rows))
        modules.append(ProgramModule("head_logits", HeadLogits(functions), (one, *weights), (logits,)))
    return modules


def layout_entry(entry: FlatEntry) -> AdapterEntry:
    """Where a host finds one linear layer's A and B."""
    sizes = entry.parameters
    shape = {"rank": sizes.rank, "inputs": sizes.inputs, "outputs": sizes.outputs}
    return AdapterEntry(linear=sizes.name, layer=sizes.layer, target=sizes.target, offset=entry.b, a_offset=entry.a,
                        **shape)  # fmt: skip
