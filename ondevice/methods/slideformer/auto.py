"""The values of `auto`: how many layers and whether the tables stay on the accelerator, how wide
the window is, and how many gradients may wait, by the memory of both sides and the rates of the
machine. Of several processes each decides by its own memory, as if all shared one host, and all
take the least of what any of them chose (`agreed`).

Every choice gives the same bits, so the one with the least predicted time is taken, and of equals
the smallest. A step takes as long as its longest lane, and what its boundary adds: the gradients of
the first unit on the host are the last to arrive and the first to be needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ondevice.core.config import size_text
from ondevice.methods.slideformer.config import BUFFERS, WINDOW
from ondevice.methods.slideformer.memory import (
    MASTER_BYTES,
    MEMORY,
    MOMENTUM_BYTES,
    STATE_BYTES,
    absent_parameters,
    experts_share,
    hidden,
    on_ranks,
    resident_parameters,
    step_cost,
)
from ondevice.offload.config import ITEM_BYTES, RECORD_BYTES, Rates

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.planning.estimate import Request

SHARE = 0.92
"""Of the accelerator's usable memory that is filled: the plan's parts are estimates."""
HOST_SHARE = 0.9
"""Of the host's."""
EQUAL = 1.004
"""Times that differ by less are equal."""
SLACK = 1.25
"""Factor of the update and the copies: they wait for each other, and for the first gradient."""
HIDDEN = 0.7
"""Of the computation is the backward pass, under which an update hides without more buffers."""
FITTED_MATRIX = 0.75
"""The fraction of the rate of large matrix products that a model's layers reach."""


@dataclass(frozen=True)
class Room:
    """Memory that the run may take, bytes; `host_bytes` is None if unknown."""

    accelerator_bytes: int
    host_bytes: int | None


def resolve(
    config: SlideformerConfig, dims: ModelDims, work: Work, room: Room, rates: Rates
) -> tuple[SlideformerConfig, str]:
    """Return `config` with every `auto` decided, and the reason in a sentence.

    Given numbers stay. If nothing fits, the smallest choice is taken, and the plan says so.
    """
    options = [
        change for change in _options(config, dims) if _fits(config, change, dims, work, room)
    ]
    if not options:
        return config.fixed(), "nothing more fits: the smallest window, all states on the host"
    timed = {
        index: _seconds(config.decided(**change), dims, work, rates)
        for index, change in enumerate(options)
    }
    quickest = min(timed.values())
    best = min(
        (index for index, value in timed.items() if value <= quickest * EQUAL),
        key=lambda i: _size(options[i]),
    )
    chosen = config.decided(**options[best])
    chosen = _replaced(chosen, _buffers(config, chosen, dims, work, room, rates))
    if config.presumed_layers == "auto":
        chosen = _presuming(chosen, _presumed(chosen, dims, work, room, rates))
    return chosen, _why(chosen, dims, work, rates, _seconds(chosen, dims, work, rates))


def resolve_request(
    request: Any, rates: Rates | None, host_bytes: int | None
) -> tuple[SlideformerConfig, str]:
    """Return what `resolve` does of a plan's request; see `DecidesFromMemory`."""
    config = request.method
    room = Room(request.device.usable_bytes, host_bytes)
    work = Work(request.batch_size, request.length_tokens, request.world)
    return resolve(config, request.dims, work, room, rates or assumed(request.device, config))


def step_s(request: Any, rates: Rates | None) -> tuple[float, str]:
    """Return the seconds of a step, and the lane that bounds it; see `Offloads`."""
    config = request.method.fixed()
    work = Work(request.batch_size, request.length_tokens, request.world)
    rates = rates or assumed(request.device, config)
    lanes = lanes_of(request.dims, config, work, rates, FITTED_MATRIX)
    return _seconds(config, request.dims, work, rates), max(lanes, key=lambda lane: lanes[lane])


def assumed(device: Any, config: SlideformerConfig) -> Rates:
    """Return assumed rates: the device's products, PCIe 5.0, host memory of 140 GB/s."""

    flops = device.flops_s.get(config.compute) or device.flops_s.get("float32") or 100e12
    return Rates(flops, 50e9, 50e9, 140e9 / moved_bytes(config), 3e9)


def _options(config: SlideformerConfig, dims: ModelDims) -> list[dict[str, Any]]:
    """Every number of resident layers, with and without the tables, each with several windows."""
    exact = config.max_grad_norm is not None
    may = not (exact and config.clip == "global") and config.disk_fraction < 1
    may = may and config.optimizer != "muon"
    options = []
    for table in (False, True) if may else (False,):
        for layers in range(dims.layers + 1 if may else 1):
            left = max(2, dims.layers - layers)
            for window in sorted({min(WINDOW, left), min(2 * WINDOW, left), left // 2 + 1, left}):
                option = {
                    "resident_layers": layers,
                    "resident_tables": table,
                    "window": max(2, window),
                }
                options.append(option | {"gradient_buffers": BUFFERS, "presumed_layers": 0})
    return options


def _size(option: dict[str, Any]) -> tuple[int, int]:
    """The tie-break of equally quick options: fewer resident layers, then the smaller window."""
    return option["resident_layers"] + 2 * option["resident_tables"], option["window"]


def _fits(
    config: SlideformerConfig, change: dict[str, Any], dims: ModelDims, work: Work, room: Room
) -> bool:
    resolved = config.decided(**change)
    return needed_bytes(resolved, dims, work) <= SHARE * room.accelerator_bytes and _host_fits(
        resolved, dims, work, room
    )


def needed_bytes(config: SlideformerConfig, dims: ModelDims, work: Work) -> int:
    """Return the bytes of a step on one accelerator."""
    parts = MEMORY.step(dims, config, work.rows, work.length_tokens, 4)
    return sum(on_ranks(parts, dims, config, work.world).values())


def _host_fits(resolved: SlideformerConfig, dims: ModelDims, work: Work, room: Room) -> bool:
    assert MEMORY.host is not None  # noqa: S101  this method's
    needed = sum(
        MEMORY.host(dims, resolved, work.rows * work.world, work.length_tokens, 4).values()
    )
    return room.host_bytes is None or needed <= HOST_SHARE * room.host_bytes


def _seconds(config: SlideformerConfig, dims: ModelDims, work: Work, rates: Rates) -> float:
    """The longest lane, and the boundary between two steps that nothing hides."""
    lanes = lanes_of(dims, config, work, rates, FITTED_MATRIX)
    hidden = lanes["compute"] / dims.layers * min(config.kept_layers, dims.layers)
    item = ITEM_BYTES[config.compute]
    layer = updated(dims, config, dims.block_parameters, 1)
    moved = dims.block_parameters * item / work.world
    tokens = work.rows * work.world * work.length_tokens
    waits = tokens * dims.hidden / rates.parameters_s * (not config.keeps_tables)
    longest = max(lane * (1.0 if name == "compute" else SLACK) for name, lane in lanes.items())
    if config.updates_last:  # what is not presumed begins after the backward pass
        late = max(0.0, 1 - config.presumed / dims.layers)
        longest = max(longest, HIDDEN * lanes["compute"] + late * SLACK * lanes["update"])
    if config.kept_layers < dims.layers:
        copies = moved / (rates.d2h_bytes_s or 50e9) + moved / (rates.h2d_bytes_s or 50e9)
        waits += max(0.0, layer / rates.parameters_s + copies - hidden)
    return longest + waits


def _buffers(
    config: SlideformerConfig,
    chosen: SlideformerConfig,
    dims: ModelDims,
    work: Work,
    room: Room,
    rates: Rates,
) -> int:
    """A few if the backward pass hides the update; else as many as are useful and fit the host."""
    if config.gradient_buffers != "auto":
        return config.gradient_buffers
    lanes = lanes_of(dims, chosen, work, rates, FITTED_MATRIX)
    left = max(2, dims.layers - chosen.kept_layers)
    if SLACK * max(lanes["update"], lanes["disk"]) <= HIDDEN * lanes["compute"]:
        return min(BUFFERS, left)
    most = next(
        (n for n in range(left, 2, -1) if _host_fits(_replaced(chosen, n), dims, work, room)), 2
    )
    return max(2, most)


def _presumed(
    config: SlideformerConfig, dims: ModelDims, work: Work, room: Room, rates: Rates
) -> int:
    """As many as keep the update busy under the backward pass and leave no more than hides under
    the next forward pass, and fit the host."""
    lanes = lanes_of(dims, config, work, rates, FITTED_MATRIX)
    update = SLACK * lanes["update"]
    if not config.presumes or not update:
        return 0
    backward = HIDDEN * lanes["compute"]
    forward = lanes["compute"] - backward
    useful = math.ceil(dims.layers * max(0.0, min(1 - forward / update, backward / update)))
    counts = range(useful, 0, -1)
    fits = (n for n in counts if _host_fits(_presuming(config, n), dims, work, room))
    return next(fits, 0)


def presumed_within(
    config: SlideformerConfig, parameters: int, layer_parameters: int, layers: int
) -> int:
    """Return the layers that may be presumed of a model whose machine is not measured: as many as
    fit `host_memory_bytes`, none if that is not known."""
    if config.presumed_layers != "auto":
        return config.presumed_layers
    if config.host_memory_bytes is None or not config.presumes:
        return 0
    left = HOST_SHARE * config.host_memory_bytes
    left -= (STATE_BYTES[config.moments] + ITEM_BYTES[config.compute]) * parameters
    return max(0, min(layers, int(left / (RECORD_BYTES[config.moments] * layer_parameters))))


def _presuming(config: SlideformerConfig, layers: int) -> SlideformerConfig:
    return config.model_copy(update={"presumed_layers": layers})


def _replaced(config: SlideformerConfig, buffers: int) -> SlideformerConfig:
    return config.model_copy(update={"gradient_buffers": buffers})


def _why(
    config: SlideformerConfig, dims: ModelDims, work: Work, rates: Rates, seconds: float
) -> str:
    """The choice in a sentence, for the plan and for the log."""
    lanes = lanes_of(dims, config, work, rates, FITTED_MATRIX)
    longest = max(lanes, key=lambda lane: lanes[lane])
    need = needed_bytes(config, dims, work)
    tables = "tables and " * config.keeps_tables
    share = experts_share(dims, config, work.rows * work.length_tokens, work.world)
    experts = f"; about {share:.0%} of the experts are copied" * (share < 1)
    presumed = f"; {config.presumed} layers are updated before the norm is known"
    presumed *= config.updates_last
    least = "; all ranks take the least that any of them chose" * (work.world > 1)
    return (
        f"auto: {tables}{config.kept_layers} of {dims.layers} layers stay on the GPU, window {config.slots}, "
        f"{config.buffers} gradient buffers ({size_text(need)} of GPU memory); about {seconds:.3g} s a step, "
        f"bound by {longest} (compute {lanes['compute']:.3g}, update {lanes['update']:.3g}, "
        f"copies {max(lanes['h2d'], lanes['d2h']):.3g} s){experts}{presumed}{least}"
    )


DEVICE_PARAMETERS_S = 60e9
"""AdamW on the accelerator, parameters a second: 26 bytes each at 1.6 TB/s."""


@dataclass(frozen=True)
class Work:
    """Rows of a step and their length, tokens; `rows` are one's of `world` processes, which share
    the host."""

    rows: int
    length_tokens: int
    world: int = 1


def moved_bytes(config: SlideformerConfig) -> float:
    """Return the bytes of host memory that AdamW's update of a parameter reads and writes, its
    gradient's among them."""
    return 2 * STATE_BYTES[config.moments] + ITEM_BYTES[config.compute]


def updated(dims: ModelDims, config: SlideformerConfig, parameters: float, layers: int) -> float:
    """Return as how many parameters of AdamW the update moves bytes of host memory.

    Of the matrices of `layers` under Muon, those of master and update: momenta only cross the bus.
    """
    muon = 2 * MASTER_BYTES + ITEM_BYTES[config.compute]
    return parameters - layers * hidden(dims, config) * (1 - muon / moved_bytes(config))


def lanes(request: Request, rates: Rates, rows: int, flops: float) -> dict[str, float]:
    """Return seconds by lane of a step of that many rows, of `flops` operations; see `Offloads`."""
    return _lanes(
        request.dims, request.method, Work(rows, request.length_tokens, request.world), rates, flops
    )


def lanes_of(
    dims: ModelDims, config: SlideformerConfig, work: Work, rates: Rates, efficiency: float
) -> dict[str, float]:
    """Return the same for layers that reach the fraction `efficiency` of the rate of products."""
    flops = step_cost(dims, config, work.rows, work.length_tokens, 0).flops
    return _lanes(dims, config, work, rates, flops / efficiency)


def _lanes(
    dims: ModelDims, config: SlideformerConfig, work: Work, rates: Rates, flops: float
) -> dict[str, float]:
    item = ITEM_BYTES[config.compute]
    stored = STATE_BYTES[config.moments]
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
    absent = absent_parameters(dims, config, work.rows * work.length_tokens, work.world)
    twice = max(0, layers - min(config.slots, layers))  # fetched for the backward pass, too
    again = twice * (dims.block_parameters - absent)
    # Each rank copies its shard over its own link. Copies and updates of all share the host's
    # memory: what one moves the other waits for.
    momentum = layers * hidden(dims, config) * MOMENTUM_BYTES[config.moments]
    entering = (on_host - layers * absent + again) * item + momentum
    leaving = (on_host - layers * absent) * item + momentum
    ranks = work.world
    memory = rates.parameters_s * moved_bytes(config)
    moved = entering + leaving + 2 * kept * ranks
    traffic = config.presumed * dims.block_parameters * RECORD_BYTES[config.moments]
    if rates.h2d_bytes_s:
        traffic += moved
    on_disk = 2 * config.disk_fraction * (stored - 4) * on_host
    cold = config.disk_masters * config.disk_fraction
    on_disk += cold * (layers * dims.block_parameters * (8 + item) + again * item)
    on_disk += 2 * kept * ranks * (config.activations == "disk")
    return {
        "compute": flops / rates.flops_s + here / ranks / DEVICE_PARAMETERS_S,
        "h2d": _seconds_of(entering / ranks + kept, rates.h2d_bytes_s),
        "d2h": _seconds_of(leaving / ranks + kept, rates.d2h_bytes_s),
        "update": updated(dims, config, on_host, layers) / rates.parameters_s + traffic / memory,
        "disk": _seconds_of(on_disk, rates.disk_bytes_s),
    }


def _seconds_of(amount: float, rate: float | None) -> float:
    """Return the time of a lane; 0 for a lane that the machine does not have."""
    if rate:
        return amount / rate
    return 0.0
