"""Threads, updates, rows of tables and disk files of the host as accesses: see `happens_before`."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ondevice.offload import worker
from tests.offload.checked_device import Kernels
from tests.offload.clocks import Checker, Clock, Spans, join


def watch_threads(checker: Checker, monkeypatch: Any, modules: tuple[Any, ...]) -> None:
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

    mine = SimpleNamespace(
        Event=Event, Lock=Lock, Condition=threading.Condition, Thread=threading.Thread
    )
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
        gradient: Tensor,
        state: Any,
        *rest: Any,
        rows: Tensor | None = None,
        width: int = 0,
        undo: Any = None,
        **more: Any,
    ) -> None:
        written = list(state.tensors().values())
        record = list(undo.tensors().values()) if undo else []
        checker.on_host(gradient, *written, *record)
        for one in record:
            checker.access(checker.me, one, True)
        checker.access(checker.me, gradient, False, _rows(rows, width * gradient.element_size()))
        for one in written:
            whole = (
                one.numel() == gradient.numel()
            )  # scales of a tile span no two rows, and are as good as their rows
            checker.access(
                checker.me, one, True, _rows(rows, width * one.element_size()) if whole else None
            )
        with checker.quiet():
            update(
                gradient,
                state,
                *rest,
                **({"rows": rows, "width": width} if rows is not None else {}),
                **({"undo": undo} if undo else {}),
                **more,
            )

    return checked


def _undone(checker: Checker, update: Any) -> Any:
    """A recorded step that is taken back, or stands."""

    def checked(gradient: Tensor, state: Any, adam: Any, record: Any, **more: Any) -> None:
        written, read = list(state.tensors().values()), [gradient, *record.tensors().values()]
        checker.on_host(*written, *read)
        for one in written:
            checker.access(checker.me, one, True)
        for one in read:
            checker.access(checker.me, one, False)
        with checker.quiet():
            update(gradient, state, adam, record, **more)

    return checked


def _device_adam(checker: Checker, update: Any) -> Any:
    """AdamW of a state that stays on the accelerator: one kernel of the lane that computes, or gathers after."""

    def checked(gradient: Tensor, state: Any, adam: Any, scale: Tensor | None, *rest: Any) -> None:
        written = [
            t
            for t in (state.master, state.high, state.low, *state.moments.tensors().values())
            if t is not None
        ]
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


WRAPPED: dict[str, Any] = {
    "layer_adam": _adam, "torch_adam": _adam, "undo_adam": _undone, "finish_adam": _undone,
    "device_adam": _device_adam, "row_ops": _RowOps, "TierFile": _tier_file,
}  # fmt: skip
