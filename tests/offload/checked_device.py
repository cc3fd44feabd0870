"""The device, its kernels and its ranks, each of whose accesses is an actor's: see `happens_before`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ondevice.offload.device import Device
from ondevice.offload.units import Ranks
from tests.offload.clocks import Checker, Clock, place


class CheckedEvent:
    """A point in a lane."""

    def __init__(self, checker: Checker, clock: Clock) -> None:
        self.checker, self.clock, self.at = checker, clock, time.perf_counter()

    def done(self) -> bool:
        self.checker.merge(self.clock)
        return True

    def wait(self) -> None:
        self.checker.merge(self.clock)


class CheckedDevice(Device):
    """Computes and copies at once, and notes who touches what after what."""

    def __init__(self, checker: Checker) -> None:
        self.checker = checker

    def record(self, lane: Any) -> Any:
        with self.checker.lock:
            return CheckedEvent(self.checker, self.checker.leave(self.checker.lane(lane)))

    def hold(self, lane: Any, event: Any) -> None:
        with self.checker.lock:
            self.checker.merge(event.clock, self.checker.lane(lane))
            self.checker.issued(lane)

    def copy(self, lane: Any, target: Tensor, source: Tensor) -> None:
        c = self.checker
        with c.lock, c.quiet():
            actor = c.lane(lane)
            c.copied(source, c.access(actor, source, write=False))
            c.access(actor, target, write=True)
            c.issued(lane)
            target.copy_(source)

    @contextmanager
    def on(self, lane: Any) -> Iterator[None]:
        before, self.checker.local.lane = getattr(self.checker.local, "lane", None), lane
        try:
            yield
        finally:
            self.checker.local.lane = before

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self.checker.quiet():  # no lane fills it
            memory = super().pinned(numel, dtype)
        self.checker.on_host(memory)
        if numel:
            self.checker.name(memory, f"host memory of {place()}")
        return memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = super().empty(numel, dtype)
        if numel:
            self.checker.name(memory, f"device memory of {place()}")
        return memory

    def synchronize(self) -> None:
        for lane in ("compute", "h2d", "d2h", "comm"):
            self.record(lane).wait()


@cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...] | None:
    """An operator's arguments, and whether it writes to them; None for a view."""
    schema = [(one.name, one.alias_info) for one in func._schema.arguments]
    if any(alias is not None and not alias.is_write for _, alias in schema):
        return None
    return tuple((name, alias is not None) for name, alias in schema)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        if isinstance(value, (tuple, list))
        else []
    )


class Kernels(TorchDispatchMode):
    """PyTorch's kernels of one thread as accesses."""

    def __init__(self, checker: Checker, main: bool) -> None:
        super().__init__()
        self.checker, self.main = checker, main

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, c = kwargs or {}, self.checker
        arguments = _arguments(func)
        if arguments is None or getattr(c.local, "quiet", False):
            return func(*args, **kwargs)
        touched: list[tuple[Tensor, bool]] = []
        for number, (name, write) in enumerate(arguments):
            value = args[number] if number < len(args) else kwargs.get(name)
            touched += [(x, write) for x in _tensors(value) if x.numel()]
        with c.lock:
            self._count(touched, "_local_scalar_dense" in func.__name__)
            out = func(*args, **kwargs)
            c.check_freed()
            for x in _tensors(out) if self.main or self._held() else ():
                if not c.is_host(x) and not any(x is y for y, _ in touched):
                    c.allocated(x, self._lane())
        return out

    def _held(self) -> str | None:
        return getattr(self.checker.local, "lane", None)

    def _lane(self) -> str:
        return self.checker.lane(self._held() or "compute")

    def _count(self, touched: list[tuple[Tensor, bool]], waits: bool) -> None:
        c, held = self.checker, self._held()
        host, there = list[tuple[Tensor, bool]](), list[tuple[Tensor, bool]]()
        for x, write in touched:
            (host if c.is_host(x) else there).append((x, write))
        if there and (self.main or held):
            lane = self._lane()
            if (
                host or waits
            ):  # a copy that is not of the device's lanes, or a number: the thread waits for it
                c.merge(c.leave(lane))
                lane = self._lane()
            for x, write in there:
                c.access(lane, x, write)
        for x, write in host:
            c.access(c.me, x, write)


class CheckedRanks(Ranks):
    """The second of two ranks, alone: what it would do with the other is put into lanes, and uses the one communicator.
    The other's share of all weights is zero."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.rank, self.world, self.single = 1, 2, False
        self.beat = SimpleNamespace(lost=None)
        with checker.quiet():  # made before everything
            self.checker, self.communicator = checker, torch.zeros(1)
        checker.name(self.communicator, "the communicator")

    def _together(self, *touched: tuple[Tensor, bool]) -> None:
        c = self.checker
        lane = getattr(c.local, "lane", None)
        assert lane, "ranks communicate outside of a lane"
        with c.lock:
            for tensor, write in (*touched, (self.communicator, True)):
                c.access(c.lane(lane), tensor, write)
            c.issued(lane)

    def gather(self, memory: Tensor, bounds: Any) -> None:
        own = self.own(bounds)
        self._together(
            (memory[own], False), (memory[: own.start], True), (memory[own.stop : bounds[-1]], True)
        )

    def reduce(self, memory: Tensor, bounds: Any) -> None:
        self._together((memory[: bounds[-1]], True))

    def all_reduce(self, memory: Tensor) -> None:
        self._together((memory, True))

    def first(self, memory: Tensor) -> None:
        self._together((memory, True))

    def sum(self, value: float) -> float:
        return 2 * value

    def collect(self, values: Tensor) -> Tensor:
        return torch.stack([values, values])


def leave_out_hold(monkeypatch: Any, module: str, function: str) -> None:
    """Let no lane wait where `function` of a module (its file's name) asks for it: the checker has to notice."""
    hold = CheckedDevice.hold

    def without(self: CheckedDevice, lane: Any, event: Any) -> None:
        code = sys._getframe(1).f_code
        if (Path(code.co_filename).stem, code.co_name) != (module, function):
            hold(self, lane, event)

    monkeypatch.setattr(CheckedDevice, "hold", without)
