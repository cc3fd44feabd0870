"""Live events for any number of readers: each is read from the store once, and encoded once.

A job with readers has one pump, which reads what is new and keeps the newest frames. A reader at the end takes them
from there; one that is behind reads the store at its own pace, and holds nobody up. All of it is on the event
loop; only `changed` is called from other threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator

from anyio import to_thread

from ondevice.server.queue import ENDED
from ondevice.server.store import Store

KEPT_FRAMES = 4096
CHUNK = 500
READERS_PER_S = 400
"""Readers that are served a second: with more than some forty, frames come in larger pieces less often."""
SHORTEST_S = 0.1
RETRY_S = 1.0
_log = logging.getLogger(__name__)


def frame(number: int, kind: str, data: str) -> bytes:
    """One event as server-sent events have it; the JSON is on one line."""
    return f"id: {number}\nevent: {kind}\ndata: {data}\n\n".encode()


class Channel:
    """The newest frames of one job, and its readers."""

    def __init__(self, last: int) -> None:
        self.frames: deque[bytes] = deque(maxlen=KEPT_FRAMES)
        self.last = last
        self.readers = 0
        self.ended = False
        self.fresh = asyncio.Event()
        """Set, and replaced by another, when frames have come."""
        self.dirty = asyncio.Event()

    def after(self, last: int) -> bytes | None:
        """The frames behind event `last`; None where some of them are not kept."""
        missing = self.last - last
        if missing > len(self.frames):
            return None
        return b"".join(self.frames[index] for index in range(len(self.frames) - missing, len(self.frames)))


class Hub:
    """The channels of all jobs that somebody reads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.channels: dict[str, Channel] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pumps: dict[str, asyncio.Task[None]] = {}

    @property
    def readers(self) -> int:
        """How many streams are open."""
        return sum(channel.readers for channel in self.channels.values())

    def open(self) -> None:
        """Begin, on the loop that serves."""
        self._loop = asyncio.get_running_loop()

    def changed(self, job: str) -> None:
        """A job's stream has something new; from any thread."""
        if self._loop is not None and job in self.channels:
            try:
                self._loop.call_soon_threadsafe(self._mark, job)
            except RuntimeError:  # the loop has ended
                self._loop = None

    async def read(self, job: str, last: int, *, follow: bool = True) -> AsyncIterator[bytes]:
        """Frames of a job's events behind event `last`, in order and without gaps, until the job has ended.

        Args:
            follow: wait for more; without, the stream ends with the newest event.
        """
        channel = self._enter(job)
        try:
            while True:
                fresh, ended = channel.fresh, channel.ended
                found = channel.after(last) if last <= channel.last else b""
                if found is None or (not found and not follow):
                    rows = await to_thread.run_sync(self.store.events, job, last, CHUNK)
                    if rows:
                        yield b"".join(frame(*row) for row in rows)
                        last = rows[-1][0]
                        continue
                    found = b""
                if found:
                    last = channel.last
                    yield found
                elif ended or not follow:
                    return
                else:
                    await fresh.wait()
        finally:
            self._leave(job, channel)

    def _enter(self, job: str) -> Channel:
        channel = self.channels.get(job)
        if channel is None:
            channel = self.channels[job] = Channel(self.store.last_event(job))
            channel.dirty.set()
            self._pumps[job] = asyncio.get_running_loop().create_task(self._pump(job, channel))
        channel.readers += 1
        return channel

    def _leave(self, job: str, channel: Channel) -> None:
        channel.readers -= 1
        if channel.readers == 0 and self.channels.get(job) is channel:
            del self.channels[job]
            self._pumps.pop(job).cancel()

    def _mark(self, job: str) -> None:
        if channel := self.channels.get(job):
            channel.dirty.set()

    async def _pump(self, job: str, channel: Channel) -> None:
        while True:
            await channel.dirty.wait()
            channel.dirty.clear()
            try:
                await self._take(job, channel)
            except Exception:  # such as a disk that fails: the readers wait
                _log.exception("the events of job %s cannot be read, and are tried again", job)
                channel.dirty.set()
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(max(SHORTEST_S, channel.readers / READERS_PER_S))

    async def _take(self, job: str, channel: Channel) -> None:
        """What is new in the store, for the readers that wait."""
        rows = await to_thread.run_sync(self.store.events, job, channel.last, CHUNK)
        for row in rows:
            channel.frames.append(frame(*row))
            channel.last = row[0]
        try:
            if len(rows) == CHUNK:
                channel.dirty.set()
            else:
                channel.ended = await to_thread.run_sync(self._has_ended, job, channel.last)
        finally:
            if rows or channel.ended:
                fresh, channel.fresh = channel.fresh, asyncio.Event()
                fresh.set()

    def _has_ended(self, job: str, last: int) -> bool:
        """Whether event `last` is the newest and says that the job has ended; a deleted job has ended too."""
        row = self.store.row("SELECT id, kind, data FROM events WHERE job = ? ORDER BY id DESC LIMIT 1", job)
        if row is None:
            return True
        return row["id"] == last and row["kind"] == "job" and json.loads(row["data"])["state"] in ENDED
