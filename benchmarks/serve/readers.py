"""The cost of 200 readers of a job's events: steps a second with and without them, in turns, in one
job.

Each round watches a running job for some seconds with nobody reading and for as long with all
readers connected, in alternating order. The readers are one process that does nothing but receive,
on this machine too, so their work is part of what is measured. Every reader's stream is kept and
checked: ids without a gap, in order, the same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import finish, median, parse_args
from ondevice.server.client import Client

NEEDS = ("torch", "fastapi", "uvicorn")
SIZES: dict[str, dict[str, Any]] = {
    "short": {"rows": 2, "tokens": 32, "sizes": {}},
    "medium": {"rows": 8, "tokens": 128, "sizes": {"hidden": 128, "layers": 4}},
    "long": {"rows": 8, "tokens": 256, "sizes": {"hidden": 256, "layers": 6}},
}
ID = re.compile(rb"^id: (\d+)$", re.MULTILINE)
COLUMNS = [
    {"key": "step", "title": "Step"},
    {"key": "readers", "title": "Readers"},
    {"key": "alone_s", "title": "Step without readers (ms)", "scale": 1e3, "digits": 1},
    {"key": "read_s", "title": "Step with readers (ms)", "scale": 1e3, "digits": 1},
    {"key": "slower_percent", "title": "Slower (%)", "digits": 1},
    {"key": "alone_cpu", "title": "Daemon's CPU without readers (% of a core)", "digits": 0},
    {"key": "read_cpu", "title": "with readers (% of a core)", "digits": 0},
    {"key": "frames", "title": "Events received"},
    {"key": "lost", "title": "Lost or out of order"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each half of a round")
    parser.add_argument(
        "--threads", type=int, default=1, help="of the training; a GPU's leaves the CPU as free"
    )
    parser.add_argument("--steps", nargs="*", default=list(SIZES), choices=list(SIZES))


async def receive(address: str, path: str, count: int, seconds: float) -> list[bytes]:
    """Count what `count` readers get in `seconds`."""
    host, port = address.removeprefix("http://").split(":")
    streams: list[bytearray] = [bytearray() for _ in range(count)]

    async def one(stream: bytearray) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        try:
            while part := await reader.read(1 << 16):
                stream += part
        finally:
            writer.close()

    tasks = [asyncio.create_task(one(stream)) for stream in streams]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [bytes(stream) for stream in streams]


def check(streams: list[bytes], after: int) -> tuple[int, int]:
    """Events received by all readers together, and how many are missing or out of order."""
    frames = lost = 0
    for stream in streams:
        collected = [int(number) for number in ID.findall(stream)]
        frames += len(collected)
        lost += sum(number != after + place for place, number in enumerate(collected, 1)) + (
            not collected
        )
    return frames, lost


def rate(client: Client, job: str, begin: float, end: float, after: int) -> float:
    """Seconds a step between two times, by the events' own times."""
    times = [e["time_s"] for e in client.events(job, after, follow=False) if e["event"] == "step"]
    inside = [moment for moment in times if begin <= moment <= end]
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def measure(
    client: Client, daemon: psutil.Process, dataset: str, name: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One job: rounds with and without readers."""
    size = SIZES[name]
    config = {
        "method": {"name": "prge", "rank": 2, "queries": 2, "learning_rate": 1e-4},
        "train": {"steps": 10_000_000, "batch_size": size["rows"], "checkpoint_every": 1_000_000},
        "data": {"max_length_tokens": size["tokens"]},
    }
    job = client.create_job(model="tiny", dataset=dataset, config=config)["id"]
    while client.job(job)["progress"].get("step", 0) < 20:
        time.sleep(0.2)
    alone: list[float] = []
    read: list[float] = []
    busy: dict[bool, list[float]] = {False: [], True: []}
    frames = lost = 0
    for turn in range(args.repeats):
        for with_readers in (False, True) if turn % 2 == 0 else (True, False):
            time.sleep(1.0)
            after, begin = client.job(job)["last_event"], time.time()
            cpu, since = sum(daemon.cpu_times()[:2]), time.monotonic()
            if with_readers:
                path = f"/v1/jobs/{job}/events?after={after}"
                child = [
                    sys.executable,
                    "-m",
                    "benchmarks.serve.readers",
                    "--child",
                    client.url,
                    path,
                ]
                words = [*child, str(args.readers), str(args.seconds), str(after)]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                answer = json.loads(done.stdout)
                frames, lost = frames + answer["frames"], lost + answer["lost"]
                begin, end = answer["begin"], answer["end"]
            else:
                time.sleep(args.seconds)
                end = time.time()
            busy[with_readers].append(
                100 * (sum(daemon.cpu_times()[:2]) - cpu) / (time.monotonic() - since)
            )
            (read if with_readers else alone).append(rate(client, job, begin, end, after))
    client.cancel(job)
    client.wait(job)
    slower = [100 * (b / a - 1) for a, b in zip(alone, read)]
    return {
        "step": name,
        "readers": args.readers,
        "alone_s": alone,
        "read_s": read,
        "slower_percent": slower,
        "slower_percent_median": median(slower),
        "alone_cpu": busy[False],
        "read_cpu": busy[True],
        "frames": frames,
        "lost": lost,
    }


def child(words: list[str]) -> None:
    """The readers' process."""
    address, path, count, seconds, after = words
    begin = time.time()
    streams = asyncio.run(receive(address, path, int(count), float(seconds)))
    end = time.time()
    frames, lost = check(streams, int(after))
    print(json.dumps({"frames": frames, "lost": lost, "begin": begin, "end": end}))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    args = parse_args(__doc__, arguments)
    rows = []
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "rows.jsonl"
        text = "the quick brown fox jumps over the lazy dog " * 12
        data.write_text(
            "".join(json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(64))
        )
        for name in args.steps:
            from ondevice.models import save_tiny

            store = Path(scratch) / name
            save_tiny(store / "models" / "tiny", **SIZES[name]["sizes"])
            command = [
                sys.executable,
                "-m",
                "ondevice",
                "serve",
                "--store",
                str(store),
                "--port",
                "0",
                "--json",
            ]
            with open(Path(scratch) / "log", "ab") as log:
                daemon = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
                )
            try:
                if daemon.stdout is None:
                    raise OSError("no pipe")
                client = Client(json.loads(daemon.stdout.readline())["address"])
                dataset = client.upload("dataset", data)["id"]
                rows.append(measure(client, psutil.Process(daemon.pid), dataset, name, args))
                print(rows[-1], flush=True)
            finally:
                daemon.terminate()
                daemon.wait()
    title = f"A job's steps while {args.readers} readers follow its events, training on {args.threads} thread(s)"
    load = f"Load average {os.getloadavg()[0]:.1f} at the end; the readers ran on the same machine."
    finish("serve/readers", rows, args, COLUMNS, title=title, notes=[load])


if __name__ == "__main__":
    main()
