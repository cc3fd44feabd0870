"""Streams of events: replay, many readers while a job trains, slow ones, and what a cut-back log becomes."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ondevice.server import events as hub
from ondevice.server.events import KEPT_FRAMES, Hub, curve, follow
from ondevice.server.queue import Queue
from ondevice.server.store import Store
from tests.server.kills import check_stream
from tests.server.running import settings, wait_for

READERS = 200


def read_frames(content: bytes) -> list[tuple[int, str, dict[str, Any]]]:
    """(id, kind, object) of each event in a stream; comments are left out."""
    collected = []
    for block in content.decode().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.split("\n") if ": " in line and line[0] != ":"
        )
        if "id" in fields:
            collected.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return collected


async def read_stream(address: str, path: str, headers: str = "", pause_s: float = 0.0) -> bytes:
    """A whole stream, by a reader that may be slow and has a small buffer."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 14)
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Connection: close\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0] and b"text/event-stream" in head, head
    content = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        content += await reader.readexactly(size)
        await reader.readexactly(2)
        if pause_s:
            await asyncio.sleep(pause_s)
    writer.close()
    return content


def test_200_readers_of_a_job_that_trains(served) -> None:
    """No event is lost or out of order, for readers from the start, in the middle, slow ones and leavers."""
    client, address = served.client, served.daemon.address
    config = settings(steps=600, checkpoint_every=200)
    job = client.create_job(
        model="tiny:llama", dataset=served.dataset, config=config, name="is read"
    )["id"]
    wait_for(
        lambda: client.job(job)["last_event"] >= 2, "the events behind which some readers begin"
    )

    async def leave_early() -> bytes:
        try:
            return await asyncio.wait_for(read_stream(address, f"/v1/jobs/{job}/events"), 0.5)
        except TimeoutError:
            return b""

    async def read_all() -> list[bytes]:
        path = f"/v1/jobs/{job}/events"
        tasks = [read_stream(address, path) for _ in range(READERS - 40)]
        tasks += [read_stream(address, path, pause_s=0.05) for _ in range(20)]
        tasks += [
            read_stream(address, path, headers=f"Last-Event-ID: {number % 3}\r\n")
            for number in range(20)
        ]
        leavers = [asyncio.create_task(leave_early()) for _ in range(20)]
        received = await asyncio.gather(*tasks)
        await asyncio.gather(*leavers)
        return received

    streams = [read_frames(content) for content in asyncio.run(read_all())]
    assert len(streams) == READERS
    whole = streams[0]
    check_stream([{"id": number, **event} for number, _, event in whole], 600)
    assert all(kind == event["event"] for _, kind, event in whole)
    for number, stream in enumerate(streams):
        after = (number - READERS + 20) % 3 if number >= READERS - 20 else 0
        assert stream == whole[after:], number
    wait_for(
        lambda: client.metrics()["event_streams"] == 0,
        "the daemon sees that those who left are gone",
    )


def test_replay_behind_an_id(served) -> None:
    client, job = served.client, served.job["id"]
    whole = list(client.events(job, follow=False))
    assert [event["id"] for event in whole] == list(range(1, served.job["last_event"] + 1))
    for after in (1, 17, len(whole) - 1):
        assert list(client.events(job, after, follow=False)) == whole[after:]
    assert list(client.events(job, len(whole), follow=False)) == []
    assert list(client.events(job)) == whole  # of an ended job, a stream that follows ends too
    assert list(client.events(job, 10**6, follow=False)) == whole  # an id from before a power cut
    read = asyncio.run(
        read_stream(served.daemon.address, f"/v1/jobs/{job}/events", "Last-Event-ID: 17\r\n")
    )
    assert [event for _, _, event in read_frames(read)] == [
        {key: value for key, value in event.items() if key != "id"} for event in whole[17:]
    ]
    odd = asyncio.run(
        read_stream(served.daemon.address, f"/v1/jobs/{job}/events", "Last-Event-ID: x'; --\r\n")
    )
    assert len(read_frames(odd)) == len(whole)


@pytest.mark.parametrize("count", [50, KEPT_FRAMES + 1504])
def test_readers_of_the_hub_at_any_pace(store: Store, count: int) -> None:
    """A reader that is further behind than the frames that are kept goes on from the store."""
    queue = Queue(store)
    job = queue.create({"name": "", "dataset": "d"}).id
    store.connection.execute("UPDATE jobs SET state = 'running' WHERE id = ?", (job,))

    async def run() -> list[list[int]]:
        hub = Hub(store)
        hub.open()

        def write() -> None:
            for first in range(0, count, 25):
                with store.transaction(durable=False):
                    store.add_events(
                        job, [{"event": "step", "step": first + index} for index in range(25)]
                    )
                hub.changed(job)
            queue.changed = hub.changed
            queue.ended(job, "finished")

        async def reader(after: int, every: int) -> list[int]:
            received = []
            async for part in hub.read(job, after):
                received += [number for number, _, _ in read_frames(part)]
                if every and len(received) % every == 0:
                    await asyncio.sleep(0.02)
            return received

        first = asyncio.create_task(reader(0, 1))
        await asyncio.sleep(0)
        writer = threading.Thread(target=write)
        writer.start()
        others = [asyncio.create_task(reader(after, every)) for after in (0, 7) for every in (0, 3)]
        received = await asyncio.gather(first, *others)
        writer.join()
        assert hub.readers == 0 and not hub.channels
        return received

    received = asyncio.run(asyncio.wait_for(run(), 120))
    for after, ids in zip((0, 0, 0, 7, 7), received):
        assert ids == list(range(after + 1, count + 3))


def test_readers_outlive_a_disk_that_fails_for_a_while(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(hub, "RETRY_S", 0.01)
    queue = Queue(store)
    job = queue.create({"name": "", "dataset": "d"}).id
    queue.ask(job, "cancel")

    async def run() -> list[int]:
        served, collected = hub.Hub(store), []
        served.open()
        stumbles = [sqlite3.OperationalError("disk I/O error")] * 2

        async def read() -> None:
            async for part in served.read(job, 0):
                collected.extend(number for number, _, _ in read_frames(part))

        ended = served._has_ended

        def stumbling(*given: Any) -> Any:
            if stumbles:
                raise stumbles.pop()
            return ended(*given)

        monkeypatch.setattr(served, "_has_ended", stumbling)
        await asyncio.wait_for(read(), 120)
        assert not stumbles
        return collected

    assert asyncio.run(run()) == [1, 2]


def line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"


@given(
    attempts=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=5
    ),
    looks=st.integers(1, 7),
    lost=st.integers(0, 40),
)
@examples(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_log_that_is_cut_back_becomes_one_stream(
    tmp_path_factory, attempts, looks: int, lost: int
) -> None:
    """Workers that die at any byte; a follower that looks at any time; a power cut that takes unsynced bytes back."""
    store = Store(tmp_path_factory.mktemp("follow") / "store")
    queue = Queue(store, clock=lambda: 1e9)
    job = queue.create({"name": "", "dataset": "d", "limits": {"retries": 10**6}}).id
    folder = store.path("jobs", job)
    log = folder / "run" / "events.jsonl"
    log.parent.mkdir(parents=True)
    expected: list[tuple[str, int]] = []
    done = 0
    try:
        for number, (back, more, partial) in enumerate(attempts, 1):
            store.connection.execute("UPDATE jobs SET not_before_s = 0 WHERE id = ?", (job,))
            assert queue.claim() is not None
            follow(store, queue, job)
            done = max(0, done - back)
            kept = b"".join(part for part in _lines(log) if _step(part) < done)
            begin = {"event": "resume" if kept else "start", "step": done}
            log.write_bytes(kept + line(begin))
            (folder / "attempt.json").write_text(
                json.dumps({"attempt": number, "offset": len(kept)})
            )
            expected.append((begin["event"], done))
            for index in range(more):
                with log.open("ab") as file:
                    file.write(line({"event": "step", "step": done, "loss": done / 4}))
                expected.append(("step", done))
                done += 1
                if index % looks == 0:
                    follow(store, queue, job)
            with log.open("ab") as file:
                file.write(line({"event": "step", "step": done})[: min(partial, 20)])
            follow(store, queue, job)
            queue.ended(job, "crashed")
        whole = [
            json.loads(data) for _, kind, data in store.events(job, 0, 10_000) if kind != "job"
        ]
        assert [(event["event"], event.get("step", 0)) for event in whole] == expected
        log.write_bytes(log.read_bytes()[: max(0, log.stat().st_size - lost)])
        assert follow(store, queue, job) == 0
    finally:
        store.close()


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _step(part: bytes) -> float:
    try:
        event = json.loads(part)
    except ValueError:
        return float("inf")
    return event["step"] if event["event"] == "step" else -1


def plain_curve(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the curve of a run is, said with dictionaries: the last event of each step counts."""
    steps: dict[int, Any] = {}
    evaluations: dict[int, Any] = {}
    for event in events:
        step = event["step"]
        if event["event"] == "step":
            steps[step] = event
        elif event["event"] == "evaluate":
            evaluations[step] = event
        else:
            steps = {key: value for key, value in steps.items() if key < step}
            evaluations = {key: value for key, value in evaluations.items() if key <= step}
    kept = [*steps.values(), *evaluations.values()]
    return sorted(kept, key=lambda event: (event["step"], event["event"] == "step"))


def test_the_curve_of_a_run_with_resumes_has_the_last_event_of_each_step(store: Store) -> None:
    chance = random.Random(5)
    for run in range(20):
        events, step = [{"event": "start", "step": 0, "loss": None}], 0
        for number in range(chance.randint(1, 60)):
            kind = chance.choice(["step"] * 6 + ["evaluate", "resume"])
            step = (
                max(0, step - chance.randint(0, 5)) if kind == "resume" else step + (kind == "step")
            )
            events.append({"event": kind, "step": step, "loss": number / 7})
        with store.transaction():
            store.add_events(f"job-{run}", events)
        expected = [(event["event"], event["step"], event["loss"]) for event in plain_curve(events)]
        assert [
            (one["event"], one["step"], one["loss"]) for one in curve(store, f"job-{run}", 5000)
        ] == expected


def test_a_curve_of_many_steps_holds_those_that_are_shown(store: Store) -> None:
    with store.transaction():
        store.add_events(
            "job-1",
            ({"event": "step", "step": n, "loss": 1.0, "text": "x" * 200} for n in range(50_000)),
        )
    tracemalloc.start()
    shown = curve(store, "job-1", 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(shown) == 100 and (shown[0]["step"], shown[-1]["step"]) == (0, 49_999)
    assert peak < 4 << 20
