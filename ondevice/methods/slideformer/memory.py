"""Bytes and work of a SlideFormer step, from dimensions only (section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import MemoryModel, Reduction, StepCost
from ondevice.methods.step_model import (
    forward_flops,
    head_flops,
    mlp_again_flops,
    passes_bytes,
)
from ondevice.offload.config import ITEM_BYTES, RECORD_BYTES, copied_share

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.slideformer.config import SlideformerConfig

STATE_BYTES = {"float32": 12.0, "bfloat16": 8.0, "int8": 6.0625}
"""Master and moments, bytes a parameter, by `moments`."""
MASTER_BYTES = 4
MOMENTUM_SLOTS = 2
MOMENTUM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 0}
MUON_BYTES = {"float32": 8.0, "bfloat16": 6.0}
"""Master and momentum of a layer's matrix under Muon, likewise; int8 is refused."""
GRADIENT_SLOTS = 2


def hidden(dims: ModelDims, config: SlideformerConfig) -> int:
    """Return the parameters of a layer that Muon updates."""
    return dims.matrices_of_block * (config.optimizer == "muon")


def saved_bytes(dims: ModelDims, config: SlideformerConfig) -> float:
    """Return the bytes of states that Muon saves compared with AdamW."""
    if config.optimizer != "muon" or config.moments == "int8":
        return 0.0
    each = STATE_BYTES[config.moments] - MUON_BYTES[config.moments]
    return each * dims.layers * hidden(dims, config)


def resident_parameters(dims: ModelDims, config: SlideformerConfig) -> int:
    """Return the parameters whose masters and moments are on the accelerator."""
    tables = config.keeps_tables * dims.vocab * dims.hidden * (2 - dims.tied)
    return min(config.kept_layers, dims.layers) * dims.block_parameters + tables


def experts_share(dims: ModelDims, config: SlideformerConfig, tokens: int, world: int = 1) -> float:
    """Return the part of a mixture's experts that is expected to be copied in a pass of so many
    tokens."""
    if world > 1 or config.optimizer == "muon":
        return 1.0
    chosen = getattr(dims, "active_experts", 0)
    return copied_share(config.experts, dims.experts, chosen, tokens)


def absent_parameters(
    dims: ModelDims, config: SlideformerConfig, tokens: int, world: int = 1
) -> float:
    """Return the parameters of a layer that are not copied: experts without tokens."""
    share = experts_share(dims, config, tokens, world)
    if share == 1:
        return 0.0
    idle = 1 - getattr(dims, "active_experts", 0) / dims.experts  # for a single token
    return (1 - share) * (dims.matrices - dims.active_matrices) / idle / dims.layers


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
        "momentum": MOMENTUM_SLOTS * hidden(dims, config) * MOMENTUM_BYTES[config.moments],
        "resident states": int(_here_bytes(config) * resident_parameters(dims, config)),
    }
    return {part: size for part, size in parts.items() if size or part == "noise"}


def on_ranks(
    parts: dict[str, int], dims: ModelDims, config: SlideformerConfig, world: int
) -> dict[str, int]:
    """Return `parts` of `memory` for one of `world` ranks: resident units have all their weights
    there, and a shard of the other states; momenta are there in shards."""
    if "momentum" in parts:
        parts = {**parts, "momentum": -(-parts["momentum"] // world)}
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
            STATE_BYTES[config.moments] * (dims.parameters - resident)
            - on_disk
            - 4 * cold
            - saved_bytes(dims, config)
        ),
        "undo records": int(
            min(config.presumed, dims.layers) * dims.block_parameters * RECORD_BYTES[config.moments]
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
    work = 4 * forward + heads + orthogonal_flops(dims, config)
    work += mlp_again_flops(dims, config, batch_size, length_tokens)
    return StepCost(work, 3 * weight_bytes, config.compute)


def orthogonal_flops(dims: ModelDims, config: SlideformerConfig) -> float:
    """Return operations of Muon's products: of a matrix with the shorter side m and the longer n
    five times (2 m + 2 n) m^2 for its squares and cubes, and 2 n m^2 for the rest."""
    if config.optimizer != "muon":
        return 0.0
    total = 0.0
    for linear in (*dims.linear_list, *dims.expert_list):
        short, long = sorted((linear.inputs, linear.outputs))
        total += linear.experts * 5 * (4.0 * long + 2.0 * short) * short**2
    return total
