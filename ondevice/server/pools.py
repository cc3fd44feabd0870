"""Threads by kind of work, so that waiting for a helper process or a disk delays nothing else.

A route that is a plain function runs in the web framework's forty threads: these are for control,
which never waits long. Work that may wait for a helper process or the bytes of a file has a pool
here. Answers of a model hold no thread (`server.engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread

from ondevice.core.errors import BusyError

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """Threads for one kind of work.

    Args:
        threads: how many calls run at once.
        waiting: how many more may wait for a thread; further ones are refused.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self.name = name
        self.threads = threads
        self.waiting = waiting
        self._limiter: CapacityLimiter | None = None

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function in a thread of the pool, and return its value.

        Raises:
            BusyError: too many calls wait already.
        """
        if self._limiter is None:  # it belongs to the loop that serves
            self._limiter = CapacityLimiter(self.threads)
        if self._limiter.statistics().tasks_waiting >= self.waiting:
            raise BusyError(f"too many waiting {self.name}", hint="try again in a minute")
        call: Callable[[], Any] = partial(function, *arguments, **named)
        return await to_thread.run_sync(call, limiter=self._limiter)


class Pools:
    """The pools of a daemon."""

    def __init__(self) -> None:
        self.rows = Pool("requests for rows", threads=16, waiting=64)
        """Previews, plans and checks, which wait for helper processes."""
        self.files = Pool("uploads and downloads", threads=8, waiting=1000)
        """Reading and writing of large files."""
