"""Steps on one and on several GPUs of a host, weak and strong, and FSDP2, DeepSpeed and RoundPipe
next to them.

    python -m benchmarks.slideformer.ranks --shape Qwen2.5-7B --gpus 1,2 --rows-each 16 --rows-all 64,16

Weak: each GPU has `--rows-each` rows; strong: all have the same rows together. Every number of GPUs
is a run of `torchrun`, one after the other, the variants in turns, with random weights; a run on n
of N GPUs has n / N of the cores. SlideFormer decides for each batch what `auto` leaves open, as
`ondevice train` does, and has a run for each. RoundPipe is one process that has n GPUs, and knows
Llama's shapes alone. A value is the wall time from one step's end to the next one's on rank 0, the
median after warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import add_arguments, finish, parse_args
from benchmarks.offload import model as om
from benchmarks.offload.peers import Fsdp2
from benchmarks.offload.roundpipe import RoundPipe
from benchmarks.offload.zero import Zero
from ondevice.methods.slideformer.auto import Room, Work, assumed, resolve
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.torch import agreed
from ondevice.offload import cores
from ondevice.offload.calibrate import calibrate
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.liger import use_liger
from ondevice.offload.session import join
from ondevice.planning.devices import find_device

NEEDS = ("cuda",)
VARIANTS = ("slideformer", "fsdp2", "deepspeed", "roundpipe", "roundpipe-late")
RATE, LIMIT_S, LEAST_S = 1e-5, 120.0, 30.0
COLUMNS = [
    {"key": "variant", "title": "Variant"},
    {"key": "gpus", "title": "GPUs"},
    {"key": "rows", "title": "Batch"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "weak", "title": "Times one GPU, weak", "digits": 2},
    {"key": "strong", "title": "Times one GPU, strong", "digits": 2},
    {"key": "host_bytes_rank", "title": "Host, each (GB)", "scale": 1e-9, "digits": 1},
    {"key": "device_bytes", "title": "GPU peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "kernels", "title": "Kernels"},
    {"key": "choice", "title": "Choice of auto, or a peer's version"},
    {"key": "bound", "title": "Bound by"},
    {"key": "error", "title": "Not run"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="Qwen2.5-7B", help=", ".join(om.SHAPES))
    parser.add_argument("--gpus", default="1,2", help="numbers of GPUs")
    parser.add_argument("--rows-each", type=int, default=16, help="weak scaling")
    parser.add_argument("--rows-all", default="64,16", help="strong scaling")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--variants", default="slideformer,fsdp2", help=", ".join(VARIANTS))
    parser.add_argument(
        "--peers-strong", help="rows of the peers' strong scaling; as --rows-all if not said"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="of SlideformerConfig"
    )
    add_arguments(parser, "--gpu-bytes", "--host-gib")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--budget-s", type=float, default=480.0, help="end what still runs so long after the start"
    )
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--batches", help=argparse.SUPPRESS)
    parser.add_argument("--visible", type=int, help=argparse.SUPPRESS)


class OnRanks:
    """An engine of ours on the ranks of this run; `open_engine` makes it."""

    engine: Any

    def __init__(self, args: Any) -> None:
        self.ranks, device = join(args.device, LIMIT_S)
        if self.ranks.single:
            bind(0)
        self.rank, self.number = self.ranks.rank, 0
        self.open_engine(args, dict(word.split("=", 1) for word in args.option), device)

    def open_engine(self, args: Any, options: dict[str, Any], device: str) -> None:
        raise NotImplementedError

    def step(self, ids: np.ndarray) -> float:
        self.number += 1
        return self.engine.step(ids, ids, self.number - 1, RATE)

    def flush(self) -> None:
        self.engine.flush()

    def figures(self) -> dict[str, Any]:
        engine = self.engine
        last = engine.overlap.to_dict() if engine.overlap else {}
        figures = {"host_bytes_rank": engine.host_bytes, "device_bytes": engine.device.peak_bytes()}
        return figures | {"kernels": engine.kernels, **last}


class Sliding(OnRanks):
    """SlideFormer, by the settings that a run with the first of these batches has by default."""

    def open_engine(self, args: Any, options: dict[str, Any], device: str) -> None:
        config = SlideformerConfig(timeout_s=LIMIT_S, **options)
        self.choice = "as set"
        if config.is_auto and args.device != "cpu":
            rows = int(args.batches.split(",")[0])
            config, why = resolve(config, *self._machine(args, config, device, rows))
            self.choice = why.partition(" (")[0]
        family = om.make_family(args.shape, om.random_block(args.shape, device))
        self.engine = OffloadEngine(family, agreed(config, self.ranks), device, self.ranks)

    def _machine(
        self, args: Any, config: SlideformerConfig, device: str, rows: int
    ) -> tuple[Any, ...]:
        """What decides: sizes, memory, and rates, which one process measures and several assume."""
        here, host = find_device("this-cuda"), find_device("this-cpu").usable_bytes
        if args.host_gib:
            host = max(host, int(args.host_gib * 2**30))
        work = Work(rows // self.ranks.world, args.length, self.ranks.world)
        room = Room(int(args.gpu_bytes or here.usable_bytes), host)
        rates = calibrate(config, device) if self.ranks.single else assumed(here, config)
        return om.shape_dims(args.shape)[0], work, room, rates

    def figures(self) -> dict[str, Any]:
        return {"threads": self.engine.updater.threads, "choice": self.choice, **super().figures()}


class Sharded:
    """A peer with all parameters, gradients and moments in host memory, on the ranks of this
    run."""

    def __init__(self, args: Any) -> None:
        import torch.distributed as dist

        self.rank, self.world, self.device = (
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
            args.device,
        )
        self.name = args.worker
        if args.device == "cuda":
            torch.cuda.set_device(self.rank)
            self.device = f"cuda:{self.rank}"
        if args.worker == "fsdp2":
            dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
        bind(self.rank)
        block = om.random_block(args.shape, self.device)
        self.kernels = "liger" if use_liger(SlideformerConfig(), args.device) else "torch"
        kind: Any = Fsdp2 if args.worker == "fsdp2" else Zero
        self.one = kind(args.shape, block, self.device, self.kernels == "liger")

    def step(self, ids: np.ndarray) -> float:
        mine = np.ascontiguousarray(ids[self.rank :: self.world])
        return self.one.step(mine, mine)

    def flush(self) -> None:
        self.one.flush()

    def figures(self) -> dict[str, Any]:
        peak = torch.cuda.max_memory_allocated() if self.device != "cpu" else 0
        return {
            "device_bytes": peak,
            "kernels": self.kernels,
            "choice": f"{self.name} {self.one.version}",
        }


class Piped:
    """RoundPipe, one process with all GPUs of this run."""

    def __init__(self, args: Any) -> None:
        self.rank, self.gpus = 0, args.visible
        late = args.worker == "roundpipe-late"
        self.one = RoundPipe(
            args.shape, om.random_block(args.shape, args.device), late, args.visible + 1
        )

    def step(self, ids: np.ndarray) -> float:
        return self.one.step(ids, ids)

    def flush(self) -> None:
        self.one.flush()

    def figures(self) -> dict[str, Any]:
        peak = max(torch.cuda.max_memory_allocated(index) for index in range(self.gpus))
        choice = f"roundpipe {self.one.version}, {self.gpus + 1} micro-batches"
        return {"device_bytes": peak, "kernels": "roundpipe", "choice": choice}


def _parts() -> list[list[int]]:
    """The cores of each GPU of this host, or of each rank if there is none."""
    addresses: list[str | None] = [
        cores.pci_address(index) for index in range(torch.cuda.device_count())
    ]
    addresses = addresses or [None] * int(os.environ.get("WORLD_SIZE", "1"))
    return cores.divide(os.sched_getaffinity(0), addresses)


def bind(rank: int) -> None:
    """Let this process have the cores next to that GPU."""
    if part := _parts()[rank]:
        cores.bind(part)


def build(args: Any) -> Any:
    """The variant of this run."""
    if args.worker == "slideformer":
        return Sliding(args)
    return Piped(args) if args.worker.startswith("roundpipe") else Sharded(args)


def work(args: Any, build: Callable[[Any], Any]) -> None:
    """One rank of one run of what `build` makes; rank 0 adds a line to the file after each batch
    size."""
    began = time.perf_counter()
    one = build(args)
    built_s, data = (
        time.perf_counter() - began,
        om.Batches(om.shape_dims(args.shape)[0].vocab, args.length),
    )
    for number, rows in enumerate(int(word) for word in args.batches.split(",")):
        seconds, loss = [], 0.0
        for step in range(args.warmup + (number == 0) + args.repeats):
            ids, started = data.get(rows, step), time.perf_counter()
            loss = one.step(ids)
            seconds.append(time.perf_counter() - started)
        one.flush()
        row = {
            "rows": rows,
            "step_s": seconds[-args.repeats :],
            "loss": loss,
            "build_s": built_s,
            **one.figures(),
        }
        if one.rank == 0:
            print(
                f"{args.worker} {rows} rows: {float(np.median(row['step_s'])):.3f} s a step",
                file=sys.stderr,
            )
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")
    sys.stderr.flush()
    os._exit(0)  # unlocking host memory takes longer than measuring


def run(
    args: Any,
    variant: str,
    gpus: int,
    batches: list[int],
    left_s: float,
    module: str = "benchmarks.slideformer.ranks",
) -> list[dict[str, Any]]:
    """One run of `torchrun`; rows of what it has measured, and of what it has not why."""
    rows: list[dict[str, Any]] = []
    why = "out of time"
    if left_s > LEAST_S:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows"
            processes = 1 if variant.startswith("roundpipe") else gpus
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(processes),
            ]
            command += ["--master-port", str(port), "-m", module, "--worker", variant]
            command += [
                "--batches",
                ",".join(map(str, batches)),
                "--out",
                str(out),
                "--shape",
                args.shape,
            ]
            command += [
                "--length",
                str(args.length),
                "--device",
                args.device,
                "--warmup",
                str(args.warmup),
            ]
            command += ["--repeats", str(args.repeats), "--visible", str(gpus)]
            command += [f"--option={word}" for word in args.option]
            for name in ("gpu_bytes", "host_gib", "bus"):
                if (value := getattr(args, name, None)) is not None:
                    command += [f"--{name.replace('_', '-')}", str(value)]
            most = max(gpus, torch.cuda.device_count())
            threads = os.environ.get(
                "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // most))
            )
            environment = {**os.environ, "OMP_NUM_THREADS": threads}
            mine = os.sched_getaffinity(0)
            if variant.startswith("roundpipe"):  # it takes what it sees
                mine = set().union(*_parts()[:gpus])
                environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
                environment |= {"OMP_NUM_THREADS": str(int(threads) * gpus)}
            process = subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, mine),
            )
            try:
                code = process.wait(left_s)
                why = f"ended with {code}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if out.exists():
                rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows += [{"rows": count, "error": f"not run: {why}"} for count in batches[len(rows) :]]
    return [
        {"variant": variant, "gpus": gpus, "shape": args.shape, "length": args.length, **row}
        for row in rows
    ]


def compare(rows: list[dict[str, Any]], length: int) -> None:
    """Add tokens a second, and how many times one GPU that is, if one had the rows of each or all
    of them."""
    rates = {}
    for row in rows:
        if "step_s" in row:
            row["tokens_per_s"] = row["rows"] * length / float(np.median(row["step_s"]))
            rates[row["variant"], row["gpus"], row["rows"]] = row["tokens_per_s"]
    for row in rows:
        for name, base in (("weak", row["rows"] / row["gpus"]), ("strong", row["rows"])):
            one = rates.get((row["variant"], 1, base))
            if one and "step_s" in row:
                row[name] = row["tokens_per_s"] / one


def main() -> None:
    args = parse_args(__doc__, arguments)
    if args.worker:
        work(args, build)
    began, rows = time.monotonic(), []
    counts = [int(word) for word in args.gpus.split(",")]
    for gpus in counts:
        for variant in args.variants.split(","):
            theirs = (
                args.peers_strong
                if variant != "slideformer" and args.peers_strong is not None
                else args.rows_all
            )
            strong = [int(word) for word in theirs.split(",") if word]
            batches = list(
                dict.fromkeys([args.rows_each * gpus, *(n for n in strong if n % gpus == 0)])
            )
            for part in [[n] for n in batches] if variant == "slideformer" else [batches]:
                rows += run(args, variant, gpus, part, args.budget_s - (time.monotonic() - began))
            compare(rows, args.length)
            if args.out:
                args.out.write_text(
                    json.dumps({"benchmark": "slideformer/ranks", "partial": True, "rows": rows})
                )
    notes = [
        f"{args.shape}, {args.length:,} tokens a row, medians of {args.repeats} steps; options: "
        f"{' '.join(args.option) or 'none'}. Weak is compared with one GPU with the rows "
        "of one, strong with one GPU with all rows; a run on n of N GPUs has n / N of the cores. "
        "FSDP2: float32 parameters, gradients and moments in "
        "host memory, bfloat16 computation. DeepSpeed: ZeRO-3, parameters and AdamW offloaded, float32 masters and "
        "moments, bfloat16 computation, bucket sizes as transformers sets them. RoundPipe: float32 masters and moments."
    ]
    finish(
        "slideformer/ranks",
        rows,
        args,
        COLUMNS,
        title="SlideFormer on the GPUs of a host",
        notes=notes,
    )


if __name__ == "__main__":
    main()
