"""kill -9 at random points, and what is left.

    python -m tests.server.kills --kills 50

A job trains while, again and again, the daemon or its worker is killed, or the power is cut: the daemon is killed,
its store is copied as it is, and the copy is served. At the end nothing may be lost: the job is done, the stream of
its events has no gap, each step stands in it in the order it ran, and the adapter has the bits of a run that nobody
disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ondevice.server.client import Client
from tests.server.running import DaemonProcess, adapter_bits, rows, settings, wait_for, workers


def trouble(
    folder: Path,
    kills: int,
    seed: int,
    steps: int,
    log: Any = lambda text: None,
    python: Path | None = None,
) -> dict[str, Any]:
    """Run a job to its end through `kills` kills; gives what happened, after checking it.

    The run that nobody disturbs has its worker from `python`; where one is killed it is a process of its own.
    """
    chance, counts = random.Random(seed), Counter[str]()
    config = settings(steps=steps, checkpoint_every=7)
    data = rows(folder / "rows.jsonl")
    with DaemonProcess(folder / "undisturbed", python=python) as daemon:
        dataset = daemon.client.upload("dataset", data)["id"]
        job = daemon.client.create_job(model="tiny:llama", dataset=dataset, config=config)["id"]
        assert daemon.client.wait(job, 600)["state"] == "done"
        expected = adapter_bits(daemon.client.download_adapter(job, folder / "expected"))

    store, copies = folder / "store", 0
    daemon = DaemonProcess(store).start()
    try:
        client = daemon.client
        dataset = client.upload("dataset", data)["id"]
        other = client.create_job(
            model="tiny:llama", dataset=dataset, config=config, priority=-5, name="waits"
        )["id"]
        client.pause(other)
        job = client.create_job(
            model="tiny:llama",
            dataset=dataset,
            config=config,
            limits={"retries": 10 * kills + 10},
            name="is killed",
        )["id"]
        while sum(counts.values()) < kills and not _ended(client, job):
            victim = chance.choice(("daemon", "worker", "worker", "power"))
            _random_moment(client, job, chance, steps, kills)
            if victim == "worker":
                for process in workers(store):
                    try:
                        os.kill(process, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                    counts["worker"] += 1
            else:
                daemon.kill()
                wait_for(lambda place=store: not workers(place), "the worker dies with the daemon")
                if victim == "power":
                    copies += 1
                    shutil.copytree(store, folder / f"copy-{copies}", symlinks=True)
                    shutil.rmtree(store)
                    store = folder / f"copy-{copies}"
                counts[victim] += 1
                daemon = DaemonProcess(store).start()
                client = daemon.client
            assert client.job(other)["state"] == "paused"
            log(
                f"{sum(counts.values())}: {victim}, {client.job(job)['progress'].get('step', 0)} of {steps} steps"
            )
        done = client.wait(job, 900)
        assert done["state"] == "done", done
        events = list(client.events(job, follow=False))
        actual = adapter_bits(client.download_adapter(job, folder / "found"))
        listed = {item["id"] for item in client.adapters()}
        assert client.job(other)["state"] == "paused"
    finally:
        daemon.kill()
    check_stream(events, steps)
    assert actual == expected, "the adapter is another than that of the undisturbed run"
    assert job in listed
    return {
        "kills": sum(counts.values()),
        **counts,
        "steps": steps,
        "events": len(events),
        "attempts": done["attempt"],
    }


def check_stream(events: list[dict[str, Any]], steps: int) -> None:
    """Ids without gaps; steps in order, going back only where a `resume` says so; every step there at the end."""
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    following = 0
    losses: dict[int, float] = {}
    for event in events:
        if event["event"] == "resume":
            assert event["step"] <= following, "a resume skips steps"
            following = event["step"]
        elif event["event"] == "step":
            assert event["step"] == following, f"step {event['step']} where {following} follows"
            assert losses.setdefault(following, event["loss"]) == event["loss"], (
                "a step that ran again has another loss"
            )
            following += 1
    assert following == steps and events[-1]["event"] == "job" and events[-1]["state"] == "done"


def _random_moment(client: Client, job: str, chance: random.Random, steps: int, kills: int) -> None:
    """A moment of the daemon's or the worker's start, or one while it trains; never so late that the steps that are
    left are too few for the other kills, however fast the machine is."""

    def passed(step: float) -> bool:
        return client.job(job)["progress"].get("step", 0) >= step or _ended(client, job)

    begun = client.job(job)["progress"].get("step", 0)
    span = (steps - begun) / (2 * kills)
    if chance.random() < 0.3:
        end_s = time.monotonic() + chance.random() * 4
        wait_for(lambda: time.monotonic() > end_s or passed(begun + span), "a moment")
    else:
        goal = begun + 1 + chance.random() * chance.choice((0.1, 1.0)) * span
        wait_for(lambda: passed(goal), "a step")


def _ended(client: Client, job: str) -> bool:
    return client.job(job)["state"] in ("done", "failed", "cancelled")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20_000)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ondevice-kills-"))
    try:
        began = time.monotonic()
        report = trouble(
            folder, given.kills, given.seed, given.steps, lambda text: print(text, flush=True)
        )
        print(json.dumps(report | {"seconds": round(time.monotonic() - began)}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
