"""Steps where offloading is needed: models that do not fit the GPU's memory, which is limited alike
for every side, and peers in turns with our defaults.

    python -m benchmarks.slideformer.large --cap-gib 24 --host-gib 110 --log FOLDER/large.jsonl --out FOLDER/large.json

Each turn of a variant is a process of its own, so that all memory comes back; a variant that is
named several times has several turns. A turn that takes more host memory than `--host-gib`, or
outlasts `--turn-s`, is ended. Every row is written to `--log` once it is known, and a run that is
started again goes on after the turns that are there. Weights are random and made on the GPU.

`auto`, `bf16`, `int8` are our defaults with moments of 32, 16 and 8 bits, `muon` with Muon;
`resident_window` has no update and shares one layer's memory among all layers: no step can be
faster. Peers are those of benchmarks.slideformer.step and `trainstream`, and `fsdp2-pageable`,
FSDP2 without locked memory, for hosts that cannot lock 16 bytes a parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import add_arguments, finish, median, parse_args
from benchmarks.offload import model as om
from benchmarks.offload import peers
from benchmarks.offload.live import other, reason, short
from ondevice.methods.slideformer.auto import Room, Work, resolve
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.offload.calibrate import calibrate
from ondevice.offload.config import Rates
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.liger import use_liger

NEEDS = ("cuda",)
OURS: dict[str, dict[str, str]] = {
    "auto": {},
    "bf16": {"moments": "bfloat16"},
    "int8": {"moments": "int8"},
    "muon": {"optimizer": "muon"},
    "muon-bf16": {"optimizer": "muon", "moments": "bfloat16"},
}
EXACT = (
    "fsdp2", "fsdp2-pageable", "deepspeed-2", "deepspeed-3", "superoffload", "roundpipe", "torchao-fp32",
    "trainstream",
)  # fmt: skip
"""Peers with float32 masters and moments whose updates are in step."""
HEAD_S = 25.0
"""Least time that a turn is begun with."""
COLUMNS = [
    {"key": "shape", "title": "Shape"},
    {"key": "cap_gib", "title": "GPU limit (GiB)", "digits": 0},
    {"key": "batch", "title": "Batch"},
    {"key": "variant", "title": "Variant"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "of_resident", "title": "Of no offload", "digits": 3},
    {"key": "times_best", "title": "Times the best exact peer", "digits": 2},
    {"key": "gpu_peak_bytes", "title": "GPU peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "host_peak_bytes", "title": "Host peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "build_s", "title": "Start (s)", "digits": 0},
    {"key": "choice", "title": "Choice"},
    {"key": "error", "title": "Not run"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="Llama2-7B,Qwen2.5-14B", help=", ".join(om.SHAPES))
    parser.add_argument("--batches", default="8,32")
    parser.add_argument(
        "--variants",
        default="resident_window,auto,muon,fsdp2-pageable,trainstream,torchao,auto",
        help="turns, in order; SHAPE:VARIANT is of one shape",
    )
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each batch size before")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="GPU memory of every side")
    parser.add_argument("--turn-s", type=float, default=170.0)
    parser.add_argument("--budget-s", type=float, default=520.0)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--turn", help="internal: one turn, SHAPE:VARIANT:NUMBER")
    parser.add_argument("--until", type=float, help="internal: begin nothing new from then on")
    add_arguments(parser, "--host-gib", "--log")


def used_bytes() -> int:
    """Host memory in use by all processes; locked memory is in no process's resident set."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


class Watch:
    """The most host memory that is in use, above what was when this began."""

    def __init__(self) -> None:
        self.before, self.peak_bytes, self.ended = used_bytes(), 0, threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self.ended.wait(0.2):
            self.peak_bytes = max(self.peak_bytes, used_bytes() - self.before)


def host_need(shape: str, variant: str, rows: int, length: int) -> tuple[int, str]:
    """Host bytes that a variant needs at least, and why."""
    total = om.shape_dims(shape)[0].parameters
    if variant == "fsdp2-pageable":
        return 16 * total, "float32 parameters, gradients and moments"
    if variant == "trainstream":
        return 12 * total, "float32 parameters and moments"
    if variant in ("superoffload", "zenflow"):
        return om.host_need("deepspeed-3", shape, {}, rows, length)
    if variant == "muon":
        return 8 * total, "8 bytes a parameter"
    if variant == "muon-bf16":
        return 6 * total, "6 bytes a parameter"
    name = "slideformer" if variant == "auto" else f"slideformer-{variant}"
    return om.host_need(name if variant in OURS else variant, shape, {}, rows, length)


class Ours:
    """The engine by its defaults; another one if a batch size asks for other values."""

    def __init__(self, shape: str, block: torch.Tensor, args: Any, variant: str) -> None:
        self.shape, self.block, self.args = shape, block, args
        self.config = SlideformerConfig(**{"timeout_s": 120.0, **OURS[variant]})
        self.rates = self._rates()
        self.engine: OffloadEngine | None = None
        self.choice, self.words, self.number = "", "", 0

    def _rates(self) -> Rates:
        rates = calibrate(self.config, self.args.device)
        om.release(self.args.device)
        return rates

    def prepare(self, rows: int) -> None:
        """Have the engine that `auto` chooses for so many rows."""
        args = self.args
        room = Room(int(args.cap_gib * 2**30), int(args.host_gib * 2**30))
        dims, work = om.shape_dims(self.shape)[0], Work(rows, args.length)
        config, self.words = resolve(self.config, dims, work, room, self.rates)
        tables = "tables and " if config.keeps_tables else ""
        choice = f"{tables}{config.kept_layers} layers resident, window {config.slots}, {config.buffers} buffers"
        if choice == self.choice:
            return
        self.close()
        family = om.make_family(self.shape, self.block)
        self.engine = OffloadEngine(family, config, args.device)
        self.choice, self.number = choice, 0

    def step(self, ids: Any, labels: Any) -> float:
        assert self.engine is not None
        self.number += 1
        return self.engine.step(ids, labels, self.number - 1, peers.RATE)

    def flush(self) -> None:
        assert self.engine is not None
        self.engine.flush()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None
            om.release(self.args.device)


def built(shape: str, variant: str, block: torch.Tensor, args: Any) -> Any:
    """A variant in memory."""
    liger = use_liger(SlideformerConfig(), torch.device(args.device).type)
    if variant in OURS:
        return Ours(shape, block, args, variant)
    if variant.startswith("fsdp2"):
        return peers.Fsdp2(shape, block, args.device, liger, lock=variant == "fsdp2")
    if variant == "trainstream":
        from benchmarks.offload.trainstream import TrainStream

        return TrainStream(shape, block, args.device, liger)
    return other(variant, shape, block, args.device, liger)


def turn(args: Any) -> None:
    """One turn: its rows, each to the log once it is known."""
    shape, variant, number = args.turn.split(":")
    watch, began = Watch(), time.time()
    cuda = torch.device(args.device).type == "cuda"
    if cuda:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gib * 2**30 / whole))
    base = {"shape": shape, "variant": variant, "turn": int(number), "length": args.length}
    one: Any = None
    try:
        block = om.random_block(shape, args.device)
        data = om.Batches(om.shape_dims(shape)[0].vocab, args.length)
        om.release(args.device)
        one = built(shape, variant, block, args)
    except Exception as error:
        for rows in _batches(args):
            _log(args, {**base, "batch": rows, "error": reason(error)})
        return
    for rows in _batches(args):
        if time.time() > args.until:
            break  # no row: the next run goes on here
        row = {**base, "batch": rows}
        try:
            if isinstance(one, Ours):
                one.prepare(rows)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            row["build_s"] = time.time() - began
            warmup = args.warmup + 3 * (variant == "trainstream")  # its planner settles
            row |= _steps(one, data, rows, warmup, args.repeats, args.until)
            row["gpu_peak_bytes"] = torch.cuda.max_memory_reserved() if cuda else None
            row["choice"] = getattr(one, "choice", None) or getattr(one, "version", None)
            row["host_peak_bytes"] = watch.peak_bytes
            row["why"] = getattr(one, "words", None)
        except Exception as error:
            row["error"] = reason(error)
            om.release(args.device)
        _log(args, row)
        began = time.time()
    os._exit(0)  # the process takes its memory along, quicker than it would be given back


def _steps(
    one: Any, data: om.Batches, rows: int, warmup: int, count: int, until: float
) -> dict[str, Any]:
    """Seconds from one step's end to the next one's; fewer if time runs out."""
    times: list[float] = []
    losses: list[float] = []
    mark = time.perf_counter()
    for number in range(warmup + count):
        if len(times) > 1 and time.time() > until:
            break
        ids = data.get(rows, number)
        losses.append(one.step(ids, ids))
        now = time.perf_counter()
        if number >= warmup:
            times.append(now - mark)
        mark = now
    one.flush()
    return {"step_s": times, "first_losses": losses[:2]}


def _batches(args: Any) -> list[int]:
    return [int(word) for word in args.batches.split(",")]


def _log(args: Any, row: dict[str, Any]) -> None:
    with args.log.open("a") as file:
        file.write(json.dumps({**row, "cap_gib": args.cap_gib}) + "\n")


def logged(path: Path) -> list[dict[str, Any]]:
    """The rows that are known."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _turns(args: Any) -> list[tuple[str, str, int]]:
    """Shape, variant and number of every turn, in order."""
    turns: list[tuple[str, str, int]] = []
    for shape in args.shapes.split(","):
        seen: Counter[str] = Counter()
        for word in args.variants.split(","):
            only, _, variant = word.rpartition(":")
            if only and only != shape:
                continue
            turns.append((shape, variant, seen[variant]))
            seen[variant] += 1
    return turns


def run(args: Any, shape: str, variant: str, number: int, ends: float) -> None:
    """Start a turn and end it if it takes too long or too much host memory; what it did not log by
    its own fault is logged as an error."""
    command = [sys.executable, "-u", "-m", "benchmarks.slideformer.large"]
    for name in ("batches", "length", "device", "warmup", "repeats", "cap_gib", "host_gib", "log"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    limit = min(ends, time.time() + args.turn_s)
    command += ["--turn", f"{shape}:{variant}:{number}", "--until", str(limit - 8)]
    before, why = used_bytes(), ""
    environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ}
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    while process.poll() is None:
        if used_bytes() - before > args.host_gib * 2**30:
            why = f"ended: it took more than {args.host_gib:g} GiB of host memory"
        elif time.time() > limit:
            why = f"ended: it took longer than {args.turn_s:g} s"
        if why:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            break
        time.sleep(0.1)
    with suppress(ProcessLookupError):  # helpers that a peer has started
        os.killpg(process.pid, signal.SIGKILL)
    if not why and process.returncode:
        why = f"ended with status {process.returncode}"
    cut = time.time() > ends - 1  # this run's end, not the turn's
    if why and not cut:
        for rows in _missing(args, shape, variant, number):
            row = {"shape": shape, "variant": variant, "turn": number, "batch": rows, "error": why}
            _log(args, row)


def _missing(args: Any, shape: str, variant: str, number: int) -> list[int]:
    found = {
        row["batch"]
        for row in logged(args.log)
        if (row["shape"], row["variant"], row["turn"]) == (shape, variant, number)
    }
    return [rows for rows in _batches(args) if rows not in found]


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all turns of a variant at a batch size, with what it is of others."""
    every: dict[tuple[str, int, str], dict[str, Any]] = {}
    for row in rows:
        key = row["shape"], row["batch"], row["variant"]
        old = every.get(key)
        if old is None or "step_s" not in old:
            every[key] = dict(row)
        elif "step_s" in row:
            old["step_s"] = old["step_s"] + row["step_s"]
            for name in ("gpu_peak_bytes", "host_peak_bytes"):
                old[name] = max(old[name] or 0, row[name] or 0) or None
    for (shape, batch, variant), row in every.items():
        if "step_s" not in row:
            continue
        own = median(row["step_s"])
        row["tokens_per_s"] = batch * row.get("length", 1024) / own
        beside = {
            name: median(found["step_s"])
            for (at, of, name), found in every.items()
            if (at, of) == (shape, batch) and "step_s" in found
        }
        if "resident_window" in beside:
            row["of_resident"] = beside["resident_window"] / own
        exact = [beside[name] for name in EXACT if name in beside]
        if exact and variant in OURS:
            row["times_best"] = min(exact) / own
    return [every[key] for key in sorted(every, key=lambda key: (key[0], key[1]))]


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=3)
    if args.log is None:
        raise SystemExit("--log: expected a file for the rows")
    if args.tiny:
        args.shapes, args.length, args.device = "tiny", 16, "cpu"
        args.cap_gib = args.host_gib = 4.0
    if args.host_gib is None:
        args.host_gib = psutil.virtual_memory().total / 2**30 - 16
    if args.turn:
        turn(args)
        return
    args.log.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    ends = began + args.budget_s
    for shape, variant, number in _turns(args):
        missing = _missing(args, shape, variant, number)
        if not missing:
            continue
        base = {"shape": shape, "variant": variant, "turn": number}
        need, why = host_need(shape, variant, max(_batches(args)), args.length)
        if need > args.host_gib * 2**30:
            message = f"does not fit: {need / 1e9:.0f} GB of host memory ({why})"
            for rows in missing:
                _log(args, {**base, "batch": rows, "error": message})
            continue
        if time.time() > ends - HEAD_S:
            print(f"{shape} {variant}: not begun, out of time", flush=True)
            continue
        run(args, shape, variant, number, ends)
        for row in logged(args.log):
            if (row["shape"], row["variant"], row["turn"]) == (shape, variant, number):
                words = {key: short(value) for key, value in row.items() if value is not None}
                print(f"[{time.time() - began:5.0f} s]", words, flush=True)
    finish(
        "slideformer/large",
        merged(logged(args.log)),
        args,
        COLUMNS,
        title="SlideFormer: models that do not fit the GPU, next to peers",
        notes=[
            f"{args.length} tokens a row; the limit is that of every side, the peak is what PyTorch "
            f"reserved; at most {args.host_gib:g} GiB of host memory, what all processes used is "
            "shown. All keep one input a layer and compute the rest again.",
        ],
    )


if __name__ == "__main__":
    main()
