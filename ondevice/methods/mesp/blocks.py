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

from ondevice.core.manifest import AdapterEntry, Counter, StateTensor, port
from ondevice.core.program import LOWEST, BuiltProgram, LayerConstants, ProgramModule
from ondevice.core.session import OPTIMIZER_STEP
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.methods.mesp.block_modules import Embed, OneBlock
from ondevice.methods.mesp.cached import cached_modules
from ondevice.methods.mesp.frozen import arrays
from ondevice.methods.mesp.lora import FlatEntry
from ondevice.methods.mesp.memory import HEAD_ROWS
from ondevice.methods.mesp.torch.kernels import GraphKernels
from ondevice.nn.cross_entropy import exp_sums, label_logits, logits_gradient

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel


class BlockForward(OneBlock):
    """[N, D] -> [N, D]."""

    def forward(self, x: Tensor, adapter: Tensor, *frozen: Tensor) -> Tensor:
        block = self.block(adapter, frozen)
        position = (self.cos, self.sin)
        return self.blocks.forward(block, x, position, self.rows)  # type: ignore[arg-type]


class BlockBackward(OneBlock):
    """The block's input and its output's gradient -> the input's gradient, and the layer's range of
    the adapter and of the moments after the update."""

    def forward(
        self, x: Tensor, g: Tensor, step: Tensor, rate: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        functions = self.functions
        gradients = {}
        count = 1 + len(functions.moments)
        vectors = tensors[:count]
        frozen = tensors[count:]
        block = self.block(vectors[0], frozen)
        position = (self.cos, self.sin)

        def keep(target: str, ga: Tensor, gb: Tensor) -> None:
            gradients[target] = (ga, gb)

        # The stages write into g, and what comes in is the caller's.
        g = self.blocks.backward(block, x, g.clone(), position, self.rows, keep)  # type: ignore[arg-type]
        return g, *functions.updated(gradients, vectors, step, rate)


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

    def logits(self, x: Tensor, norm: Tensor, tile: Tensor, skip: Tensor) -> Tensor:
        logits = functional.linear(self.kernels.rms_norm(x, norm, self.eps), tile)
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
        logits = self.logits(x, norm, self.tile(parts), skip)
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
        logits = self.logits(x, norm, tile, skip)
        local = self.local(targets, first, skip)
        gn = torch.mm(logits_gradient(logits, local, maximum + total.log(), scale), tile)
        # Linear in gn, so that each tile's part may go through the norm by itself.
        return gradient + self.kernels.rms_norm_backward(x, norm, self.eps, gn, torch.zeros_like(x))


class HeadLogits(_HeadTile):
    """Logits [1, S] of one position."""

    def forward(self, x: Tensor, norm: Tensor, *parts: Tensor) -> Tensor:
        return functional.linear(self.kernels.rms_norm(x, norm, self.eps), self.tile(parts))


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
    inside = bool(functions.markers)
    kinds = functions.kinds(longest)
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
            inputs = (hidden, ranges[0], *functions.frozen)
            for end, layer in layers:
                forward = BlockForward(functions, rows, length, layer)
                modules.append(
                    ProgramModule(f"block_forward_{size}{end}", forward, inputs, (hidden,), inside)
                )
        size = f"{export.batch_size}x{length}"
        hidden = port("hidden", "hidden", (export.batch_size * length, hidden_size))
        gradient = port("gradient", "gradient", hidden.shape)
        inputs = (hidden, gradient, *scalars, *ranges, *functions.frozen)
        for end, layer in layers:
            backward = BlockBackward(functions, export.batch_size, length, layer)
            modules.append(
                ProgramModule(
                    f"block_backward_{size}{end}", backward, inputs, (gradient, *ranges), inside
                )
            )
    modules += _head_modules(functions, export)
    if export.shared_context:
        modules += cached_modules(functions, ranges[0], export.shared_context)
    vectors = [port(one.name, "state", (functions.layout.size,)) for one in ranges]
    weights = functions.weights()
    constants = [
        {name: weights.pop(name.format(layer=layer)) for name in functions.markers}
        for layer in range(dims.layers)
    ]
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
        constants_of_layers=LayerConstants(arrays(functions.markers), constants) if inside else None,
    )  # fmt: skip


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
    return AdapterEntry(linear=sizes.name, layer=sizes.layer, target=sizes.target, offset=entry.b, a_offset=entry.a,
                        **shape)  # fmt: skip
