"""A daemon survives malformed uploads, kill -9 at any moment, a power cut. Both run larger by hand."""

from __future__ import annotations

import json

from ondevice.server.client import RefusedError
from tests.server.kills import check_stream, trouble
from tests.server.malformed import attack
from tests.server.running import DaemonProcess, adapter_bits, rows, settings, wait_for, workers


def test_malformed_uploads_are_refused_with_a_reason(served, tmp_path) -> None:
    """The whole of it: `python -m tests.server.malformed --count 10000`."""
    report = attack(served.client, served.daemon.store, tmp_path, 150, seed=1)
    assert sum(report.values()) == 150 and report["refused with 422"] > 130


def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, warm) -> None:
    """The whole of it: `python -m tests.server.kills --kills 50`."""
    report = trouble(tmp_path, kills=2, seed=3, steps=400, python=warm.python)
    assert report["kills"] >= 1 and report["attempts"] > 1


def test_a_stopped_daemon_saves_and_goes_on(tmp_path, warm) -> None:
    store, data = tmp_path / "store", rows(tmp_path / "rows.jsonl")
    with DaemonProcess(store, python=warm.python) as daemon:
        client = daemon.client
        dataset = client.upload("dataset", data)["id"]
        job = client.create_job(
            model="tiny:llama", dataset=dataset, config=settings(steps=1_000_000)
        )["id"]
        wait_for(lambda: client.job(job)["progress"].get("step", 0) > 3, "a step")
        daemon.stop()
    assert not workers(store)
    run = store / "jobs" / job / "run"
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "interrupt" and (run / f"checkpoint-{last['step']:08d}").is_dir()
    with DaemonProcess(store, python=warm.python) as daemon:
        client = daemon.client
        wait_for(lambda: client.job(job)["attempt"] == 2, "it goes on")
        assert client.cancel(job)["state"] in ("cancelling", "cancelled")
        assert client.wait(job, 120)["state"] == "cancelled"
        events = list(client.events(job, follow=False))
        resumed = [event["step"] for event in events if event["event"] == "resume"]
        assert resumed in ([], [last["step"]])  # it may be cancelled before it has begun
        client.delete_job(job)
        assert not (store / "jobs" / job).exists() and client.jobs() == []


def test_the_stream_check_sees_what_is_wrong() -> None:
    def stream(*steps: int, resume: int | None = None) -> list[dict[str, object]]:
        events: list[dict[str, object]] = [
            {"event": "step", "step": step, "loss": step / 2} for step in steps
        ]
        if resume is not None:
            events.insert(resume, {"event": "resume", "step": steps[resume]})
        events.append({"event": "job", "state": "done"})
        return [{"id": number, **event} for number, event in enumerate(events, 1)]

    check_stream(stream(0, 1, 2), 3)
    check_stream(stream(0, 1, 2, 1, 2, resume=3), 3)
    for wrong in (
        stream(0, 2),
        stream(0, 1, 1, 2),
        stream(0, 1),
        stream(0, 1, 3, resume=2),
        stream(0, 1, 2)[1:],
    ):
        try:
            check_stream(wrong, 3)
        except AssertionError:
            continue
        raise AssertionError(f"not seen: {wrong}")


def test_uninterrupted_and_paused_runs_end_with_the_same_bits(served, tmp_path) -> None:
    client = served.client
    job = client.create_job(
        model="tiny:llama", dataset=served.dataset, config=settings(), name="paused"
    )["id"]
    wait_for(lambda: client.job(job)["state"] in ("running", "done"), "it runs")
    try:
        client.pause(job)
    except RefusedError as error:  # a machine that is so fast has done it already
        assert error.status == 409
    if (
        wait_for(
            lambda: (state := client.job(job)["state"]) in ("paused", "done") and state, "it stops"
        )
        == "paused"
    ):
        client.resume(job)
    assert client.wait(job, 120)["state"] == "done"
    ours = adapter_bits(client.download_adapter(job, tmp_path / "paused"))
    first = adapter_bits(client.download_adapter(served.job["id"], tmp_path / "first"))
    assert ours == first
