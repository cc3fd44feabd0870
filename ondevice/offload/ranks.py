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
from collections.abc import Iterator
from contextlib import contextmanager
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
from ondevice.offload.messages import Arrays, Beat, Messages, together
from ondevice.offload.units import Unit, row_bounds, shard, shard_bounds, shard_numel

_LOCAL = "LOCAL_WORLD_SIZE"
START = timedelta(minutes=10)
GRACE = timedelta(seconds=30)
"""Ranks come when their model is loaded."""
Bounds = tuple[int, ...]
"""Where each rank's part begins, and where the last one ends."""
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks:
    """This process among those that train together; in a single one, every call is the identity.

    Attributes:
        sharing: ranks that may use the same cores as this one.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, timeout_s: float = 600.0, device: str = "cpu"
    ) -> None:
        self.rank = rank
        self.world = world
        self.single = world == 1
        self.sharing = 1
        self.steps: Any = None
        self.sums: Any = None
        self.results: Any = None
        if self.single:
            return
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
            self.calls, self.files = (
                Messages(topic, store, world, rank, limit, self.beat)
                for topic in ("calls", "files")
            )
            self.sums, self.results = (
                dist.new_group(backend="gloo", timeout=limit) for _ in range(2)
            )
            world_group = dist.group.WORLD
            # NCCL's own time-out ends the process without naming the layer: ours comes before it.
            if device == "cpu":
                self.steps = world_group
            else:
                self.steps = dist.new_group(backend="nccl", timeout=limit + GRACE)
            self._bind(device)
            if (
                device != "cpu"
            ):  # NCCL connects at the first call, which takes seconds: not within a step's time-out
                dist.all_reduce(torch.zeros(1, device=device), group=self.steps)
                torch.cuda.synchronize()
        atexit.register(self.close)

    @property
    def lost(self) -> Exception | None:
        """The reason why the ranks no longer meet; None while they do."""
        return None if self.single else self.beat.lost

    def abort(self) -> None:
        """Abort what the ranks do together; whatever waits for it continues."""
        if self.steps is not None:
            self.steps.abort()

    def close(self) -> None:
        """Tell the other ranks that this one ends."""
        if not self.single:
            self.beat.close()

    def _bind(self, device: str) -> None:
        """Let this rank have cores of its own among those of its host."""
        if not hasattr(os, "sched_getaffinity"):
            return
        mine = os.sched_getaffinity(0)
        gpu = cores.pci_address(torch.cuda.current_device()) if device == "cuda" else None
        every = self.calls.every((platform.node(), sorted(mine), gpu))
        here = [rank for rank in range(self.world) if every[rank][:2] == every[self.rank][:2]]
        self.sharing = len(here)
        if 1 < len(here) <= len(mine):
            parts = cores.divide(mine, [every[rank][2] for rank in here])
            if all(parts):
                cores.bind(parts[here.index(self.rank)])
                self.sharing = 1

    def settings(self, config: Any) -> Any:
        """Return rank 0's settings: a choice that each rank made by itself might be another on
        each."""
        return config if self.single else self.calls.broadcast(config)

    def shard(self, unit: Unit) -> Unit:
        """Return what this rank keeps and updates of `unit`."""
        return shard(unit, self.rank, self.world)

    def padded(self, unit: Unit) -> int:
        """Return the elements of all shards of a unit together."""
        return shard_numel(unit, self.world) * self.world

    def bounds(self, unit: Unit, span: slice | None = None) -> Bounds:
        """See `units.shard_bounds`."""
        return shard_bounds(unit, self.world, span)

    def row_bounds(self, unit: Unit, rows: Tensor) -> Bounds:
        """See `units.row_bounds`."""
        return row_bounds(unit, self.world, rows)

    def own(self, bounds: Bounds) -> slice:
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def rows(self, count: int) -> slice:
        """Return this rank's rows of a batch.

        Raises:
            ConfigError: the ranks cannot have equally many.
        """
        check_rows(count, self.world)
        return slice(self.rank, None, self.world)

    def gather(self, memory: Tensor, bounds: Bounds) -> None:
        """Fill every rank's part of `memory` (first dimension) from it, on the current stream."""
        with together():
            if _even(bounds):
                _all_gather(memory[: bounds[-1]], memory[self.own(bounds)], group=self.steps)
                return
            for rank in range(self.world):
                if bounds[rank] < bounds[rank + 1]:
                    dist.broadcast(memory[bounds[rank] : bounds[rank + 1]], rank, group=self.steps)

    def reduce(self, memory: Tensor, bounds: Bounds) -> None:
        """Sum every rank's part of `memory` on that rank; the rest becomes undefined. On the
        stream."""
        with together():
            if _even(bounds):
                _reduce_scatter(memory[self.own(bounds)], memory[: bounds[-1]], group=self.steps)
                return
            for rank in range(self.world):
                if bounds[rank] < bounds[rank + 1]:
                    dist.reduce(memory[bounds[rank] : bounds[rank + 1]], rank, group=self.steps)

    def all_reduce(self, memory: Tensor) -> None:
        """Sum `memory` into that of every rank, on the current stream (transfer thread)."""
        if not self.single:
            with together():
                dist.all_reduce(memory, group=self.steps)

    def first(self, memory: Tensor) -> None:
        """Fill `memory` with rank 0's, on the current stream (transfer thread)."""
        with together():
            dist.broadcast(memory, 0, group=self.steps)

    def sum(self, value: float) -> float:
        """Return the sum of all ranks' values, the same bits everywhere; waits (one thread at a
        time)."""
        if self.single:
            return value
        values = torch.zeros(self.world, dtype=torch.float64)
        values[self.rank] = value
        with together():
            dist.all_reduce(values, group=self.sums)
        return fsum(values.tolist())

    def collect(self, values: Tensor) -> Tensor:
        """Return [world, n] of every rank's values [n], on the host; waits (main thread)."""
        if self.single:
            return values[None]
        collected = [torch.empty_like(values) for _ in range(self.world)]
        with together():
            dist.all_gather(collected, values, group=self.results)
        return torch.stack(collected)

    def agree(self, problem: Exception | None) -> None:
        """Raise the first rank's problem on every rank."""
        for error in [problem] if self.single else self.calls.every(problem):
            if error is not None:
                raise error

    @contextmanager
    def lent(self, arrays: Arrays) -> Iterator[Arrays]:
        """See `Messages.lent`."""
        if self.single:
            yield arrays
        else:
            with self.calls.lent(arrays) as lent:
                yield lent


SINGLE = Ranks()
"""No other process."""


def launched() -> tuple[int, int]:
    """Return rank and number of processes that `torchrun` set, else 0 and 1."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def check_rows(rows: int, world: int) -> None:
    """Check that every rank has the same number of rows, so that all do the same transfers.

    Raises:
        ConfigError: the rows do not divide.
    """
    if rows % world:
        raise ConfigError(
            f"{rows} rows cannot be divided among {world} ranks",
            expected=f"train.batch_size, the rows of all ranks together, a multiple of {world}",
            received=rows,
        )


def join(device: str, timeout_s: float) -> tuple[Ranks, str]:
    """Return the processes that `torchrun` started, once all are there, and this one's device.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this host.
        TrainingError: the other ranks do not join.
    """
    rank, world = launched()
    if world == 1:
        return SINGLE, device
    kind = torch.device(device).type
    if kind == "cuda":
        local, count = (
            int(os.environ.get(name, value))
            for name, value in (("LOCAL_RANK", rank), (_LOCAL, world))
        )
        if torch.cuda.device_count() < count:
            raise ConfigError(
                "fewer GPUs than ranks on this host",
                expected=count,
                received=torch.cuda.device_count(),
            )
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    return Ranks(rank, world, timeout_s, kind), device


def _even(bounds: Bounds) -> bool:
    """True if all parts are equally long: one call moves them, over all links at once."""
    return bounds[1] > bounds[0] and all(
        b - a == bounds[1] - bounds[0] for a, b in pairwise(bounds)
    )
