"""A checker of order between threads and lanes: whatever touches memory must happen after what conflicts with it.

Every host thread, every lane of the device and every transfer to or from a disk has a vector clock. An event, a task, a
buffer of a pool carry the clock of whoever gave them, and who waits for them takes it over; nothing else orders two
actors, however the schedule of this run came out. So what two threads put into one lane is in order only where one of
the threads knew of the other's. For each byte range the last writer and the readers since are kept:
an access that does not happen after a conflicting one is a race, with the names of both. So a `hold` that is missing
is found on a CPU, where every copy runs at once and in order.

What counts as an access: copies of the device, every PyTorch kernel of the main thread (on the compute lane, or the
thread's own where the memory is the host's), the updates and row operations on the host, reads and writes of a disk
file, and, for several ranks, the communicator itself. Memory that is freed while a copy may still read it counts, too.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ondevice.offload import worker
from ondevice.offload.device import CpuDevice
from ondevice.offload.ranks import Ranks

Clock = dict[str, int]
Spans = list[tuple[int, int]]


def join(clock: Clock, other: Clock) -> None:
    for actor, at in other.items():
        if at > clock.get(actor, 0):
            clock[actor] = at


@dataclass
class Access:
    actor: str
    at: int
    start: int
    end: int
    write: bool
    what: str

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} of {self.what} on {self.actor}"


class Memory:
    """One storage: its accesses, and the lane that made it, to which it goes back."""

    def __init__(self, storage: Any, name: str) -> None:
        self.alive, self.name, self.accesses, self.lane = StorageWeakRef(storage), name, list[Access](), ""


class Checker:
    """Clocks and accesses of one run.

    Attributes:
        races: what was found, in words; each pair of places once.
        accesses: how many were checked.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clocks: dict[str, Clock] = {}
        self.memories: dict[int, Memory] = {}
        self.host: dict[int, StorageWeakRef] = {}
        self.leaving: list[tuple[Memory, Access]] = []
        self.races: dict[str, None] = {}
        self.accesses = 0
        self.local = threading.local()
        self.issues: dict[str, dict[str, tuple[list[int], list[Clock]]]] = {}

    @property
    def me(self) -> str:
        return f"thread {threading.current_thread().name}"

    def clock(self, actor: str) -> Clock:
        return self.clocks.setdefault(actor, {actor: 0})

    def leave(self, actor: str | None = None) -> Clock:
        """A copy of an actor's clock, to be handed over; what it does from now on is not in it."""
        with self.lock:
            actor = actor or self.me
            clock = dict(self.clock(actor))
            self.clock(actor)[actor] += 1
            return clock

    def merge(self, clock: Clock, actor: str | None = None) -> None:
        """The actor goes on after what a clock says."""
        with self.lock:
            join(self.clock(actor or self.me), clock)

    def lane(self, lane: str) -> str:
        """The actor of what this thread puts into a lane, after all that the thread did or knows of."""
        actor, mine = f"{lane} ({self.me})", self.clock(self.me)
        mine[self.me] += 1
        clock = self.clock(actor)
        join(clock, mine)
        for other, (times, clocks) in self.issues.get(lane, {}).items():
            if other != self.me and (known := bisect_right(times, mine.get(other, 0))):
                join(clock, clocks[known - 1])
        return actor

    def issued(self, lane: str) -> None:
        """Something was put into a lane by this thread: others who know of it come after it."""
        times, clocks = self.issues.setdefault(lane, {}).setdefault(self.me, ([], []))
        times.append(self.clock(self.me)[self.me])
        clocks.append(dict(self.clock(f"{lane} ({self.me})")))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """PyTorch's kernels inside are counted by whoever calls."""
        before, self.local.quiet = getattr(self.local, "quiet", False), True
        try:
            yield
        finally:
            self.local.quiet = before

    def name(self, tensor: Tensor, name: str) -> None:
        if tensor.numel():
            self._memory(tensor).name = name

    def is_host(self, tensor: Tensor) -> bool:
        actual = self.host.get(tensor.untyped_storage().data_ptr())
        return actual is not None and not actual.expired()

    def on_host(self, *tensors: Tensor | None) -> None:
        """This memory is the host's: kernels on it run in the calling thread."""
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                self.host[tensor.untyped_storage().data_ptr()] = StorageWeakRef(tensor.untyped_storage())

    def access(self, actor: str, tensor: Tensor, write: bool, spans: Spans | None = None) -> Access | None:
        """An actor touches a tensor, or some spans of it in bytes."""
        if not tensor.numel():
            return None
        size = tensor.element_size()
        first = tensor.storage_offset() * size
        reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        actual = None
        with self.lock:
            memory, clock = self._memory(tensor), self.clock(actor)
            clock[actor] += 1
            for low, high in spans if spans is not None else [(0, (reach + 1) * size)]:
                actual = Access(actor, clock[actor], first + low, first + high, write, _place())
                self._check(memory, actual, clock)
        return actual

    def _check(self, memory: Memory, new: Access, clock: Clock) -> None:
        self.accesses += 1
        kept = []
        for old in memory.accesses:
            ordered = clock.get(old.actor, 0) >= old.at
            overlap = old.start < new.end and new.start < old.end
            if overlap and not ordered and (old.write or new.write):
                self.races[f"{memory.name}: {new} is not after the {old}"] = None
            inside = new.start <= old.start and old.end <= new.end
            if not (inside and ordered and (new.write or (old.actor == new.actor and not old.write))):
                kept.append(old)
        memory.accesses = [*kept, new]

    def allocated(self, tensor: Tensor, lane: str) -> None:
        """A kernel's output: new memory, or some that went back to the lane."""
        if tensor.numel():
            self.access(lane, tensor, write=True)
            self._memory(tensor).lane = lane

    def copied(self, source: Tensor, access: Access | None) -> None:
        """Memory that nothing else keeps must live until its copy has ended."""
        with self.lock:
            memory = self._memory(source)
            if access is not None and access.actor != memory.lane and not self.is_host(source):
                self.leaving.append((memory, access))

    def check_freed(self) -> None:
        """Memory that was freed goes to its lane's next kernel: copies elsewhere must have ended for someone by now."""
        with self.lock:
            kept = []
            for memory, access in self.leaving:
                ended = any(clock.get(access.actor, 0) >= access.at for name, clock in self.clocks.items()
                            if name.startswith(("compute", "thread")))  # fmt: skip
                if memory.alive.expired() and not ended:
                    self.races[f"{memory.name}: freed before the {access} has ended"] = None
                elif not ended:
                    kept.append((memory, access))
            self.leaving = kept

    def _memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        actual = self.memories.get(storage.data_ptr())
        if actual is None or actual.alive.expired():  # another has its address now
            actual = self.memories[storage.data_ptr()] = Memory(storage, f"a tensor of {_place()}")
        return actual


def _place() -> str:
    """The line of the package that runs."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/ondevice/" in name and "/runtime_ops/" not in name:
            return f"{name.rsplit('/ondevice/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the test"


class CheckedEvent:
    """A point in a lane."""

    def __init__(self, checker: Checker, clock: Clock) -> None:
        self.checker, self.clock, self.at = checker, clock, time.perf_counter()

    def done(self) -> bool:
        self.checker.merge(self.clock)
        return True

    def wait(self) -> None:
        self.checker.merge(self.clock)


class CheckedDevice(CpuDevice):
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
            self.checker.name(memory, f"host memory of {_place()}")
        return memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = super().empty(numel, dtype)
        if numel:
            self.checker.name(memory, f"device memory of {_place()}")
        return memory

    def synchronize(self) -> None:
        for lane in ("compute", "h2d", "d2h", "comm"):
            self.record(lane).wait()


class Kernels(TorchDispatchMode):
    """PyTorch's kernels of one thread as accesses."""

    def __init__(self, checker: Checker, main: bool) -> None:
        super().__init__()
        self.checker, self.main = checker, main

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, c = kwargs or {}, self.checker
        schema = func._schema.arguments
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema)
        if view or getattr(c.local, "quiet", False):
            return func(*args, **kwargs)
        touched: list[tuple[Tensor, bool]] = []
        for number, argument in enumerate(schema):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            write = argument.alias_info is not None and argument.alias_info.is_write
            touched += [(x, write) for x in tree_leaves(value) if isinstance(x, Tensor) and x.numel()]
        with c.lock:
            self._count(touched, "_local_scalar_dense" in func.__name__)
            out = func(*args, **kwargs)
            c.check_freed()
            for x in tree_leaves(out) if self.main or self._held() else ():
                if isinstance(x, Tensor) and not c.is_host(x) and not any(x is y for y, _ in touched):
                    c.allocated(x, self._lane())
        return out

    def _held(self) -> str | None:
        return getattr(self.checker.local, "lane", None)

    def _lane(self) -> str:
        return self.checker.lane(self._held() or "compute")

    def _count(self, touched: list[tuple[Tensor, bool]], waits: bool) -> None:
        c, held = self.checker, self._held()
        host = [(x, write) for x, write in touched if c.is_host(x)]
        there = [(x, write) for x, write in touched if not c.is_host(x)]
        if there and (self.main or held):
            lane = self._lane()
            if host or waits:  # a copy that is not of the device's lanes, or a number: the thread waits for it
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
        self._together((memory[own], False), (memory[: own.start], True), (memory[own.stop : bounds[-1]], True))

    def reduce(self, memory: Tensor, bounds: Any) -> None:
        self._together((memory[: bounds[-1]], True))

    def all_reduce(self, memory: Tensor) -> None:
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


@contextmanager
def checking(monkeypatch: Any, *modules: Any) -> Iterator[tuple[Checker, CheckedDevice]]:
    """A checker, and the device to open engines on. `modules` are those with threads, updates and disk files of
    engines."""
    checker = Checker()
    _watch_threads(checker, monkeypatch, modules)
    for module in modules:
        for name in _WRAPPED:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, _WRAPPED[name](checker, getattr(module, name)))
    with Kernels(checker, main=True):
        yield checker, CheckedDevice(checker)


def _watch_threads(checker: Checker, monkeypatch: Any, modules: tuple[Any, ...]) -> None:
    class Event:
        """`threading.Event`, over which clocks go."""

        def __init__(self) -> None:
            self.event, self.clock = threading.Event(), Clock()

        def set(self) -> None:
            with checker.lock:
                join(self.clock, checker.leave())
            self.event.set()

        def wait(self, timeout: float | None = None) -> bool:
            return self.event.wait(timeout) and self.is_set()

        def is_set(self) -> bool:
            if self.event.is_set():
                checker.merge(self.clock)
            return self.event.is_set()

    class Lock:
        """`threading.Lock` around what threads hand to each other."""

        def __init__(self) -> None:
            self.lock, self.clock = threading.Lock(), Clock()

        def __enter__(self) -> None:
            self.lock.acquire()
            checker.merge(self.clock)

        def __exit__(self, *_: Any) -> None:
            with checker.lock:
                join(self.clock, checker.leave())
            self.lock.release()

    mine = SimpleNamespace(Event=Event, Lock=Lock, Condition=threading.Condition, Thread=threading.Thread)
    for module in (worker, *modules):
        if hasattr(module, "threading"):
            monkeypatch.setattr(module, "threading", mine)
    submit, give, borrow = worker.Worker.submit, worker.Pool.give, worker.Pool.borrow
    given: dict[int, Clock] = {}

    def submitted(self: Any, doing: str, run: Any, *rest: Any, **more: Any) -> Any:
        clock = checker.leave()

        def checked() -> Any:
            checker.merge(clock)
            with Kernels(checker, main=False):
                return run()

        return submit(self, doing, checked, *rest, **more)

    def giving(self: Any, buffer: Tensor) -> None:
        given[buffer.data_ptr()] = checker.leave()
        give(self, buffer)

    def borrowing(self: Any, doing: str) -> Tensor:
        buffer = borrow(self, doing)
        checker.merge(given.get(buffer.data_ptr(), {}))
        return buffer

    monkeypatch.setattr(worker.Worker, "submit", submitted)
    monkeypatch.setattr(worker.Pool, "give", giving)
    monkeypatch.setattr(worker.Pool, "borrow", borrowing)


def _rows(rows: Tensor | None, width_bytes: int) -> Spans | None:
    """Runs of neighbouring rows, in bytes."""
    if rows is None:
        return None
    spans: Spans = []
    for row in rows.tolist():
        if spans and spans[-1][1] == row * width_bytes:
            spans[-1] = (spans[-1][0], (row + 1) * width_bytes)
        else:
            spans.append((row * width_bytes, (row + 1) * width_bytes))
    return spans


def _adam(checker: Checker, update: Any) -> Any:
    def checked(
        gradient: Tensor, state: Any, *rest: Any, rows: Tensor | None = None, width: int = 0, **more: Any
    ) -> None:
        moments = state.moments
        written = [t for t in (state.master, state.high, state.low, *moments.tensors().values()) if t is not None]
        checker.on_host(gradient, *written)
        checker.access(checker.me, gradient, False, _rows(rows, width * gradient.element_size()))
        for one in written:
            whole = one.numel() == gradient.numel()  # scales of a tile span no two rows, and are as good as their rows
            checker.access(checker.me, one, True, _rows(rows, width * one.element_size()) if whole else None)
        with checker.quiet():
            update(gradient, state, *rest, **({"rows": rows, "width": width} if rows is not None else {}), **more)

    return checked


def _device_adam(checker: Checker, update: Any) -> Any:
    """AdamW of a state that stays on the accelerator: one kernel of the lane that computes, or gathers after."""

    def checked(gradient: Tensor, state: Any, adam: Any, scale: Tensor | None, *rest: Any) -> None:
        written = [t for t in (state.master, state.high, state.low, *state.moments.tensors().values()) if t is not None]
        with checker.lock, checker.quiet():
            lane = checker.lane(getattr(checker.local, "lane", None) or "compute")
            for one in (gradient, scale):
                if one is not None:
                    checker.access(lane, one, False)
            for one in written:
                checker.access(lane, one, True)
            update(gradient, state, adam, scale, *rest)

    return checked


class _RowOps:
    """`runtime_ops.rows`: a table's rows, and what they come from or go to."""

    def __init__(self, checker: Checker, module: Any) -> None:
        self.checker, self.module = checker, module

    def __getattr__(self, name: str) -> Any:
        def checked(table: Tensor, rows: Tensor, *rest: Any) -> None:
            c, spans = self.checker, _rows(rows, table.shape[1] * table.element_size())
            c.on_host(table)
            c.access(c.me, table, name != "gather", spans)
            for other in rest:
                if isinstance(other, Tensor):
                    c.on_host(other)
                    c.access(c.me, other, name == "gather")
            with c.quiet():
                getattr(self.module, name)(table, rows, *rest)

        return checked


class _Future:
    """A transfer's result, with its clock."""

    def __init__(self, checker: Checker, future: Any, clock: Clock) -> None:
        self.checker, self.future, self.clock = checker, future, clock

    def result(self, *timeout: Any) -> None:
        self.future.result(*timeout)
        self.checker.merge(self.clock)

    def done(self) -> bool:
        return self.future.done()

    def add_done_callback(self, call: Any) -> None:
        self.future.add_done_callback(call)


def _tier_file(checker: Checker, kind: Any) -> Any:
    class Checked(kind):
        """A disk file: each transfer is an actor of its own until someone asks for its result."""

        def write(self, record: int, source: Tensor) -> Any:
            return self._moved(record, source, super().write(record, source), False)

        def read(self, record: int, into: Tensor) -> Any:
            return self._moved(record, into, super().read(record, into), True)

        def _moved(self, record: int, memory: Tensor, future: Any, write: bool) -> Any:
            with checker.lock:
                actor = f"disk transfer {len(checker.clocks)} of {self.path.name} {record}"
                checker.merge(checker.leave(), actor)
                checker.access(actor, memory, write)
                return _Future(checker, future, checker.leave(actor))

    return Checked


_WRAPPED: dict[str, Any] = {
    "layer_adam": _adam, "torch_adam": _adam, "device_adam": _device_adam, "row_ops": _RowOps, "TierFile": _tier_file,
}  # fmt: skip


def names(checker: Checker, thing: Any, path: str, depth: int = 4) -> None:
    """Give memory the names of the attributes that hold it."""
    if isinstance(thing, Tensor):
        checker.name(thing, path)
    elif depth and isinstance(thing, (list, tuple)):
        for number, one in enumerate(thing):
            names(checker, one, f"{path}[{number}]", depth - 1)
    elif depth and isinstance(thing, dict):
        for key, one in thing.items():
            names(checker, one, f"{path}[{key}]", depth - 1)
    elif depth and type(thing).__module__.startswith("ondevice.") and hasattr(thing, "__dict__"):
        for key, one in vars(thing).items():
            if key not in ("family", "config", "units", "device", "timeline", "watch"):
                names(checker, one, f"{path}.{key}", depth - 1)
