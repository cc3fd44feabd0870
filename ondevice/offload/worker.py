"""Host threads whose failures surface at the step, with what they were doing, and which cannot hang
it for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import OndeviceError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor

POLL_S = 0.2
FIRST = -(1 << 40)
"""Priority of a task that comes before all others."""


MOST_S = 1.0
"""Longest time between two looks that counts: those who wait look several times a second."""


class Patience:
    """Time that a wait has taken while this process ran.

    If the machine sleeps, or the process is stopped (a paused container, Ctrl-Z), the awaited work
    stands still, too."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.looked = time.monotonic()

    def spent(self) -> float:
        """Return the seconds since the start; call it several times a second."""
        now = time.monotonic()
        self.seconds += min(MOST_S, now - self.looked)
        self.looked = now
        return self.seconds


class Watch:
    """State that the threads of one engine share: the first failure, and how long a wait may take.

    A wait is too long if nothing of the engine ends in `timeout_s`: a slow disk or a busy machine
    makes a step slow, and does not end it."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.failure: tuple[str, BaseException] | None = None
        self.running: dict[str, tuple[str, float]] = {}
        """Each thread's current work, and since when, seconds of `time.monotonic`."""
        self.ended = 0

    def progress(self) -> None:
        """Note that some work has ended: whoever waits has a new `timeout_s`."""
        self.ended += 1

    def fail(self, doing: str, error: BaseException) -> None:
        self.failure = self.failure or (doing, error)

    def check(self) -> None:
        """Raise what a thread died of.

        Raises:
            OndeviceError: its own kind if it was one, else a TrainingError; the message names the
                layer.
        """
        if self.failure is None:
            return
        doing, error = self.failure
        if isinstance(error, OndeviceError):
            kind = type(error)
            received = error.received
            hint = error.hint
            raise kind(
                f"{doing}: {error.message}", expected=error.expected, received=received, hint=hint
            ) from error
        message = f"{doing} failed: {type(error).__name__}: {error}"
        raise TrainingError(
            message, hint="the last checkpoint is intact; resume from it"
        ) from error

    def until(self, done: Callable[[float], bool], doing: str) -> None:
        """Call `done(seconds)` until it says yes; it may block so long.

        Raises:
            TrainingError: nothing ended for `timeout_s`; or what a thread died of.
        """
        patience = Patience()
        ended = self.ended
        while not done(POLL_S):
            self.check()
            if self.ended != ended:
                patience = Patience()
                ended = self.ended
            if patience.spent() > self.timeout_s:
                raise self._overdue(doing)

    def result(self, future: Future[None], doing: str) -> None:
        """Wait for a transfer; raises its own error, or as `until` does."""

        def over(seconds: float) -> bool:
            try:
                future.result(seconds)
            except TimeoutError:
                return False
            return True

        self.until(over, doing)

    @contextmanager
    def whole(self, doing: str) -> Iterator[None]:
        """Do work that is of no use if it ends half done: nothing can follow it then."""
        try:
            yield
        except BaseException as error:
            self.fail(doing, error)
            raise

    @contextmanager
    def at_work(self, name: str, doing: str) -> Iterator[None]:
        """Name a thread's current work, for errors about waits that are too long."""
        self.running[name] = doing, time.monotonic()
        try:
            yield
        finally:
            del self.running[name]

    def _overdue(self, doing: str) -> TrainingError:
        now = time.monotonic()
        running = sorted(self.running.values(), key=lambda entry: entry[1])
        if running:
            received = ", ".join(
                f"{name} running for {now - since:.1f} s" for name, since in running
            )
            hint = "a disk or a driver hangs; the last checkpoint is intact, resume from it"
        else:
            received = "no thread of the engine is at work"
            hint = "this is a fault of the engine: report it with the run's settings; the last checkpoint is intact"
        return TrainingError(
            f"{doing} did not end within {self.timeout_s:g} s", received=received, hint=hint
        )


class Pool:
    """Memory that threads borrow and give back."""

    def __init__(self, buffers: list[Tensor], watch: Watch) -> None:
        self.buffers = buffers
        self.watch = watch
        self.changed = threading.Condition()

    def borrow(self, doing: str) -> Tensor:
        """Return a free one; waits until one is given back, and raises as `Watch.until` does."""
        taken: list[Tensor] = []

        def borrow_within(seconds: float) -> bool:
            with self.changed:
                if not self.buffers:
                    self.changed.wait(seconds)
                if self.buffers:
                    taken.append(self.buffers.pop())
            return bool(taken)

        self.watch.until(borrow_within, doing)
        return taken[0]

    def give(self, buffer: Tensor) -> None:
        with self.changed:
            self.buffers.append(buffer)
            self.changed.notify()


class Task:
    """Work for a thread, and its result. `ready` says whether it could begin; `block` waits until
    it can."""

    def __init__(
        self,
        doing: str,
        run: Callable[[], Any],
        watch: Watch,
        ready: Callable[[], bool] | None = None,
        block: Callable[[], None] | None = None,
    ) -> None:
        self.doing = doing
        self.run = run
        self.watch = watch
        self.ready = ready
        self.block = block
        self.finished = threading.Event()
        self.result: Any = None

    def wait(self) -> Any:
        """Return its result; raises as `Watch.until` does."""
        self.watch.until(self.finished.wait, self.doing)
        return self.result


class Worker:
    """A thread that takes the task with the lowest priority number among those that are ready;
    equals in order."""

    def __init__(self, name: str, watch: Watch) -> None:
        self.name = name
        self.watch = watch
        self.tasks: list[tuple[int, int, Task]] = []
        self.count = 0
        self.closing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._loop, name=f"ondevice-{name}", daemon=True)
        self.thread.start()

    def submit(
        self,
        doing: str,
        run: Callable[[], Any],
        priority: int = 0,
        ready: Callable[[], bool] | None = None,
        block: Callable[[], None] | None = None,
    ) -> Task:
        task = Task(f"{self.name} of {doing}", run, self.watch, ready, block)
        with self.changed:
            self.count += 1
            self.tasks.append((priority, self.count, task))
            self.changed.notify()
        return task

    def close(self, timeout_s: float = 10.0) -> bool:
        """Let the thread end after the running task; False if it does not, and dies with the
        process."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _next(self) -> Task | None:
        while True:
            with self.changed:
                while not self.tasks and not self.closing:
                    self.changed.wait()
                if self.closing:
                    return None
                for entry in sorted(self.tasks, key=lambda entry: entry[:2]):
                    if entry[2].ready is None or entry[2].ready():
                        self.tasks.remove(entry)
                        return entry[2]
                first = min(self.tasks, key=lambda entry: entry[1])[2]
                if first.block is None:
                    self.changed.wait(POLL_S)
            if first.block is not None:
                with self.watch.at_work(self.name, f"{first.doing} waiting for the device,"):
                    first.block()

    def _loop(self) -> None:
        while True:
            try:
                task = self._next()
            except BaseException as error:  # of the device, while it waits
                self.watch.fail(self.name, error)
                return
            if task is None:
                return
            try:
                with self.watch.at_work(self.name, task.doing):
                    task.result = task.run()
            except BaseException as error:
                self.watch.fail(task.doing, error)
                return
            task.finished.set()
            self.watch.progress()
