"""Data parallelism with sharded states (ZeRO) under `torchrun`: the processes and their groups.

Every rank keeps a contiguous shard of every unit, its masters and moments, and updates it: host
memory, copies and update are divided by the ranks. A rank copies its shard to its accelerator over
its own link, the accelerators gather the unit from each other; gradients are summed on their way to
the ranks that keep them (reduce-scatter), in the compute dtype, as they are stored: half the bytes
of float32, and each of the `world - 1` additions rounds to bfloat16, as accumulation over
micro-batches does.

Groups, each used by one thread, in an order that is the same on every rank, and none waits longer
than the time-out. `steps`: NCCL on GPUs, gloo on the CPU, the engine's transfer thread. `sums`:
gloo, the update thread. `results`: gloo, the main thread in an evaluation. `calls` and `files`
(`ondevice.offload.messages`): the main threads, for what rank 0 asks the others to do, and the
threads that write a checkpoint."""

from __future__ import annotations

import atexit
import os
import platform
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise
from math import fsum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from ondevice.core.errors import ConfigError
from ondevice.offload import cores
from ondevice.offload.config import launched
from ondevice.offload.messages import Beat, Messages, together
from ondevice.offload.units import Arrays, Bounds, Ranks

START = timedelta(minutes=10)
GRACE = timedelta(seconds=30)
"""Ranks come when their model is loaded."""
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Processes(Ranks):
    """This process among several that train together."""

    def __init__(self, rank: int, world: int, timeout_s: float, device: str) -> None:
        super().__init__(rank, world)
        limit = timedelta(seconds=timeout_s)
        # NCCL's monitor would be inside the store when this process ends; who is gone the engine
        # finds out itself.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        with together():
            start = max(limit, START)
            store, rank, world = next(rendezvous("env://", rank, world, timeout=start))
            store.set_timeout(start)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
            self.beat = Beat(store, rank, world, limit)
            self.calls = Messages("calls", store, world, rank, limit, self.beat)
            self.files = Messages("files", store, world, rank, limit, self.beat)
            self.sums: Any = dist.new_group(backend="gloo", timeout=limit)
            self.results: Any = dist.new_group(backend="gloo", timeout=limit)
            self.steps: Any = dist.group.WORLD
            # NCCL's own time-out ends the process without naming the layer: ours comes before it.
            if device != "cpu":
                self.steps = dist.new_group(backend="nccl", timeout=limit + GRACE)
            self._bind(device)
            # NCCL connects at the first call, which takes seconds: not within a step's time-out.
            if device != "cpu":
                dist.all_reduce(torch.zeros(1, device=device), group=self.steps)
                torch.cuda.synchronize()
        atexit.register(self.close)

    @property
    def lost(self) -> Exception | None:
        return self.beat.lost

    def abort(self) -> None:
        """Abort what the ranks do together; whatever waits for it continues."""
        self.steps.abort()

    def close(self) -> None:
        """Tell the other ranks that this one ends."""
        self.beat.close()

    def _bind(self, device: str) -> None:
        """Let this rank have cores of its own among those of its host."""
        if not hasattr(os, "sched_getaffinity"):
            return
        mine = os.sched_getaffinity(0)
        gpu = None
        if device == "cuda":
            gpu = cores.pci_address(torch.cuda.current_device())
        every = self.calls.every((platform.node(), sorted(mine), gpu))
        here = [rank for rank in range(self.world) if every[rank][:2] == every[self.rank][:2]]
        self.sharing = len(here)
        if 1 < len(here) <= len(mine):
            parts = cores.divide(mine, [every[rank][2] for rank in here])
            if all(parts):
                cores.bind(parts[here.index(self.rank)])
                self.sharing = 1

    def settings(self, config: Any) -> Any:
        return self.calls.broadcast(config)

    def gather(self, memory: Tensor, bounds: Bounds) -> None:
        with together():
            if _even(bounds):
                _all_gather(memory[: bounds[-1]], memory[self.own(bounds)], group=self.steps)
                return
            for rank in range(self.world):
                if bounds[rank] < bounds[rank + 1]:
                    dist.broadcast(memory[bounds[rank] : bounds[rank + 1]], rank, group=self.steps)

    def reduce(self, memory: Tensor, bounds: Bounds) -> None:
        with together():
            if _even(bounds):
                _reduce_scatter(memory[self.own(bounds)], memory[: bounds[-1]], group=self.steps)
                return
            for rank in range(self.world):
                if bounds[rank] < bounds[rank + 1]:
                    dist.reduce(memory[bounds[rank] : bounds[rank + 1]], rank, group=self.steps)

    def all_reduce(self, memory: Tensor) -> None:
        with together():
            dist.all_reduce(memory, group=self.steps)

    def first(self, memory: Tensor) -> None:
        with together():
            dist.broadcast(memory, 0, group=self.steps)

    def sum(self, value: float) -> float:
        values = torch.zeros(self.world, dtype=torch.float64)
        values[self.rank] = value
        with together():
            dist.all_reduce(values, group=self.sums)
        return fsum(values.tolist())

    def collect(self, values: Tensor) -> Tensor:
        collected = [torch.empty_like(values) for _ in range(self.world)]
        with together():
            dist.all_gather(collected, values, group=self.results)
        return torch.stack(collected)

    def agree(self, problem: Exception | None) -> None:
        for error in self.calls.every(problem):
            if error is not None:
                raise error

    def lent(self, arrays: Arrays) -> AbstractContextManager[Arrays]:
        return self.calls.lent(arrays)


def join_processes(device: str, timeout_s: float) -> tuple[Processes, str]:
    """Return the processes that `torchrun` started, once all are there, and this one's device.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this host.
        TrainingError: the other ranks do not join.
    """
    rank, world = launched()
    kind = torch.device(device).type
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        count = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if torch.cuda.device_count() < count:
            raise ConfigError(
                "fewer GPUs than ranks on this host",
                expected=count,
                received=torch.cuda.device_count(),
            )
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    return Processes(rank, world, timeout_s, kind), device


def _even(bounds: Bounds) -> bool:
    """True if all parts are equally long: one call moves them, over all links at once."""
    return bounds[1] > bounds[0] and all(
        b - a == bounds[1] - bounds[0] for a, b in pairwise(bounds)
    )
