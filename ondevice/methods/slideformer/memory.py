"""Bytes and work of a SlideFormer step, from dimensions only (section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import MemoryModel, Reduction, StepCost
from ondevice.methods.step_model import forward_flops, head_flops, passes_bytes
from ondevice.offload.config import ITEM_BYTES

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.slideformer.config import SlideformerConfig

STATE_BYTES = {"float32": 12.0, "bfloat16": 8.0, "int8": 6.0625}
"""Master and moments, bytes a parameter, by `moments`."""
GRADIENT_SLOTS = 2


def resident_parameters(dims: ModelDims, config: SlideformerConfig) -> int:
    """Return the parameters whose masters and moments are on the accelerator."""
    tables = config.keeps_tables * dims.vocab * dims.hidden * (2 - dims.tied)
    return min(config.kept_layers, dims.layers) * dims.block_parameters + tables


def _here_bytes(config: SlideformerConfig) -> float:
    """Bytes of a parameter on the accelerator; without the C++ update, with a bfloat16 copy."""
    copied = config.compute == "bfloat16" and config.optimizer == "torch"
    return STATE_BYTES[config.moments] + 2 * copied


def memory(
    dims: ModelDims,
    config: SlideformerConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part on the accelerator: the window of layers, the head, and one layer's
    activations."""
    item = ITEM_BYTES[config.compute]
    tile = -(-dims.vocab // config.loss_tiles)
    slots = min(config.slots, max(1, dims.layers - config.kept_layers)) + GRADIENT_SLOTS
    tables = 2 * min(2, config.loss_tiles)
    rows = tile
    if (
        config.keeps_tables
    ):  # the head is among the resident parts; gradients of what stays are whole
        tables = 2 - dims.tied
        rows = dims.vocab
    parts = {
        "window": slots * dims.block_parameters * item,
        "head": tables * rows * dims.hidden * item,
        "noise": 0,
        **passes_bytes(dims, config, config.activations, batch_size, length_tokens, tile),
        "resident states": int(_here_bytes(config) * resident_parameters(dims, config)),
    }
    return {part: size for part, size in parts.items() if size or part == "noise"}


def on_ranks(
    parts: dict[str, int], dims: ModelDims, config: SlideformerConfig, world: int
) -> dict[str, int]:
    """Return `parts` of `memory` for one of `world` ranks: resident units have all their weights
    there, and a shard of the other states."""
    if "resident states" not in parts:
        return parts
    weights = ITEM_BYTES[config.compute] * resident_parameters(dims, config)
    return {**parts, "resident states": weights + (parts["resident states"] - weights) // world}


def host_memory(
    dims: ModelDims,
    config: SlideformerConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part in host memory: masters and moments, gradients on their way, kept
    inputs.

    `config.compute` says how large an activation is, not `activation_bytes`.
    """
    item = ITEM_BYTES[config.compute]
    exact = config.clip == "global" and config.max_grad_norm is not None
    left = max(0, dims.layers - config.kept_layers)
    if exact:
        waiting = dims.layers
    else:
        waiting = min(config.buffers, left)
    table = dims.vocab * dims.hidden
    layers = dims.layers * dims.block_parameters
    resident = resident_parameters(dims, config)
    if config.keeps_tables:
        tables = 0
    elif dims.tied:
        tables = 1
    else:
        tables = 2
    on_disk = (
        config.disk_fraction * (STATE_BYTES[config.moments] - 4) * (dims.parameters - resident)
    )
    cold = config.disk_masters * config.disk_fraction * left * dims.block_parameters
    widest = max(table, layers // dims.layers)
    staging = 3 * (STATE_BYTES[config.moments] - 4) * widest
    staging += config.disk_masters * 3 * (4 + item) * (layers // dims.layers)
    inputs = dims.layers * batch_size * length_tokens * dims.hidden * item
    parts = {
        "masters and moments": int(
            STATE_BYTES[config.moments] * (dims.parameters - resident) - on_disk - 4 * cold
        ),
        "disk staging": int(staging) * (config.disk_fraction > 0),
        "gradients": (waiting * dims.block_parameters + tables * table) * item,
        "inputs on the host": {"host": inputs, "disk": 4 * inputs // dims.layers, "device": 0}[
            config.activations
        ],
    }
    return {part: size for part, size in parts.items() if size}


def _no_frozen_weights(
    dims: ModelDims, config: SlideformerConfig, weight_bytes: int, runtime: str
) -> int:
    """None: the window and the resident layers are parts of their own."""
    return 0


def _eight_bit_moments(config: SlideformerConfig, batch_size: int) -> SlideformerConfig | None:
    if config.moments == "int8":
        return None
    return config.model_copy(update={"moments": "int8"})


MEMORY = MemoryModel(
    memory,
    host=host_memory,
    ranked=on_ranks,
    weights=_no_frozen_weights,
    host_note="the model is in host memory; the accelerator holds a window of its layers",
    host_hint="method.moments: bfloat16 or int8, method.disk_fraction: 1",
    reductions=(Reduction("method.moments: int8", _eight_bit_moments),),
)


def step_cost(
    dims: ModelDims,
    config: SlideformerConfig,
    batch_size: int,
    length_tokens: int,
    weight_bytes: int,
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    # A layer's forward pass runs twice; the head's logits once, unless the vocabulary comes in
    # parts.
    forward = forward_flops(dims, batch_size, length_tokens)
    head = head_flops(dims, batch_size, length_tokens)
    heads = 3 * head * (1 if config.loss_tiles == 1 else 4 / 3)
    return StepCost(4 * forward + heads, 3 * weight_bytes, config.compute)
