"""How `method.recompute: auto` is decided: as much of the forward pass is kept as the memory holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.methods.mesp.memory import (
    MEMORY,
    KeptLayers,
    gpu_chunk_tokens,
    layer_bytes,
    weights,
)
from ondevice.methods.step_model import item_bytes, room_bytes

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.config import MespConfig, Recompute


def resolve(request: Any, rates: Any, host_bytes: int | None) -> tuple[MespConfig, str]:
    """Decide `recompute: auto` from the device's memory; see `DecidesFromMemory`."""
    config, dims = request.method, request.dims
    if config.recompute != "auto":
        return config, ""
    computed = config.model_copy(update={"recompute": "all"})
    if request.device.torch_device == "cpu" or dims.whole or dims.experts:
        return computed, ""
    room = room_bytes(request, needed_bytes(request, computed))
    rows = min(request.batch_size, config.micro_batch_size or request.batch_size)
    each = layer_bytes(dims, rows * request.length_tokens, item_bytes(request.dtype))
    counts = []
    for size in each:
        counts.append(max(0, min(dims.layers, room // max(size, 1))))
        room -= counts[-1] * size
    taken = KeptLayers(*counts)
    return config.model_copy(update={"recompute": setting(taken, dims)}), said(taken, dims)


def setting(layers: KeptLayers, dims: ModelDims) -> Recompute:
    """Return the shortest setting that keeps so many layers."""
    if not any(layers):
        return "all"
    if min(layers) == dims.layers:
        return "none"
    return layers.attention, layers.mlp, layers.projections


def needed_bytes(request: Any, config: MespConfig) -> int:
    """Return what a step needs that computes everything again, its weights included, bytes."""
    dims, item = request.dims, item_bytes(request.dtype)
    tokens = request.batch_size * request.length_tokens
    needed = weights(dims, config, item)
    needed += sum(
        MEMORY.step(dims, config, request.batch_size, request.length_tokens, item).values()
    )
    chunk = gpu_chunk_tokens(tokens)
    needed += 3 * chunk * dims.intermediate * item  # wider than a CPU's chunk
    if config.bits and 2 * chunk < tokens:  # the MLP's matrices are dense for all chunks
        needed += 3 * dims.hidden * dims.intermediate * item
    return needed


def said(layers: KeptLayers, dims: ModelDims) -> str:
    """Say what was decided."""
    if not any(layers):
        return "method.recompute: all; the GPU's memory has no room to keep more than block inputs"
    if min(layers) == dims.layers:
        return "method.recompute: none; the GPU's memory has room for all of the forward pass"
    parts = ("attention's output", "gate and up", "projections")
    kept = [f"{part} of {number}" for part, number in zip(parts, layers, strict=True) if number]
    of = f"method.recompute keeps {', '.join(kept)} of {dims.layers} layers"
    return f"{of}: what the GPU's memory has room for"
