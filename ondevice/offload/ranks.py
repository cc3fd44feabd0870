"""Data parallelism with sharded states (ZeRO) under `torchrun`: the processes, and what they say to each other.

Every rank keeps a contiguous share of every unit, its masters and moments, and updates it: host memory, copies and
update are divided by the ranks. A rank copies its share to its accelerator over its own link, the accelerators gather
the unit from each other; gradients are summed on their way to the ranks that keep them (reduce-scatter), in the compute
dtype, as they are stored: half the bytes of float32, and each of the `world - 1` additions rounds to bfloat16, as
accumulation over micro-batches does.

Groups, each used by one thread, in an order that is the same on every rank. `steps`: NCCL on GPUs, gloo on the CPU, the
engine's transfer thread. `sums`: gloo, the update thread. `results`: gloo, the main thread in an evaluation. `calls`:
gloo, the main thread, for what rank 0 asks the others to do; it waits as long as rank 0 lives, since a checkpoint may
take any time. `files`: gloo, the threads that write a checkpoint; it waits likewise.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import fsum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ondevice.core.errors import ConfigError, TrainingError
from ondevice.offload import cores, shares

if TYPE_CHECKING:
    from ondevice.offload.units import Unit

CHUNK_BYTES = 256 << 20
"""Of one message between hosts' memories."""
_LOCAL = "LOCAL_WORLD_SIZE"
PATIENCE = timedelta(days=30)
T = TypeVar("T")
Bounds = tuple[int, ...]
"""Where each rank's part begins, and where the last one ends."""
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Arrays(Protocol):
    """Arrays by name, of a checkpoint that lies here or on rank 0."""

    def get(self, name: str, /) -> Any:
        """Return what has `shape` and `dtype` and gives slices like an array; None where there is none."""
        ...


class Ranks:
    """This process among those that train together; alone, every call gives back what it got at once.

    Attributes:
        sharing: ranks that may use the same cores as this one.
    """

    def __init__(self, rank: int = 0, world: int = 1, timeout_s: float = 600.0, device: str = "cpu") -> None:
        self.rank, self.world, self.single = rank, world, world == 1
        self.sharing = 1
        self.steps: Any = None
        self.calls: Any = None
        self.sums: Any = None
        self.results: Any = None
        self.files: Any = None
        if self.single:
            return
        limit = timedelta(seconds=timeout_s)
        with _together():
            dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)
            self.calls, self.files = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
            self.sums, self.results = (dist.new_group(backend="gloo", timeout=limit) for _ in range(2))
            world_group = dist.group.WORLD
            self.steps = world_group if device == "cpu" else dist.new_group(backend="nccl", timeout=limit)
            self._bind(device)

    def _bind(self, device: str) -> None:
        """Let this rank have cores of its own among those of its host."""
        if not hasattr(os, "sched_getaffinity"):
            return
        mine = os.sched_getaffinity(0)
        gpu = cores.pci_address(torch.cuda.current_device()) if device == "cuda" else None
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, (platform.node(), sorted(mine), gpu), group=self.calls)
        here = [rank for rank in range(self.world) if every[rank][:2] == every[self.rank][:2]]
        self.sharing = len(here)
        if 1 < len(here) <= len(mine):
            parts = cores.divide(mine, [every[rank][2] for rank in here])
            if all(parts):
                cores.bind(parts[here.index(self.rank)])
                self.sharing = 1

    def share(self, unit: Unit) -> Unit:
        """Return what this rank keeps and updates of `unit`."""
        return shares.share(unit, self.rank, self.world)

    def padded(self, unit: Unit) -> int:
        """Return the elements of all shares together: what a unit needs where all of them come together."""
        return shares.length(unit, self.world) * self.world

    def bounds(self, unit: Unit, span: slice | None = None) -> Bounds:
        """See `shares.bounds`."""
        return shares.bounds(unit, self.world, span)

    def row_bounds(self, unit: Unit, rows: Tensor) -> Bounds:
        """See `shares.row_bounds`."""
        return shares.row_bounds(unit, self.world, rows)

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
        """Fill every rank's part of `memory` (its first dimension) from that rank, on the current stream (transfer
        thread)."""
        with _together():
            if _even(bounds):
                _all_gather(memory[: bounds[-1]], memory[self.own(bounds)], group=self.steps)
                return
            for rank in range(self.world):
                if bounds[rank] < bounds[rank + 1]:
                    dist.broadcast(memory[bounds[rank] : bounds[rank + 1]], rank, group=self.steps)

    def reduce(self, memory: Tensor, bounds: Bounds) -> None:
        """Sum every rank's part of `memory` there; the rest of it is undefined after. On the current stream (transfer
        thread)."""
        with _together():
            if _even(bounds):
                _reduce_scatter(memory[self.own(bounds)], memory[: bounds[-1]], group=self.steps)
                return
            for rank in range(self.world):
                if bounds[rank] < bounds[rank + 1]:
                    dist.reduce(memory[bounds[rank] : bounds[rank + 1]], rank, group=self.steps)

    def all_reduce(self, memory: Tensor) -> None:
        """Sum `memory` into that of every rank, on the current stream (transfer thread)."""
        if not self.single:
            with _together():
                dist.all_reduce(memory, group=self.steps)

    def sum(self, value: float) -> float:
        """Return the sum of all ranks' values, the same bits everywhere; waits (one thread at a time)."""
        if self.single:
            return value
        values = torch.zeros(self.world, dtype=torch.float64)
        values[self.rank] = value
        with _together():
            dist.all_reduce(values, group=self.sums)
        return fsum(values.tolist())

    def collect(self, values: Tensor) -> Tensor:
        """Return [world, n] of every rank's values [n], on the host; waits (main thread)."""
        if self.single:
            return values[None]
        collected = [torch.empty_like(values) for _ in range(self.world)]
        with _together():
            dist.all_gather(collected, values, group=self.results)
        return torch.stack(collected)

    def broadcast_object(self, value: T | None = None) -> T:
        """Return the value that rank 0 gives, on every rank."""
        values: list[Any] = [value]
        if not self.single:
            with _together():
                dist.broadcast_object_list(values, src=0, group=self.calls)
        return values[0]

    def agree(self, problem: Exception | None) -> None:
        """Raise the first rank's problem on every rank."""
        for error in self._every(problem, self.calls):
            if error is not None:
                raise error

    def tell(self, value: T | None = None) -> T | None:
        """Return the value that rank 0 gives, on every rank (threads that write a checkpoint)."""
        values: list[Any] = [value]
        with _together():
            dist.broadcast_object_list(values, src=0, group=self.files)
        return values[0]

    def hear(self, value: T) -> list[T]:
        """Return every rank's value, on every rank (threads that write a checkpoint)."""
        return self._every(value, self.files)

    def _every(self, value: T, group: Any) -> list[T]:
        if self.single:
            return [value]
        values: list[Any] = [None] * self.world
        with _together():
            dist.all_gather_object(values, value, group=group)
        return values

    @contextmanager
    def lent(self, arrays: Arrays) -> Iterator[Arrays]:
        """Yield the arrays of rank 0 by name, of which slices are fetched when they are asked for; rank 0 serves the
        others when it is done."""
        if self.rank == 0:
            yield arrays
            if not self.single:
                self._serve(arrays)
            return
        try:
            yield _Remote(self)
        finally:
            with _together():
                dist.send_object_list([None], 0, group=self.calls)

    def _serve(self, arrays: Arrays) -> None:
        with _together():
            for other in range(1, self.world):
                while (asked := self._ask(other)) is not None:
                    name, span = asked
                    value = arrays.get(name)
                    if span is not None:
                        self._send(other, name, torch.from_numpy(value[span]))
                        continue
                    head = None if value is None else (tuple(value.shape), value.dtype)
                    dist.send_object_list([head], other, group=self.calls)

    def _ask(self, source: int) -> Any:
        values: list[Any] = [None]
        dist.recv_object_list(values, source, group=self.calls)
        return values[0]

    def _send(self, target: int, name: str | None, tensor: Tensor | None) -> None:
        head = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        dist.send_object_list([(name, head)], target, group=self.calls)
        if tensor is not None and tensor.numel():
            for chunk in tensor.contiguous().reshape(-1).view(torch.uint8).split(CHUNK_BYTES):
                dist.send(chunk, target, group=self.calls)

    def _receive(self, source: int) -> tuple[str | None, Tensor | None]:
        name, head = self._ask(source)
        if head is None:
            return name, None
        tensor = torch.empty(head[0], dtype=head[1])
        if tensor.numel():
            for chunk in tensor.reshape(-1).view(torch.uint8).split(CHUNK_BYTES):
                dist.recv(chunk, source, group=self.calls)
        return name, tensor


class _Remote:
    """Arrays of rank 0, seen from another."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def get(self, name: str, /) -> Any:
        with _together():
            dist.send_object_list([(name, None)], 0, group=self.ranks.calls)
            head = self.ranks._ask(0)
        return None if head is None else _RemoteArray(self.ranks, name, *head)


class _RemoteArray:
    """One of them; its elements come when they are asked for."""

    def __init__(self, ranks: Ranks, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.ranks, self.name, self.shape, self.dtype = ranks, name, shape, dtype

    def __getitem__(self, span: slice) -> np.ndarray:
        with _together():
            dist.send_object_list([(self.name, span)], 0, group=self.ranks.calls)
            tensor = self.ranks._receive(0)[1]
        return np.zeros(0, self.dtype) if tensor is None else tensor.numpy()


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
        TrainingError: the others do not come.
    """
    rank, world = launched()
    if world == 1:
        return SINGLE, device
    kind = torch.device(device).type
    if kind == "cuda":
        local, count = (int(os.environ.get(name, value)) for name, value in (("LOCAL_RANK", rank), (_LOCAL, world)))
        if torch.cuda.device_count() < count:
            raise ConfigError("there are fewer GPUs than ranks", expected=count, received=torch.cuda.device_count())
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    return Ranks(rank, world, timeout_s, kind), device


def _even(bounds: Bounds) -> bool:
    """True where all parts are equally long: one call moves them, over all links at once."""
    return bounds[1] > bounds[0] and all(b - a == bounds[1] - bounds[0] for a, b in zip(bounds, bounds[1:]))


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            "another rank has ended or does not answer",
            received=str(error).split(". ")[0][:300],
            hint="its own message says why; the last checkpoint is intact, resume from it",
        ) from error
