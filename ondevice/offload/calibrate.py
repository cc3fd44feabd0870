"""Measure for ten seconds and predict which of compute, transfers, update and disk bounds a step.

The bound is that of findings and of SlideFormer's conditions (section 3.1): every lane is busy all
the time, so the longest one is the step. It holds over whole steps; a step boundary adds the update
of one layer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ondevice.offload.config import Rates
from ondevice.offload.device import buffer, open_device
from ondevice.offload.engine import host_threads
from ondevice.offload.host import DTYPES, moments_bytes, moments_in, native
from ondevice.offload.storage import TierFile
from ondevice.runtime_ops.layer_adam import AdamStep, HostState, layer_adam, torch_adam

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig

COPY_BYTES = 256 << 20
MATRIX = 4096
UPDATE_NUMEL = 32 << 20
REPEATS = 3
LARGEST_BATCH = 1024


@dataclass(frozen=True)
class Prediction:
    """Seconds a step by lane, the longest of them, and what hides.

    Attributes:
        hiding_factor: backward seconds over transfer of gradients and update; 1 and more hides
            them.
        smallest_batch: rows from which the computation is the longest lane; None if no batch up to
            1024 is.
    """

    compute_s: float
    h2d_s: float
    d2h_s: float
    update_s: float
    disk_s: float
    step_s: float
    bound: str
    hiding_factor: float
    smallest_batch: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def calibrate(config: EngineConfig, device: str) -> Rates:
    """Measure matrix products, copies, the update and, if used, the disk; about ten seconds.

    Args:
        device: `cpu` or `cuda`.
    """
    opened = open_device(device)
    dtype = DTYPES[config.compute]
    size = MATRIX
    if opened.type == "cpu":
        size = MATRIX // 8
    where = torch.device(device)
    a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    flops = 2 * size**3 / _best(lambda: (a @ b, opened.synchronize()), 10)
    h2d = d2h = None
    if opened.type != "cpu":
        host = opened.pinned(COPY_BYTES, torch.uint8)
        device_buffer = opened.empty(COPY_BYTES, torch.uint8)
        h2d = COPY_BYTES / _best(
            lambda: (opened.copy("h2d", device_buffer, host), opened.synchronize())
        )
        d2h = COPY_BYTES / _best(
            lambda: (opened.copy("d2h", host, device_buffer), opened.synchronize())
        )
    parameters = UPDATE_NUMEL / _best(_update(config, opened.type))
    disk = None
    if config.disk_tier is not None:
        with tempfile.TemporaryDirectory(dir=config.disk_tier) as folder:
            disk = _disk_rate(Path(folder))
    opened.close()
    limit = config.bus_limit_gb_per_s
    return Rates(flops, _limited(h2d, limit), _limited(d2h, limit), parameters, disk)


def predict(lanes_at: Callable[[int], dict[str, float]], batch_size: int) -> Prediction:
    """Return a step of `batch_size` rows; `lanes_at` gives seconds by lane of any number of rows,
    as `lanes_of` does."""
    lanes = lanes_at(batch_size)
    longest = max(lanes, key=lambda lane: lanes[lane])
    rest = max(value for lane, value in lanes.items() if lane != "compute")
    smallest = next(
        (
            rows
            for rows in range(1, LARGEST_BATCH + 1)
            if (seconds := lanes_at(rows))["compute"]
            >= max(value for lane, value in seconds.items() if lane != "compute")
        ),
        None,
    )
    leaving = lanes["d2h"] + max(lanes["update"], lanes["disk"])
    return Prediction(
        compute_s=lanes["compute"],
        h2d_s=lanes["h2d"],
        d2h_s=lanes["d2h"],
        update_s=lanes["update"],
        disk_s=lanes["disk"],
        step_s=max(lanes["compute"], rest),
        bound=longest,
        hiding_factor=0.75 * lanes["compute"] / leaving if leaving else float("inf"),
        smallest_batch=smallest,
    )


def _update(config: EngineConfig, kind: str) -> Any:
    """One update of `UPDATE_NUMEL` parameters as the engine does it."""
    count = UPDATE_NUMEL
    dtype = DTYPES[config.compute]
    moments = config.moments
    threads = config.threads or host_threads(kind)
    moment_buffers = moments_in(buffer(moments_bytes(count, moments), pin=False), count, moments)
    gradient = torch.zeros(count, dtype=dtype)
    adam = AdamStep(learning_rate=1e-5)
    if native(config) and dtype == torch.bfloat16:
        halves = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.uint16)
        state = HostState(None, *halves, moment_buffers)
    else:
        state = HostState(torch.zeros(count), None, None, moment_buffers)
    if native(config):
        return lambda: layer_adam(gradient, state, adam, threads=threads)
    scratch = torch.zeros(count)
    converted = torch.zeros(count, dtype=dtype)
    return lambda: (torch_adam(gradient, state, adam, scratch), converted.copy_(scratch))


def _limited(measured: float | None, gb_per_s: float | None) -> float | None:
    """Bytes a second of a copy; without a measured rate, as on a CPU, the limit."""
    return min((rate for rate in (measured, gb_per_s and gb_per_s * 1e9) if rate), default=None)


def _disk_rate(folder: Path) -> float:
    """Bytes a second of writing and then reading 256 MiB."""
    memory = buffer(COPY_BYTES, pin=False)
    with TierFile(folder, "calibration", [COPY_BYTES]) as file:
        seconds = _best(lambda: (file.write(0, memory).result(), file.read(0, memory).result()))
    return 2 * COPY_BYTES / seconds


def _best(run: Any, times: int = 1) -> float:
    """Seconds a call, the median of rounds of `times`, after one to warm up."""
    run()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(times):
            run()
        seconds.append((time.perf_counter() - started) / times)
    return sorted(seconds)[len(seconds) // 2]
