"""Bytes and work of a RevFFN step by part, from dimensions only: the ends of the streams, and one block of
everything else, with those that keep their graphs; and how `method.recompute: auto` decides on these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import MoeDims
from ondevice.core.method import MemoryModel, Reduction, StepCost
from ondevice.methods.step_model import (
    backward_bytes,
    forward_flops,
    head_flops,
    item_bytes,
    loss_bytes,
    room_bytes,
)

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.revffn.config import Recompute, RevffnConfig

STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2 + 8 / 256, "sgd": 0.0}
"""Of the optimizer, a parameter; Adafactor keeps a row and a column of each matrix."""
CHUNK = 1 << 24
"""Elements that an update works on at once (`updates.CHUNK`), in four float32 copies if it needs
any."""
STREAM_COPIES = 3
"""Copies of the streams, float32, that a step back holds in addition to its graph and the ends; one
less if it is half a block."""


def memory(
    dims: ModelDims,
    config: RevffnConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part.

    Args:
        dims: the model.
        config: the method.
        batch_size: rows of data; `config.micro_batch_size` of them are computed at once.
        length_tokens: tokens a row.
        activation_bytes: bytes of one activation, and of one weight.
    """
    rows = min(batch_size, config.micro_batch_size or batch_size)
    tokens = rows * length_tokens
    # gradients of several parts are summed in float32
    item = activation_bytes
    if rows < batch_size:
        item = 4
    adapters = adapter_numbers(dims, config)
    kept = kept_blocks(config.recompute, dims.layers)
    if config.stage1_only:
        trained = adapters
        live = trained
        if config.fused_update:
            live = trained // dims.layers
    else:
        trained = dims.parameters + adapters
        table = dims.vocab * dims.hidden
        block = dims.block_parameters + adapters // dims.layers
        # a tied head's gradient waits for the embedding's
        if dims.tied:
            live = block + table
        else:
            live = max(block, table)
        if not config.fused_update:
            live = trained
    width = dims.hidden * (2 if config.coupling == "full" else 1)
    stream = {"bfloat16": 2, "int32": 4, "float32": 8}[
        config.streams
    ]  # float32 streams are summed in float64
    kept_bytes = kept * block_bytes(dims, config, batch_size, length_tokens, activation_bytes)
    activations = backward_bytes(dims, rows, length_tokens, activation_bytes) // dims.layers
    activations += (STREAM_COPIES - (config.coupling != "full")) * tokens * width * 4
    activations = max(0, activations - kept_bytes)  # by then the graphs are gone
    beside = _beside(dims, config) * (config.gamma_bits_on == "device")
    norms = 4 * (dims.layers - kept) * (config.coupling == "paper")
    ends = width * 4 + beside + norms
    if kept < dims.layers:
        ends += width * stream
    logits = loss_bytes(dims, tokens, config.loss_tiles)
    freed = max(activations, logits, kept_bytes // max(1, kept))
    copies = activation_bytes < 4 or config.optimizer in ("adafactor", "adamw8bit")
    update = 16 * min(CHUNK, dims.vocab * dims.hidden) * (copies and not config.stage1_only)
    return {
        "adapter": adapters * 4,
        "gradients": live * item,
        "optimizer": state_bytes(dims, config, trained),
        "streams": batch_size * length_tokens * ends,
        "noise": 0,
        "kept of the forward pass": kept_bytes,
        "activations": activations,
        "logits": max(
            0, logits - activations
        ),  # the head is through before a block is computed again
        "update": max(0, update - freed),
    }


def kept_blocks(recompute: Recompute, layers: int) -> int:
    """Return the blocks that keep their activations; `auto` that no one has decided keeps none."""
    if isinstance(recompute, int):
        return min(recompute, layers)
    return layers if recompute == "stored" else 0


def block_bytes(
    dims: ModelDims, config: RevffnConfig, rows: int, length_tokens: int, activation_bytes: int
) -> int:
    """Return what the graph of one block holds, bytes.

    Beyond `backward_bytes` these are the rows of experts, sorted, and their results; what goes into
    the adapters of half-width streams; and in bfloat16 the norms' float32 inputs, and the adapters'
    copies.
    """
    numbers = 0
    copies = 0
    if isinstance(dims, MoeDims):
        numbers += 2 * dims.active_experts * dims.hidden + 3 * dims.experts
        numbers += dims.hidden * bool(dims.shared_intermediate)
    if config.coupling != "full":
        numbers += 3 * dims.hidden
    if activation_bytes < 4:
        numbers += 2 * dims.hidden
        copies = adapter_numbers(dims, config) // dims.layers
    block = backward_bytes(dims, rows, length_tokens, activation_bytes) // dims.layers
    return block + (rows * length_tokens * numbers + copies) * activation_bytes


def host_memory(
    dims: ModelDims,
    config: RevffnConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return bytes of pinned host memory by part: what `full` keeps in addition to its streams, if
    `config.gamma_bits_on` says so.

    Args:
        dims, config, batch_size, length_tokens: as in `memory`.
        activation_bytes: not needed here.
    """
    tokens = batch_size * length_tokens
    bits = _beside(dims, config)
    if not bits or config.gamma_bits_on == "device":
        return {}
    return {"bits next to the streams": tokens * bits}


def _beside(dims: ModelDims, config: RevffnConfig) -> int:
    """Bytes a token of the bits that the sums of the inverted steps do not hold."""
    bits = config.gamma_bits * (config.coupling == "full" and config.streams == "int32")
    inverted = dims.layers - kept_blocks(config.recompute, dims.layers)
    return max(0, inverted - 1) * dims.hidden * bits // 8


def adapter_numbers(dims: ModelDims, config: RevffnConfig) -> int:
    """Count the numbers of P_up and P_down around the attention and the MLP of every layer, which
    half-width streams have."""
    return dims.layers * 4 * dims.hidden * (dims.hidden // 2) * (config.coupling != "full")


def state_bytes(dims: ModelDims, config: RevffnConfig, trained: int) -> int:
    """Count the bytes of the optimizer's state of `trained` parameters."""
    if config.optimizer != "adafactor":
        return int(STATE_BYTES[config.optimizer] * trained)
    sides = (
        sum(inputs + outputs for inputs, outputs in dims.linear_shapes.values()) + 4 * dims.hidden
    )
    if dims.experts:
        width = getattr(dims, "expert_intermediate", dims.intermediate)
        sides += dims.experts * (3 * width + 2 * dims.hidden)
    adapters = 6 * dims.hidden * dims.layers * (config.coupling != "full")
    return 4 * (
        dims.layers * sides + adapters + (1 if dims.tied else 2) * (dims.vocab + dims.hidden)
    )


def _less_optimizer_state(config: RevffnConfig, batch_size: int) -> RevffnConfig | None:
    if config.optimizer in ("adafactor", "sgd"):
        return None
    return config.model_copy(update={"optimizer": "adafactor"})


def _nothing_kept(config: RevffnConfig, batch_size: int) -> RevffnConfig | None:
    if config.recompute in ("auto", "reversible", 0):
        return None
    if config.coupling == "full" and config.gamma_bits and config.streams != "int32":
        return None  # that network has no other way back
    return config.model_copy(update={"recompute": "reversible"})


def _a_row_at_once(config: RevffnConfig, batch_size: int) -> RevffnConfig | None:
    if batch_size == 1 or config.micro_batch_size == 1:
        return None
    return config.model_copy(update={"micro_batch_size": 1})


MEMORY = MemoryModel(
    memory,
    host=host_memory,
    host_note="the bits next to the streams wait in pinned host memory",
    host_hint="method.gamma_bits_on: device, fewer rows",
    reductions=(
        Reduction("method.recompute: {config.recompute}", _nothing_kept),
        Reduction("method.optimizer: adafactor", _less_optimizer_state),
        Reduction("method.micro_batch_size: 1", _a_row_at_once),
    ),
)


def step_cost(
    dims: ModelDims, config: RevffnConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    # A block's branch is computed a second time, unless it is kept, and not a third for the
    # inversion.
    forwards = 4 - kept_blocks(config.recompute, dims.layers) / dims.layers
    forward = forward_flops(dims, batch_size, length_tokens)
    head = head_flops(dims, batch_size, length_tokens)
    return StepCost(forwards * forward + 4 * head, 5 * weight_bytes)


def resolve(request: Any, rates: Any, host_bytes: int | None) -> tuple[RevffnConfig, str]:
    """Decide `recompute: auto` from the device's memory; see `DecidesFromMemory`."""
    config = request.method
    if config.recompute != "auto":
        return config, ""
    if request.device.torch_device == "cpu":
        return _with(config, "reversible"), ""
    layers = request.dims.layers
    counts = range(layers, 0, -1)
    kept = next((n for n in counts if room_bytes(request, needed_bytes(request, n)) >= 0), 0)
    return _with(config, setting(kept, layers)), said(kept, layers)


def setting(kept: int, layers: int) -> Recompute:
    """Return the setting that keeps so many blocks, in words if it is all or none."""
    if kept == layers:
        return "stored"
    return kept or "reversible"


def needed_bytes(request: Any, kept: int) -> int:
    """Return the bytes of weights and of a step that keeps so many blocks."""
    dims = request.dims
    item = item_bytes(request.dtype)
    config = _with(request.method, kept)
    step = MEMORY.step(dims, config, request.batch_size, request.length_tokens, item)
    return dims.parameters * item + sum(step.values())


def said(kept: int, layers: int) -> str:
    """Say what was decided."""
    if not kept:
        return "method.recompute: reversible; the GPU's memory has no room to keep a block"
    if kept == layers:
        return "method.recompute: stored; the GPU's memory has room for all of the forward pass"
    of = f"method.recompute keeps the last {kept} of {layers} blocks"
    return f"{of}: what the GPU's memory has room for"


def _with(config: RevffnConfig, recompute: Recompute) -> RevffnConfig:
    return config.model_copy(update={"recompute": recompute})
