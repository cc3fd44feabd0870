"""Bytes and work of an LSP-Offload step, from dimensions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import MemoryModel, Reduction, StepCost
from ondevice.methods.lsp.config import FOLDED
from ondevice.methods.lsp.sizes import KINDS, extra, projected, slides, wires
from ondevice.methods.step_model import (
    head_flops,
    mlp_again_flops,
    passes_bytes,
    recomputed_flops,
)
from ondevice.offload.config import ITEM_BYTES, RECORD_BYTES

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.lsp.config import LspConfig
    from ondevice.methods.lsp.sizes import Projected

QUANTISED_BYTES = {"int8": 1 + 4 / 64, "nf4": 0.5 + 4 / 64}
"""Bytes a parameter of a matrix: its code, and a float32 scale for 64 of them."""
PROJECTOR_BYTES = 12
"""Of a value other than zero: its position, int64, and itself, float32."""
FLAT_BYTES = 8
"""Its position among those of its layer, int64; the value in the compute dtype comes on top."""
LEARNING = 7
"""Arrays [m, s] in float32 that exist at once as projectors are learned."""
MOMENT_BYTES = {"float32": 8, "bfloat16": 4}
"""Of both moments of a number, by `moments`."""
GRADIENT_SLOTS = 2
FOLDING_BYTES = 16
"""Bytes a parameter as a change goes into the weights: float32, and the bits that round it."""


def memory(
    dims: ModelDims,
    config: LspConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part on the accelerator."""
    item = ITEM_BYTES[config.compute]
    tokens = batch_size * length_tokens
    sizes = wires(dims, config)
    shapes = sizes.shapes
    layer = dims.block_parameters
    table = dims.vocab * dims.hidden
    tile = -(-dims.vocab // config.loss_tiles)
    experts = sum(shape.each * shape.rows * shape.columns for shape in shapes if shape.each > 1)
    tables = sizes.tables
    there = sizes.every
    if not tables:  # they slide, a tile of the head and the batch's rows at a time
        there -= (2 - dims.tied) * table
    leaving = GRADIENT_SLOTS * sizes.widest + sum(shape.numel for shape in tables)
    parts = {
        "weights": int(dims.layers * _weights(dims, config, item)) if shapes else 0,
        "wires": there * item,
        "window": min(config.window, dims.layers) * layer * item if shapes else 0,
        "tables": len(tables) * table * item,
        "head": 2 * min(2, config.loss_tiles) * tile * dims.hidden * item,
        **_projectors(config, shapes, item),
        "gradients of experts": experts * item,
        "gradients on the way": (leaving + tokens * dims.hidden) * item,
        "bias check": _bias_check(config, shapes, layer, item),
        **passes_bytes(dims, config, config.activations, batch_size, length_tokens, tile),
    }
    return {part: size for part, size in parts.items() if size}


def _projectors(config: LspConfig, shapes: list[Projected], item: int) -> dict[str, int]:
    """Bytes of projectors as they are stored, and of those of a layer as they are multiplied.
    Followed ones are stored dense: their values, and these in the compute dtype."""
    if config.projector_values == "followed":
        return {"projectors": sum(shape.count * shape.dense for shape in shapes) * (4 + item)}
    values = sum(shape.sides * shape.count for shape in shapes)
    dense = (sum(s.each * s.dense for s in shapes if s.kind == kind) for kind in KINDS)
    return {
        "projectors": values
        * min(config.nonzeros, config.subspace)
        * (PROJECTOR_BYTES + FLAT_BYTES + item),
        "dense projectors": item * max(dense),
    }


def kept_bytes(dims: ModelDims, config: LspConfig) -> int:
    """Return the bytes that stay on the accelerator each time that all projectors are replaced:
    with quantised weights, which take no changes, the old projectors and their changes."""
    if config.weight_dtype not in QUANTISED_BYTES:
        return 0
    values = min(config.nonzeros, config.subspace) * PROJECTOR_BYTES
    layers = (shape for shape in projected(dims, config) if shape.kind == "layer")
    return sum(shape.count * (shape.sides * values + shape.numel * 4) for shape in layers)


def host_memory(
    dims: ModelDims,
    config: LspConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part in host memory: masters and moments of the changes and of the
    parameters that are trained as they are, and gradients on their way.

    `config.compute` says how large an activation is, not `activation_bytes`.
    """
    item = ITEM_BYTES[config.compute]
    sizes = wires(dims, config)
    tables = sizes.tables
    layers = dims.layers + len(tables)
    each = sizes.layer
    if config.updates_last:
        waiting = layers
    else:
        waiting = min(config.gradient_buffers, layers)
    own = (2 - dims.tied) * dims.vocab * dims.hidden * (not tables)
    moments = MOMENT_BYTES[config.moments]
    cold = config.disk_masters * config.disk_fraction * dims.layers * each
    staging = 3 * (moments * max(sizes.widest, own) + config.disk_masters * (4 + item) * each)
    inputs = dims.layers * batch_size * length_tokens * dims.hidden * item
    parts = {
        "masters and moments": int(
            sizes.every * (4 + moments * (1 - config.disk_fraction)) - 4 * cold
        ),
        "undo records": int(min(config.presumed, layers) * each * RECORD_BYTES[config.moments]),
        "disk staging": int(staging) * (config.disk_fraction > 0),
        "gradients": (waiting * sizes.widest + own) * item,
        "weights on the host": dims.layers * dims.block_parameters * item * slides(dims, config),
        "inputs on the host": inputs * (config.activations == "host"),
    }
    return {part: size for part, size in parts.items() if size}


def _weights(dims: ModelDims, config: LspConfig, item: int) -> float:
    """Bytes of a layer's weights on the accelerator; only matrices are quantised."""
    layer = dims.block_parameters
    if config.weight_dtype in QUANTISED_BYTES:
        matrices = dims.matrices_of_block
        return matrices * QUANTISED_BYTES[config.weight_dtype] + (layer - matrices) * item
    if config.weight_placement == "host":
        return 0
    return layer * (4 if config.weight_dtype == "float32" else item)


def _bias_check(config: LspConfig, shapes: list[Projected], layer: int, item: int) -> int:
    """The most that a check of one matrix takes: its gradient, and what fits projectors or what
    folds its change."""
    most = 0
    for shape in shapes:
        longest = max(shape.rows, shape.columns)
        size = max(shape.left, shape.right)
        learning = LEARNING * longest * size * 4
        folds = shape.kind != "layer" or config.weight_dtype not in QUANTISED_BYTES
        copy = layer * item * (shape.kind == "layer" and config.weight_placement == "host")
        folding = FOLDING_BYTES * min(shape.rows * shape.columns, FOLDED) + copy
        there = shape.kind == "head" and config.loss_tiles == 1
        gradient = shape.rows * shape.columns * item * (not there)
        most = max(most, gradient + max(learning, folding if folds else 0))
    return most


def _in_parts(dims: ModelDims, config: LspConfig, weight_bytes: int, runtime: str) -> int:
    """No bytes in addition to the parts: `memory` lists the weights by
    `config.weight_placement`."""
    return 0


def _notes(dims: ModelDims, config: LspConfig) -> list[str]:
    more = kept_bytes(dims, config)
    text = f"each time that all projectors are replaced, {more / (1 << 20):,.0f} MiB more stay on the accelerator"
    if more:
        return [text]
    return []


def _smaller_weights(config: LspConfig, batch_size: int) -> LspConfig | None:
    quantised = config.weight_dtype in QUANTISED_BYTES
    follows = config.projector_values == "followed"  # which a quantised base cannot
    if not config.project or quantised or follows or config.weight_placement == "host":
        return None
    return config.model_copy(update={"weight_dtype": "nf4"})


def _weights_on_the_host(config: LspConfig, batch_size: int) -> LspConfig | None:
    if not config.project or config.weight_placement == "host":
        return None
    return config.model_copy(update={"weight_placement": "host", "weight_dtype": "compute"})


MEMORY = MemoryModel(
    memory,
    host=host_memory,
    weights=_in_parts,
    notes=_notes,
    host_note="AdamW's moments are in host memory; the weights are where method.weight_placement says",
    host_hint="method.weight_placement: device, method.activations: device, a smaller method.subspace",
    reductions=(
        Reduction("method.weight_dtype: nf4", _smaller_weights),
        Reduction("method.weight_placement: host", _weights_on_the_host),
    ),
)


def step_cost(
    dims: ModelDims, config: LspConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    more = extra(dims, config, batch_size, length_tokens).flops
    more += mlp_again_flops(dims, config, batch_size, length_tokens)
    if config.loss_tiles > 1:
        more += head_flops(dims, batch_size, length_tokens)
    return StepCost(
        recomputed_flops(dims, batch_size, length_tokens) + more, 3 * weight_bytes, config.compute
    )
