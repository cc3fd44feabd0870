"""MeSP's step as functions of one block, whose frozen weights are inputs: the paper's own unit
(section 4.2).

A host calls the same two functions once a layer, with that layer's weights and its range of the
adapter; so one small program serves every depth, and lowering takes seconds. The stages are the
eager session's (`torch.stages`). The head goes over `HEAD_ROWS` labelled positions and one tile of
the vocabulary at a time: a host passes only labelled positions, so that a row with one label costs
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ondevice.core.manifest import JOIN, LAYER_INPUT, AdapterEntry, Counter, StateTensor, port
from ondevice.core.program import LOWEST, BuiltProgram, LayerConstants, ProgramModule
from ondevice.core.session import OPTIMIZER_STEP
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.methods.mesp.block_modules import (
    BlockBackward,
    BlockForward,
    BlockJoin,
    BlockJoinBackward,
    Embed,
    LayerInput,
)
from ondevice.methods.mesp.cached import cached_modules
from ondevice.methods.mesp.experts import (
    expert_modules,
    join_ports,
    routing_gradients,
    routing_ports,
)
from ondevice.methods.mesp.frozen import arrays
from ondevice.methods.mesp.lora import FlatEntry
from ondevice.methods.mesp.memory import HEAD_ROWS
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.nn.cross_entropy import cap_slope, exp_sums, label_logits, logits_gradient
from ondevice.runtime_ops.build import has_compiler

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import TensorPort
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel


class _HeadTile(nn.Module):
    """A function of `HEAD_ROWS` hidden states [C, D] and a tile of the head, [S, D], which begins
    at row `first` of the head; its first `skip` rows were in the tile before."""

    def __init__(self, functions: BlockFunctions) -> None:
        super().__init__()
        self.functions = functions
        self.eps = functions.dims.norm_eps
        self.kernels = GraphKernels(torch.zeros(0))
        self.register_buffer("columns", torch.arange(functions.tile_rows))

    def tile(self, parts: tuple[Tensor, ...]) -> Tensor:
        """float32 [S, D]."""
        given = dict(zip((one.name for one in self.functions.head), parts, strict=True))
        return self.functions.table_form.matrix(self.functions.head_name, given).dense()

    def logits(self, x: Tensor, norm: Tensor, tile: Tensor) -> Tensor:
        logits = functional.linear(self.kernels.rms_norm(x, norm, self.eps), tile)
        cap = self.functions.dims.traits.logit_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def left(self, logits: Tensor, skip: Tensor) -> Tensor:
        """Return the logits, without those of rows that were in the tile before."""
        return torch.where((self.columns < skip)[None], LOWEST, logits)  # type: ignore[operator]

    def local(self, targets: Tensor, first: Tensor, skip: Tensor) -> Tensor:
        """Return each label's row of this tile, int64 [C]; -1 if it has none or was in the tile
        before."""
        local = targets - first
        return torch.where(local < skip, -1, local)


class HeadSums(_HeadTile):
    """The largest logit, the sum of exponentials below it and the target's logit, float32 [C] each,
    over the tiles so far."""

    def forward(
        self, x: Tensor, targets: Tensor, first: Tensor, skip: Tensor,
        maximum: Tensor, total: Tensor, wanted: Tensor, norm: Tensor, *parts: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        logits = self.left(self.logits(x, norm, self.tile(parts)), skip)
        label = label_logits(logits, self.local(targets, first, skip))
        return *exp_sums((maximum, total), logits), wanted + label


class HeadGradient(_HeadTile):
    """The gradient of x so far and this tile's: `scale` [C] times (softmax - one-hot) W, through
    the norm."""

    def forward(
        self, x: Tensor, targets: Tensor, first: Tensor, skip: Tensor,
        maximum: Tensor, total: Tensor, wanted: Tensor, scale: Tensor, gradient: Tensor, norm: Tensor, *parts: Tensor,
    ) -> Tensor:  # fmt: skip
        tile = self.tile(parts)
        logits = self.logits(x, norm, tile)
        slope = cap_slope(logits, self.functions.dims.traits.logit_cap)
        local = self.local(targets, first, skip)
        g = logits_gradient(self.left(logits, skip), local, maximum + total.log(), scale)
        gn = torch.mm(g if slope is None else g * slope, tile)
        # Linear in gn, so that each tile's part may go through the norm by itself.
        return gradient + self.kernels.rms_norm_backward(x, norm, self.eps, gn, torch.zeros_like(x))


class HeadLogits(_HeadTile):
    """Logits [1, S] of one position."""

    def forward(self, x: Tensor, norm: Tensor, *parts: Tensor) -> Tensor:
        return self.logits(x, norm, self.tile(parts))


def build(loaded: LoadedModel, config: MespConfig, export: ExportConfig, seed: int) -> BuiltProgram:
    """See `GraphProgram.build`; `<function>_<rows>x<tokens>` for each number of rows and length,
    and `_<kind>` behind it for a block's functions of another kind than the first."""
    functions = BlockFunctions(loaded, config, export.quantize)
    dims = loaded.dims
    hidden_size = loaded.dims.hidden
    ranges = [
        port(name, "state", (functions.layer_size,)) for name in ("adapter", *functions.moments)
    ]
    scalars = (
        port(OPTIMIZER_STEP, "counter", (1,), "int64"),
        port("learning_rate", "learning_rate", (1,)),
    )
    longest = max(export.lengths_tokens)
    modules = []
    inside = functions.holds_matrices
    kinds = functions.kinds(max(longest, export.shared_context or 0))
    # Of each kind: the end of a function's name, and a layer.
    layers = [(f"_{kind}" if kind else "", kinds.index(kind)) for kind in range(max(kinds) + 1)]
    for length in export.lengths_tokens:
        writes = (
            {1} if (export.next_token or export.shared_context) and length == longest else set()
        )
        for rows in sorted({export.batch_size, export.eval_batch_size} | writes):
            size = f"{rows}x{length}"
            ids = port("ids", "ids", (rows, length), "int64", "token id")
            hidden = port("hidden", "hidden", (rows * length, hidden_size))
            modules.append(
                ProgramModule(f"embed_{size}", Embed(functions), (ids, *functions.table), (hidden,))
            )
            if functions.layer_input:
                given = (ids, hidden, *functions.layer_input)
                own = (layer_input_port(dims, rows * length),)
                modules.append(
                    ProgramModule(f"{LAYER_INPUT}{size}", LayerInput(functions), given, own)
                )
            for end, layer in layers:
                read, lent = shared_ports(dims, layer, rows, length, False)
                lent += routing_ports(functions, rows * length, layer)
                inputs = (hidden, *read, ranges[0], *functions.frozen(layer))
                forward = BlockForward(functions, rows, length, layer)
                modules.append(
                    ProgramModule(
                        f"block_forward_{size}{end}", forward, inputs, (hidden, *lent), inside
                    )
                )
                if functions.beside:
                    given = (*join_ports(functions, rows * length), *inputs[1 + len(read) :])
                    join = BlockJoin(functions, rows, length, layer)
                    name = f"{JOIN}{size}{end}"
                    modules.append(ProgramModule(name, join, given, (hidden,), inside))
        size = f"{export.batch_size}x{length}"
        hidden = port("hidden", "hidden", (export.batch_size * length, hidden_size))
        gradient = port("gradient", "gradient", hidden.shape)
        for end, layer in layers:
            if functions.beside:
                given = (gradient, *join_ports(functions, export.batch_size * length))
                given += (ranges[0], *functions.frozen(layer))
                join = BlockJoinBackward(functions, export.batch_size, length, layer)
                name = f"{JOIN}backward_{size}{end}"
                modules.append(ProgramModule(name, join, given, (gradient,), inside))
            read, sums = shared_ports(dims, layer, export.batch_size, length, True)
            read += routing_gradients(functions, export.batch_size * length, layer)
            inputs = (hidden, gradient, *read, *scalars, *ranges, *functions.frozen(layer))
            backward = BlockBackward(functions, export.batch_size, length, layer)
            modules.append(
                ProgramModule(
                    f"block_backward_{size}{end}",
                    backward,
                    inputs,
                    (gradient, *ranges, *sums),
                    inside,
                )
            )
    modules += expert_modules(functions, max(export.batch_size, export.eval_batch_size) * longest)
    modules += _head_modules(functions, export)
    if export.shared_context:
        modules += cached_modules(functions, ranges[0], export.shared_context, layers)
    vectors = [port(one.name, "state", (functions.layout.size,)) for one in ranges]
    weights = functions.weights()
    markers = [arrays(functions.markers(layer)) for _, layer in layers]
    constants = [
        {name: weights[name.format(layer=layer)] for name in markers[kinds[layer]]}
        for layer in range(dims.layers)
    ]
    used = set()
    if export.kernels == "auto" and has_compiler() and in_ops(dims):
        from ondevice.methods.mesp.fused import fused_modules  # registers the ops

        modules += fused_modules(
            BlockFunctions(loaded, config, export.quantize, fused=True), modules
        )
        used = {given.name for module in modules for given in module.inputs}
    for layer, held in enumerate(constants):
        for name in held.keys() - used:
            weights.pop(name.format(layer=layer))
    return BuiltProgram(
        eager=functions,
        loaded=loaded,
        modules=tuple(modules),
        state=tuple(
            StateTensor(name=one.name, dtype=one.dtype, shape=one.shape, role="optimizer" if number else "adapter")
            for number, one in enumerate(vectors)
        ),
        counters=(Counter(name=OPTIMIZER_STEP, counts="updates"),),
        layout=tuple(map(layout_entry, functions.layout.entries)),
        first={"adapter": functions.initial(seed)},
        rank=config.rank,
        alpha=config.alpha,
        shape="blocks",
        layers=dims.layers,
        kinds=kinds if max(kinds) else (),
        weights=weights,
        constants_of_layers=LayerConstants(markers, constants) if inside else None,
    )  # fmt: skip


def in_ops(dims: ModelDims) -> bool:
    """Return True if this project's ops know such blocks: they have no cap of logits, and know no
    keys of other blocks and no experts."""
    return not (dims.traits.hands_on or dims.traits.logit_cap or dims.experts)


def layer_input_port(dims: ModelDims, tokens: int) -> TensorPort:
    """Describe what a layer reads of its tokens."""
    return port("layer_input", "layer_input", (tokens, dims.traits.layer_input))


def shared_ports(
    dims: ModelDims, layer: int, rows: int, length_tokens: int, backward: bool
) -> tuple[list[TensorPort], list[TensorPort]]:
    """Return what a function of a block takes in addition to its input, and what it gives in
    addition to its output. Names of keys and values, and of sums of their gradients, have the number
    of the layer that computes them: a host keeps them by name within a step.
    """
    traits = dims.traits
    tokens = rows * length_tokens
    read = [layer_input_port(dims, tokens)] if traits.layer_input else []
    if traits.has_keys(layer) and not traits.lends_keys(layer):
        return read, []
    shape = (rows, length_tokens, dims.key_heads(layer), dims.head_width(layer))
    number = traits.key_layer(layer)
    keys = [port(f"{what} {number}", f"shared_{what}", shape) for what in ("keys", "values")]
    sums = [port(f"{what} {number}", f"{what}_gradient", shape) for what in ("keys", "values")]
    borrows = not traits.has_keys(layer)
    if borrows:
        read += keys
    if backward:
        return read + sums, sums if borrows else []
    return read, [] if borrows else keys


def _head_modules(functions: BlockFunctions, export: ExportConfig) -> list[ProgramModule]:
    rows = (HEAD_ROWS,)
    width = functions.dims.hidden
    hidden = port("hidden", "hidden", (*rows, width))
    gradient = port("gradient", "gradient", (*rows, width))
    sums = tuple(port(name, "tile_sums", rows) for name in ("maximum", "total", "wanted"))
    places: tuple[Any, ...] = (
        port("targets", "targets", rows, "int64", "token id"),
        port("first", "tile_first", (1,), "int64"),
        port("skip", "tile_skip", (1,), "int64"),
    )
    weights = (functions.norm, *functions.head)
    modules = [
        ProgramModule("head_sums", HeadSums(functions), (hidden, *places, *sums, *weights), sums),
        ProgramModule(
            "head_gradient",
            HeadGradient(functions),
            (hidden, *places, *sums, port("scale", "token_scale", rows), gradient, *weights),
            (gradient,),
        ),
    ]
    if export.next_token or export.shared_context:
        one = port("hidden", "hidden", (1, width))
        logits = port("logits", "logits", (1, functions.tile_rows))
        modules.append(
            ProgramModule("head_logits", HeadLogits(functions), (one, *weights), (logits,))
        )
    return modules


def layout_entry(entry: FlatEntry) -> AdapterEntry:
    """Say where a host finds one linear layer's A and B."""
    sizes = entry.parameters
    shape = {"rank": sizes.rank, "inputs": sizes.inputs, "outputs": sizes.outputs}
    target = sizes.target.rpartition(".")[2]
    return AdapterEntry(linear=sizes.name, layer=sizes.layer, target=target, offset=entry.b, a_offset=entry.a,
                        **shape)  # fmt: skip
