"""A job's events: from the run's log to the store, then to live readers and to a curve.

The log is the truth, and it is on the disk before a checkpoint is. `follow` reads each line once,
in order,
whatever is killed: it saves its position in the same transaction as the events. When a worker
resumes, it cuts the log back to its checkpoint and notes the position in `attempt.json`. The events
of the removed part have happened, and stay in the stream before the `resume` event.

`Hub` serves any number of readers: each event is read from the store and encoded once. A job with
readers has one pump, which reads new events and holds the newest frames. A reader that keeps up
takes them from there; a slower one reads the store at its own pace, and delays nobody. All of this
runs on the event loop; only `changed` is called from other threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from anyio import to_thread

from ondevice.core.untrusted import parse_json, read_json
from ondevice.server.queue import ENDED, Queue
from ondevice.server.store import Store
from ondevice.server.words import for_api
from ondevice.server.worker import ATTEMPT, RUN
from ondevice.training.events import FILE_NAME

CHUNK_BYTES = 1 << 20
_FIGURES = (
    "loss",
    "tokens_per_s",
    "step_time_s",
    "eta_s",
    "learning_rate",
    "peak_memory_bytes",
    "peak_device_bytes",
)


def follow(store: Store, queue: Queue, job: str, ran_s: float = 0.0) -> int:
    """Read the new lines of a job's log into its stream in the store; return their number.

    Args:
        ran_s: total seconds that its workers have run, saved with the events in case the daemon
            is killed.
    """
    taken = 0
    while True:
        # Not durable: after a power cut the log is read again, and an fsync would cost more than a
        # step.
        with store.transaction(durable=False) as db:
            row = queue.get(job)
            folder = store.path("jobs", job)
            offset = row.offset
            followed = row.followed
            if followed < row.attempt:
                begun = _read_json(folder / ATTEMPT)
                if begun.get("attempt") != row.attempt:
                    break  # this attempt has not written anything yet
                offset = int(begun["offset"])
                followed = row.attempt
            # Only complete lines: the last one may still be written.
            content = _read(folder / RUN / FILE_NAME, offset)
            end = content.rfind(b"\n") + 1
            if not end and followed == row.followed:
                break
            events = []
            progress = dict(row.progress)
            for line in content[:end].splitlines():
                event = parse(line)
                if event is not None:
                    if isinstance(event.get("message"), str):
                        event["message"] = for_api(event["message"])
                    events.append(event)
                    note(progress, event)
            store.add_events(job, events)
            db.execute(
                "UPDATE jobs SET progress = ?, followed = ?, offset = ?, ran_s = MAX(ran_s, ?) WHERE id = ?",
                (json.dumps(progress), followed, offset + end, ran_s, job),
            )
        taken += len(events)
    if taken:
        queue.changed(job)
    return taken


def parse(line: bytes) -> dict[str, Any] | None:
    """Parse one line into an object with an `event`; return None for a broken line."""
    try:
        values = parse_json(line)
        json.dumps(values, allow_nan=False)
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        return None
    counts = [values[name] for name in ("step", "steps") if name in values]
    if all(isinstance(count, int | None) for count in counts):
        return values
    return None


def note(progress: dict[str, Any], event: dict[str, Any]) -> None:
    """Update a job's newest figures with one event."""
    match event["event"]:
        case "start" | "resume":
            progress["steps"] = event.get("steps", 0)
            progress["step"] = event.get("step", 0)
            progress["backend"] = event.get("backend", "")
        case "step":
            progress |= {name: event[name] for name in _FIGURES if event.get(name) is not None}
            progress["step"] = (event.get("step") or 0) + 1
            progress.setdefault("first_loss", event.get("loss"))
        case "evaluate":
            progress["evaluation"] = {
                key: value
                for key, value in event.items()
                if key not in ("event", "time_s") and value is not None
            }
        case "checkpoint":
            progress["checkpoint_step"] = event.get("step", 0)
        case "finish":
            progress |= {
                key: event[key]
                for key in ("tokens_per_s", "step_time_s")
                if event.get(key) is not None
            }
            progress |= {"final_loss": event.get("final_loss"), "eta_s": 0.0}


def _read(path: Any, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read(CHUNK_BYTES)
            while b"\n" not in content and (
                rest := file.read(CHUNK_BYTES)
            ):  # a line of any length gets through
                content += rest
            return content
    except FileNotFoundError:
        return b""


def _read_json(path: Any) -> dict[str, Any]:
    try:
        values = read_json(path)
    except (OSError, ValueError):
        return {}
    if isinstance(values, dict):
        return values
    return {}


KEPT_FRAMES = 4096
PAGE_EVENTS = 500
READERS_PER_S = 400
"""Readers served per second; with more than about forty, frames come less often."""
SHORTEST_S = 0.1
RETRY_S = 1.0
_log = logging.getLogger(__name__)


def frame(number: int, kind: str, data: str) -> bytes:
    """Encode one event as a server-sent event, with its JSON on one line."""
    return f"id: {number}\nevent: {kind}\ndata: {data}\n\n".encode()


class Channel:
    """The newest frames of one job, and its readers."""

    def __init__(self, last: int) -> None:
        self.frames: deque[bytes] = deque(maxlen=KEPT_FRAMES)
        self.last = last
        self.readers = 0
        self.ended = False
        self.fresh = asyncio.Event()
        """Set when frames arrive, and then replaced."""
        self.dirty = asyncio.Event()

    def after(self, last: int) -> bytes | None:
        """Join the frames after event `last`; return None if some of them are gone."""
        missing = self.last - last
        if missing > len(self.frames):
            return None
        return b"".join(
            self.frames[index] for index in range(len(self.frames) - missing, len(self.frames))
        )


class Hub:
    """The channels of all jobs with readers."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.channels: dict[str, Channel] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pumps: dict[str, asyncio.Task[None]] = {}

    @property
    def readers(self) -> int:
        """Number of open streams."""
        return sum(channel.readers for channel in self.channels.values())

    def open(self) -> None:
        """Start, on the event loop of the server."""
        self._loop = asyncio.get_running_loop()

    def changed(self, job: str) -> None:
        """Wake the pump of a job with new events; callable from any thread."""
        if self._loop is not None and job in self.channels:
            try:
                self._loop.call_soon_threadsafe(self._mark, job)
            except RuntimeError:  # the loop has ended
                self._loop = None

    async def read(self, job: str, last: int, *, follow: bool = True) -> AsyncIterator[bytes]:
        """Yield frames of a job's events after event `last`, in order and without gaps, until the
        job ends.

        Args:
            follow: wait for more; otherwise the stream ends with the newest event.
        """
        channel = self._enter(job)
        try:
            while True:
                # Taken before the frames are read: frames that arrive in between set this event.
                fresh = channel.fresh
                ended = channel.ended
                frames = b""
                if last <= channel.last:
                    frames = channel.after(last)
                if frames is None or (not frames and not follow):
                    rows = await to_thread.run_sync(self.store.events, job, last, PAGE_EVENTS)
                    if rows:
                        yield b"".join(frame(*row) for row in rows)
                        last = rows[-1][0]
                        continue
                    frames = b""
                if frames:
                    last = channel.last
                    yield frames
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
                await self._collect(job, channel)
            except Exception:  # such as a failing disk: the readers wait
                _log.exception("cannot read the events of job %s; trying again", job)
                channel.dirty.set()
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(max(SHORTEST_S, channel.readers / READERS_PER_S))

    async def _collect(self, job: str, channel: Channel) -> None:
        """Read new events from the store, and wake the readers that wait."""
        rows = await to_thread.run_sync(self.store.events, job, channel.last, PAGE_EVENTS)
        for row in rows:
            channel.frames.append(frame(*row))
            channel.last = row[0]
        try:
            if len(rows) == PAGE_EVENTS:
                channel.dirty.set()
            else:
                channel.ended = await to_thread.run_sync(self._has_ended, job, channel.last)
        finally:
            if rows or channel.ended:
                fresh = channel.fresh
                channel.fresh = asyncio.Event()
                fresh.set()

    def _has_ended(self, job: str, last: int) -> bool:
        """Return True if `last` is the newest event and ends the job, or if the job was deleted."""
        row = self.store.row(
            "SELECT id, kind, data FROM events WHERE job = ? ORDER BY id DESC LIMIT 1", job
        )
        if row is None:
            return True
        return (
            row["id"] == last and row["kind"] == "job" and json.loads(row["data"])["state"] in ENDED
        )


_STEP = (
    "step",
    "time_s",
    "loss",
    "learning_rate",
    "tokens_per_s",
    "peak_memory_bytes",
    "peak_device_bytes",
)
_EVALUATE = ("step", "time_s", "loss", "accuracy", "f1", "exact_match", "best")


def curve(store: Store, job: str, points: int) -> list[dict[str, Any]]:
    """Return a job's curve: at most `points` steps with the first and the last, and every
    evaluation.

    A resumed run repeats steps; the later ones count.
    """
    # First only the numbers and ids, of perhaps a million steps; then the events to show.
    numbers = array("q")
    ids = array("q")
    evaluations: dict[int, int] = {}
    rows = store.connection.execute(
        "SELECT id, kind, CAST(COALESCE(json_extract(data, '$.step'), 0) AS INTEGER) FROM events WHERE job = ? "
        "AND kind IN ('start', 'resume', 'step', 'evaluate') ORDER BY id", (job,),
    )  # fmt: skip
    for event, kind, number in rows:
        place = bisect_left(numbers, number)
        if kind == "evaluate":
            evaluations[number] = event
        elif kind != "step":
            del numbers[place:], ids[place:]
            evaluations = {key: value for key, value in evaluations.items() if key <= number}
        elif numbers[place : place + 1] == array("q", [number]):
            ids[place] = event
        else:
            numbers.insert(place, number)
            ids.insert(place, event)
    kept = ids
    if len(kept) > points:
        kept = [kept[round(index * (len(kept) - 1) / (points - 1))] for index in range(points)]
    shown = [_point(json.loads(data)) for data in _data(store, job, [*kept, *evaluations.values()])]
    return sorted(shown, key=lambda event: (event["step"], event["event"] == "step"))


def _point(event: dict[str, Any]) -> dict[str, Any]:
    kind = event["event"]
    return {
        "event": kind,
        **{key: event.get(key) for key in (_STEP if kind == "step" else _EVALUATE)},
    }


def _data(store: Store, job: str, ids: Sequence[int]) -> Iterator[str]:
    """Yield the events of these ids, as JSON."""
    for begin in range(0, len(ids), 500):
        part = ids[begin : begin + 500]
        marks = ",".join("?" * len(part))
        for row in store.rows(
            f"SELECT data FROM events WHERE job = ? AND id IN ({marks})", job, *part
        ):
            yield row["data"]
