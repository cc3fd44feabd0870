"""Vector clocks and the accesses of memory that they order: the core of `happens_before`."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

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


class Alive(StorageWeakRef):
    """Asked at every access, so without the ways round of the class below it."""

    def expired(self) -> bool:
        return bool(torch.UntypedStorage._expired(self.cdata))


class Memory:
    """One storage: its accesses, and the lane that made it, to which it goes back."""

    def __init__(self, storage: Any, name: str) -> None:
        self.alive, self.name, self.accesses, self.lane = Alive(storage), name, list[Access](), ""


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
        self.host: dict[int, Alive] = {}
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
                self.host[tensor.untyped_storage().data_ptr()] = Alive(tensor.untyped_storage())

    def access(
        self, actor: str, tensor: Tensor, write: bool, spans: Spans | None = None
    ) -> Access | None:
        """An actor touches a tensor, or some spans of it in bytes."""
        if not tensor.numel():
            return None
        size = tensor.element_size()
        first = tensor.storage_offset() * size
        reach = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        actual = None
        with self.lock:
            memory, clock = self._memory(tensor), self.clock(actor)
            clock[actor] += 1
            for low, high in spans if spans is not None else [(0, (reach + 1) * size)]:
                actual = Access(actor, clock[actor], first + low, first + high, write, place())
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
            if not (
                inside and ordered and (new.write or (old.actor == new.actor and not old.write))
            ):
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
        if not self.leaving:
            return
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
            actual = self.memories[storage.data_ptr()] = Memory(storage, f"a tensor of {place()}")
        return actual


@cache
def _ours(file: str) -> str | None:
    """A file's path in the package, if it is one of the package."""
    return (
        file.rsplit("/ondevice/", 1)[1]
        if "/ondevice/" in file and "/runtime_ops/" not in file
        else None
    )


def place() -> str:
    """The line of the package that runs."""
    frame = sys._getframe(2)
    while frame is not None:
        if (name := _ours(frame.f_code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the test"
