"""Seconds of a SlideFormer step by lane, from measured rates (section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.methods.slideformer.cost import step_cost
from ondevice.methods.slideformer.memory import STATE_BYTES, resident_parameters

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.offload.rates import Rates
    from ondevice.planning.estimate import Request

DEVICE_PARAMETERS_S = 60e9
"""AdamW on the accelerator, parameters a second: 26 bytes each at 1.6 TB/s."""


@dataclass(frozen=True)
class Work:
    """Rows of a step and their length, tokens; `rows` are one's of `world` processes, which share the host."""

    rows: int
    length_tokens: int
    world: int = 1


def moved_bytes(config: SlideformerConfig) -> float:
    """Return the bytes of host memory that the update of a parameter reads and writes, its gradient's among them."""
    return 2 * STATE_BYTES[config.moments] + (2 if config.compute == "bfloat16" else 4)


def lanes(request: Request, rates: Rates, rows: int, flops: float) -> dict[str, float]:
    """Return seconds by lane of a step of that many rows, which takes `flops` operations; see `MethodSpec.lanes`."""
    return _lanes(
        request.dims, request.method, Work(rows, request.length_tokens, request.world), rates, flops
    )


def lanes_of(
    dims: ModelDims, config: SlideformerConfig, work: Work, rates: Rates, efficiency: float
) -> dict[str, float]:
    """Return the same where layers reach the share `efficiency` of the rate of products."""
    flops = step_cost(dims, config, work.rows, work.length_tokens, 0).flops
    return _lanes(dims, config, work, rates, flops / efficiency)


def _lanes(
    dims: ModelDims, config: SlideformerConfig, work: Work, rates: Rates, flops: float
) -> dict[str, float]:
    item, stored = 2 if config.compute == "bfloat16" else 4, STATE_BYTES[config.moments]
    kept = (
        dims.layers
        * work.rows
        * work.length_tokens
        * dims.hidden
        * item
        * (config.activations != "device")
    )
    here = resident_parameters(dims, config)
    on_host = max(0, dims.parameters - here)
    layers = max(0, dims.layers - config.kept_layers)
    again = (
        max(0, layers - min(config.slots, layers)) * dims.block_parameters
    )  # fetched for the backward pass, too
    # Each rank copies its share over its own link. Copies and updates of all share the host's memory: what one moves
    # the other waits for.
    entering, leaving, ranks = (on_host + again) * item, on_host * item, work.world
    memory, moved = rates.parameters_s * moved_bytes(config), entering + leaving + 2 * kept * ranks
    on_disk = 2 * config.disk_fraction * (stored - 4) * on_host
    cold = config.disk_masters * config.disk_fraction
    on_disk += cold * (layers * dims.block_parameters * (8 + item) + again * item)
    on_disk += 2 * kept * ranks * (config.activations == "disk")
    return {
        "compute": flops / rates.flops_s + here / ranks / DEVICE_PARAMETERS_S,
        "h2d": (entering / ranks + kept) / rates.h2d_bytes_s if rates.h2d_bytes_s else 0.0,
        "d2h": (leaving / ranks + kept) / rates.d2h_bytes_s if rates.d2h_bytes_s else 0.0,
        "update": on_host / rates.parameters_s + (moved / memory if rates.h2d_bytes_s else 0.0),
        "disk": on_disk / rates.disk_bytes_s if rates.disk_bytes_s else 0.0,
    }
