"""How `method.recompute: auto` is decided: as many of the last blocks keep their graphs as the memory
holds.

Those blocks are neither inverted nor computed again, and need no bits for their inversion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.methods.memory_room import item_bytes, room_bytes
from ondevice.methods.revffn.memory import MEMORY

if TYPE_CHECKING:
    from ondevice.methods.revffn.config import Recompute, RevffnConfig


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
