"""The way of a run's events from its log into the store: each line once, in order, whatever is killed when.

The log is the truth, and it is on the disk before a checkpoint is. How far it was read is written in the same
transaction as what was read. When a worker resumes, it cuts the log back to its checkpoint and says in
`attempt.json` where it goes on; what was read of the part that is cut off has happened, and stays in the stream
before the `resume` event.
"""

from __future__ import annotations

import json
from typing import Any

from ondevice.server.queue import Queue
from ondevice.server.store import Store
from ondevice.server.worker import ATTEMPT, RUN
from ondevice.train.log import FILE_NAME

CHUNK_BYTES = 1 << 20
_FIGURES = ("loss", "tokens_per_s", "step_time_s", "eta_s", "learning_rate", "peak_memory_bytes", "peak_device_bytes")


def follow(store: Store, queue: Queue, job: str, ran_s: float = 0.0) -> int:
    """Take what is new in a job's log into its stream; gives how many events that were.

    Args:
        ran_s: seconds that its workers have run, in all; kept with the events, for a daemon that is killed.
    """
    taken = 0
    while True:
        with store.transaction(durable=False) as db:
            found = queue.get(job)
            folder = store.path("jobs", job)
            offset, followed = found.offset, found.followed
            if followed < found.attempt:
                begun = _read_json(folder / ATTEMPT)
                if begun.get("attempt") != found.attempt:
                    break  # this attempt has written nothing yet
                offset, followed = int(begun["offset"]), found.attempt
            content = _read(folder / RUN / FILE_NAME, offset)
            end = content.rfind(b"\n") + 1
            if not end and followed == found.followed:
                break
            events, progress = [], dict(found.progress)
            for line in content[:end].splitlines():
                event = parse(line)
                if event is not None:
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
    """One line as an object with its kind under `event`; None for what a power cut left."""
    try:
        values = json.loads(line)
        json.dumps(values, allow_nan=False)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("event"), str) else None


def note(progress: dict[str, Any], event: dict[str, Any]) -> None:
    """What the newest event says of the job."""
    match event["event"]:
        case "start" | "resume":
            progress["steps"] = event.get("steps", 0)
            progress["step"] = event.get("step", 0)
            progress["backend"] = event.get("backend", "")
        case "step":
            progress |= {name: event[name] for name in _FIGURES if event.get(name) is not None}
            progress["step"] = event.get("step", 0) + 1
            progress.setdefault("first_loss", event.get("loss"))
        case "evaluate":
            progress["evaluation"] = {
                key: value for key, value in event.items() if key not in ("event", "time_s") and value is not None
            }
        case "checkpoint":
            progress["checkpoint_step"] = event.get("step", 0)
        case "finish":
            progress |= {"final_loss": event.get("final_loss"), "eta_s": 0.0}


def _read(path: Any, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read(CHUNK_BYTES)
            while b"\n" not in content and (more := file.read(CHUNK_BYTES)):
                content += more
            return content
    except FileNotFoundError:
        return b""


def _read_json(path: Any) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
