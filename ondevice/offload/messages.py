"""Messages between ranks outside of their steps: objects, arrays of a checkpoint, signs of life.

Rank 0 may read data, write a checkpoint, or evaluate for any time while the others wait for its
next message. So before a message all meet at a counter in `torchrun`'s store, which they poll, and
a thread of each rank gives a sign of life every second. A rank that is dead, stopped, or behind a
broken network gives none, which ends every wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ondevice.core.errors import TrainingError
from ondevice.offload.guard import GONE, HINT
from ondevice.offload.units import Arrays
from ondevice.offload.worker import Patience

CHUNK_BYTES = 256 << 20
"""Of one message between hosts' memories."""
PERIOD_S = 1.0
LOOK_S = 0.002
WAIT_S = 0.05
T = TypeVar("T")


@contextmanager
def together() -> Iterator[None]:
    """Turn what torch.distributed raises when another rank is gone into an error that says so.

    Raises:
        TrainingError: instead of torch's own error.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise TrainingError(GONE, received=str(error).split(". ")[0][:300], hint=HINT) from error


class Beat:
    """A sign of life of each rank every second, in `torchrun`'s store."""

    def __init__(self, store: Any, rank: int, world: int, limit: timedelta) -> None:
        self.store = store
        self.rank = rank
        self.limit_s = limit.total_seconds()
        self.counts = [0] * world
        self.seen = [Patience() for _ in range(world)]
        self.failure: Exception | None = None
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run, name="ondevice-beat", daemon=True)
        self.thread.start()

    @property
    def lost(self) -> Exception | None:
        """Why a rank, or the store's host, is taken for gone."""
        late_s = [patience.spent() for patience in self.seen]
        if self.failure is None and max(late_s) > self.limit_s:
            return RuntimeError(
                f"rank {late_s.index(max(late_s))} gave no sign of life for {max(late_s):.1f} s"
            )
        return self.failure

    def check(self) -> None:
        """Raise if another rank is gone.

        Raises:
            TrainingError: it is.
        """
        with together():
            if (lost := self.lost) is not None:
                raise lost

    def close(self) -> None:
        """Let the others know that this rank ends; and leave no thread inside torch, which would
        end with the process there and abort it."""
        self.ending.set()
        self.thread.join(2 * PERIOD_S)

    def _run(self) -> None:
        try:
            while not self.ending.wait(min(PERIOD_S, self.limit_s / 8)):
                self.store.add(f"beat/{self.rank}", 1)
                for rank, before in enumerate(self.counts):
                    self.seen[rank].spent()
                    self.counts[rank] = self.store.add(f"beat/{rank}", 0)
                    if self.counts[rank] != before:
                        self.seen[rank] = Patience()
                if self.store.add("ended", 0):
                    self.failure = RuntimeError("a rank has ended")
            self.store.add("ended", 1)
        except (RuntimeError, ValueError) as error:
            self.failure = error


class Messages:
    """Objects between the threads of all ranks that serve one topic, and say the same things in the
    same order."""

    def __init__(
        self, topic: str, store: Any, world: int, rank: int, limit: timedelta, beat: Beat
    ) -> None:
        self.topic = topic
        self.store = store
        self.world = world
        self.rank = rank
        self.beat = beat
        self.group: Any = dist.new_group(backend="gloo", timeout=limit)
        self.count = 0

    def meet(self) -> None:
        """Wait for all ranks, for any time, while they live.

        Raises:
            TrainingError: one is gone.
        """
        self.count += 1
        stop = threading.Event()
        errors = list[Exception]()

        def look() -> None:
            try:
                here = self.store.add(f"{self.topic}/{self.count}", 1)
                while here < self.world and not stop.wait(LOOK_S):
                    here = self.store.add(f"{self.topic}/{self.count}", 0)
                if here == self.world and self.rank == 0 and self.count > 1:
                    self.store.delete_key(f"{self.topic}/{self.count - 1}")
            except (RuntimeError, ValueError) as error:
                errors.append(error)

        # A separate thread: if the store's host is stopped or cut off, it waits for ever.
        thread = threading.Thread(target=look, name="ondevice-meet", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(WAIT_S)
                if thread.is_alive():  # a rank that has met this one may have ended since
                    self.beat.check()
        finally:
            stop.set()
            thread.join(WAIT_S)
        with together():
            if errors:
                raise errors[0]

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank."""
        values: list[Any] = [value]
        self.meet()
        with together():
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def every(self, value: T) -> list[T]:
        """Return every rank's value, on every rank."""
        values: list[Any] = [None] * self.world
        self.meet()
        with together():
            dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def lent(self, arrays: Arrays) -> Iterator[Arrays]:
        """Yield the arrays of rank 0 by name, of which slices are fetched when they are asked for;
        rank 0 serves the others when it is done."""
        if self.rank == 0:
            yield arrays
            for other in range(1, self.world):
                self._serve(arrays, other)
            return
        try:
            yield _Remote(self)
        finally:
            self.send(0, None)

    def send(self, target: int, value: Any) -> None:
        with together():
            dist.send_object_list([value], target, group=self.group)

    def receive(self, source: int) -> Any:
        values: list[Any] = [None]
        with together():
            dist.recv_object_list(values, source, group=self.group)
        return values[0]

    def send_memory(self, target: int, memory: Tensor) -> None:
        with together():
            for chunk in (
                memory.contiguous().view(-1).view(torch.uint8).split(CHUNK_BYTES)
                if memory.numel()
                else ()
            ):
                dist.send(chunk, target, group=self.group)

    def receive_memory(self, source: int, memory: Tensor) -> Tensor:
        with together():
            for chunk in memory.view(torch.uint8).split(CHUNK_BYTES) if memory.numel() else ():
                dist.recv(chunk, source, group=self.group)
        return memory

    def _serve(self, arrays: Arrays, other: int) -> None:
        while (asked := self.receive(other)) is not None:
            name, span = asked
            value = arrays.get(name)
            if span is None:
                self.send(other, None if value is None else (tuple(value.shape), value.dtype))
            else:
                self.send_memory(other, torch.from_numpy(value[span]))


class _Remote:
    """Arrays of rank 0, seen from another."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages

    def get(self, name: str, /) -> Any:
        self.messages.send(0, (name, None))
        head = self.messages.receive(0)
        if head is None:
            return None
        return _RemoteArray(self.messages, name, *head)


class _RemoteArray:
    """One of them; its elements come when they are asked for."""

    def __init__(self, messages: Messages, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.messages = messages
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def __getitem__(self, span: slice) -> np.ndarray:
        self.messages.send(0, (self.name, span))
        count = len(range(*span.indices(self.shape[0])))
        memory = torch.from_numpy(np.zeros((count, *self.shape[1:]), self.dtype))
        self.messages.receive_memory(0, memory.view(-1))
        return memory.numpy()
