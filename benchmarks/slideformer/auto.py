"""Steps with the default settings (`auto`), with fixed ones, and without offload, each alone in
memory.

    python -m benchmarks.slideformer.auto --shapes Qwen2.5-1.5B,Qwen2.5-7B:bfloat16 --batches 4,8,16,32 --out FILE

`auto` decides for each batch, from ten seconds of calibration at the start; if the choice is that
of the batch before, the engine is, too. `fixed` is `window: 3, resident_layers: 0, resident_tables:
false, gradient_buffers: 4`. `resident` has no update and no offload: no step can be faster. Peers
(`fsdp2`, `deepspeed-2`, `deepspeed-3`, `torchao`, `torchao-fp32`, `roundpipe`, `roundpipe-late`)
run if they are installed, each with what it is set to next to its row. Kernels are the defaults on
every side: liger's where it is installed, but for RoundPipe, which has its own layers. A value is
the wall time from one step's end to the next one's. All variants compute the same tokens; `same
losses` compares the first ones with those of `fixed`, bit for bit. Before the steps, only AdamW:
on the host's threads by kind of moments, and on the GPU, if its bits are compared with the host's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.common import add_arguments, finish, median, parse_args, write_result
from benchmarks.offload import model as om
from benchmarks.offload import peers
from benchmarks.offload.live import Peak, other, reason, short
from ondevice.methods.slideformer.auto import Room, Work, resolve
from ondevice.methods.slideformer.config import BUFFERS, WINDOW, SlideformerConfig
from ondevice.offload.calibrate import calibrate
from ondevice.offload.engine import OffloadEngine, host_threads
from ondevice.offload.liger import use_liger
from ondevice.planning.devices import find_device
from ondevice.runtime_ops import layer_adam as la

NEEDS = ("cuda",)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIXED = {
    "window": WINDOW,
    "resident_layers": 0,
    "resident_tables": False,
    "gradient_buffers": BUFFERS,
}
COLUMNS = [
    {"key": "shape", "title": "Shape"},
    {"key": "batch", "title": "Batch"},
    {"key": "variant", "title": "Variant"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "of_resident", "title": "Of no offload", "digits": 3},
    {"key": "bound", "title": "Bound by"},
    {"key": "hiding_factor", "title": "Hiding factor", "digits": 2},
    {"key": "choice", "title": "Choice, or a peer's settings"},
    {"key": "gpu_peak_bytes", "title": "GPU peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "host_bytes", "title": "Host, ours (GB)", "scale": 1e-9, "digits": 1},
    {"key": "same_losses", "title": "Same losses"},
    {"key": "error", "title": "Not run"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        default="Qwen2.5-1.5B,Qwen2.5-7B:bfloat16",
        help="SHAPE or SHAPE:MOMENTS, by comma",
    )
    parser.add_argument("--batches", default="4,8,16,32")
    parser.add_argument("--variants", default="resident,auto,fixed")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=200_000_000, help="for AdamW by itself")
    add_arguments(parser, "--gpu-bytes", "--host-gib")
    parser.add_argument(
        "--budget-s", type=float, default=460.0, help="begin nothing new so long after the start"
    )


class Bench:
    """All rows of a run."""

    def __init__(self, args: Any) -> None:
        self.args, self.began = args, psutil.Process().create_time()
        self.rows: list[dict[str, Any]] = []
        self.cuda = torch.device(args.device).type == "cuda"
        self.threads = host_threads(torch.device(args.device).type)
        self.losses: dict[tuple[str, int], list[float]] = {}
        self.on_gpu: dict[str, str] = {}

    def say(self, *words: Any) -> None:
        print(f"[{time.time() - self.began:6.1f} s]", *words, flush=True)

    def late(self) -> bool:
        return time.time() - self.began > self.args.budget_s

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.args.out:  # what is ended, or hangs in a peer, keeps what it has
            write_result("slideformer/auto", self.rows, self.args.out, COLUMNS)
        self.say({key: short(value) for key, value in row.items() if value is not None})

    def updates(self) -> dict[str, float]:
        """AdamW by itself, parameters a second by kind of moments; on the GPU its bits are held against
        the host's."""
        rates = {
            kind: om.update_rate(kind, self.threads, self.args.parameters) for kind in la.KINDS
        }
        for kind, rate in rates.items():
            gb_s = rate * la.BYTES["split", kind].moved / 1e9
            self.say(
                f"AdamW, {kind} moments: {rate / 1e9:.2f} G parameters/s, {gb_s:.0f} GB/s, {self.threads} threads"
            )
        for kind in la.KINDS if self.cuda else ():
            try:
                said = self._on_gpu(kind)
            except Exception as error:
                said = reason(error)
            self.on_gpu[kind] = said
            self.say(f"AdamW on the GPU, {kind} moments: {said}")
        return rates

    def _on_gpu(self, kind: str) -> str:
        count, where = (1 << 26) + 37, self.args.device
        moments = la.Moments.empty(count, kind)
        high, low = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.uint16)
        torch.manual_seed(0)
        la.split_(torch.randn(count).mul_(0.02), high, low, moments)
        host = la.HostState(None, high, low, moments, 3)
        moved = {name: tensor.to(where) for name, tensor in moments.tensors().items()}
        there = la.HostState(None, high.to(where), low.to(where), la.Moments(kind, **moved), 3)
        for number in range(1, 4):
            gradient = torch.randn(count).mul_(1e-3).bfloat16()
            step = la.AdamStep(1e-4, weight_decay=0.01, step=number)
            la.layer_adam(gradient, host, step, threads=self.threads)
            la.device_adam(gradient.to(where), there, step, None)
        on_gpu, times = gradient.to(where), []
        same = [
            torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))
            for a, b in zip(_tensors(host), _tensors(there), strict=True)
        ]
        for number in range(4, 9):
            torch.cuda.synchronize()
            started = time.perf_counter()
            la.device_adam(on_gpu, there, la.AdamStep(1e-4, step=number), None)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return f"{count / median(times) / 1e9:.0f} G parameters/s; the host's bits: {all(same)}"

    def shape(self, shape: str, moments: str) -> None:
        """Resident, then the engine by default settings for each batch, then by fixed ones."""
        batches = [int(word) for word in self.args.batches.split(",")]
        names = self.args.variants.split(",")
        self.name = shape if moments == "float32" else f"{shape}, {moments} moments"
        self.block = om.random_block(shape, self.args.device)
        self.data = om.Batches(om.shape_dims(shape)[0].vocab, self.args.length)
        om.release(self.args.device)
        self.beside: dict[int, float] = {}
        config = SlideformerConfig(**{"moments": moments, "timeout_s": 120.0})
        liger = use_liger(config, torch.device(self.args.device).type)
        if "resident" in names:
            self.measure(
                "resident",
                batches,
                lambda: other("resident", shape, self.block, self.args.device, liger),
                None,
            )
        rates = calibrate(config, self.args.device)
        self.say("calibration", {name: short(value) for name, value in asdict(rates).items()})
        om.release(self.args.device)
        if "fixed" in names:
            fixed = config.model_copy(update=FIXED)
            self.measure("fixed", batches, lambda: self._engine(shape, fixed), _words(fixed))
        choices: dict[str, tuple[SlideformerConfig, list[int]]] = {}
        for rows in batches if "auto" in names else ():
            chosen, why = resolve(
                config, om.shape_dims(shape)[0], Work(rows, self.args.length), self.room(), rates
            )
            self.say(f"{self.name}, batch {rows}: {why}")
            choices.setdefault(_words(chosen), (chosen, []))[1].append(rows)
        for words, (chosen, rows) in choices.items():
            self.measure("auto", rows, lambda chosen=chosen: self._engine(shape, chosen), words)
        for name in names:
            if name not in ("resident", "fixed", "auto"):
                build = partial(other, name, shape, self.block, self.args.device, liger)
                self.measure(name, batches, build, _settings(name))

    def room(self) -> Room:
        """Memory as `ondevice plan` sees it; without a GPU a made-up one, so that the choice is
        made all the same."""
        free = (
            int(self.args.gpu_bytes)
            if self.args.gpu_bytes
            else find_device(f"this-{self.args.device}").usable_bytes
        )
        host = find_device("this-cpu").usable_bytes
        if self.args.host_gib:
            host = max(host, int(self.args.host_gib * 2**30) - psutil.Process().memory_info().rss)
        return Room(free, host)

    def _engine(self, shape: str, config: SlideformerConfig) -> OffloadEngine:
        return OffloadEngine(om.make_family(shape, self.block), config, self.args.device)

    def measure(self, variant: str, batches: list[int], build: Any, choice: str | None) -> None:
        """Rows of one variant, the only one in memory."""
        base = {
            "shape": self.name,
            "variant": variant,
            "choice": choice,
            "length": self.args.length,
        }
        if self.late():
            for rows in batches:
                self.add({**base, "batch": rows, "error": "not run: out of time"})
            return
        try:
            held = torch.cuda.memory_allocated() if self.cuda else 0
            one = build()
        except Exception as error:
            for rows in batches:
                self.add({**base, "batch": rows, "error": reason(error)})
            om.release(self.args.device)
            return
        number = 0
        for rows in batches:
            row = {**base, "batch": rows}
            try:
                row["error"] = "not run: out of time" if self.late() else None
                if row["error"] is None:
                    number, seen = self._run(one, variant, rows, number, held)
                    row |= seen
            except Exception as error:
                row["error"] = reason(error)
            self.add(row)
        try:
            one.close()
        except Exception as error:
            self.say(f"{variant}: closing: {reason(error)}")
        del one
        om.release(self.args.device)

    def _run(
        self, one: Any, variant: str, rows: int, number: int, held: int
    ) -> tuple[int, dict[str, Any]]:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        peak, times, losses, mark = Peak(), [], [], time.perf_counter()
        try:
            for turn in range(self.args.warmup + self.args.repeats):
                ids = self.data.get(rows, turn)
                if isinstance(one, OffloadEngine):
                    losses.append(one.step(ids, ids, number, peers.RATE))
                else:
                    losses.append(one.step(ids, ids))
                number += 1
                now = time.perf_counter()
                if turn >= self.args.warmup:
                    times.append(now - mark)
                mark = now
            if isinstance(one, OffloadEngine):
                one.flush()
        finally:
            host = peak.stop()
        seen: dict[str, Any] = {
            "step_s": times, "tokens_per_s": rows * self.args.length / median(times), "first_losses": losses[:3],
            "gpu_peak_bytes": torch.cuda.max_memory_allocated() - held if self.cuda else None,
            "host_rss_peak_bytes": host,
        }  # fmt: skip
        if variant == "resident":
            self.beside[rows] = median(times)
        if rows in self.beside:
            seen["of_resident"] = self.beside[rows] / median(times)
        if isinstance(one, OffloadEngine):
            seen |= {"host_bytes": one.host_bytes, "kernels": one.kernels}
            if one.overlap is not None:
                seen |= one.overlap.to_dict()
            if variant == "fixed" and number == self.args.warmup + self.args.repeats:
                self.losses[self.name, rows] = losses
            elif (
                self.name,
                rows,
            ) in self.losses and number == self.args.warmup + self.args.repeats:
                seen["same_losses"] = losses == self.losses[self.name, rows]
        return number, seen


def _tensors(state: la.HostState) -> list[torch.Tensor]:
    return [t for t in (state.high, state.low, *state.moments.tensors().values()) if t is not None]


def _settings(name: str) -> str:
    """A peer's version, and what it is set to; all keep one input a layer and compute the rest
    again."""
    package = {"fsdp2": "torch", "torchao-fp32": "torchao"}.get(name, name.partition("-")[0])
    try:
        found = f"{package} {version(package)}"
    except PackageNotFoundError:
        found = f"{package}, not installed"
    said = {
        "fsdp2": "fully_shard by layer, CPUOffloadPolicy, float32 parameters and moments, bf16 passes, fused AdamW",
        "deepspeed-2": "ZeRO-2, optimizer offload, CPUAdam, float32 masters and moments, overlap_comm",
        "deepspeed-3": "ZeRO-3, parameters and optimizer offloaded, CPUAdam, float32 masters and moments, overlap_comm",
        "torchao": "CPUOffloadOptimizer, gradients offloaded, bf16 parameters and moments, no masters",
        "torchao-fp32": "CPUOffloadOptimizer, gradients offloaded, float32 parameters and moments, bf16 autocast",
        "roundpipe": "float32 masters and moments, 2 micro-batches, updates in step",
        "roundpipe-late": "float32 masters and moments, 2 micro-batches, updates a step late",
    }
    return f"{found}: {said[name]}" if name in said else found


def _words(config: SlideformerConfig) -> str:
    tables = "tables and " if config.keeps_tables else ""
    return f"{tables}{config.kept_layers} layers resident, window {config.slots}, {config.buffers} buffers"


def main() -> None:
    args = parse_args(__doc__, arguments)
    bench = Bench(args)
    rates = bench.updates()
    for text in args.shapes.split(","):
        shape, _, moments = text.partition(":")
        try:
            bench.shape(shape, moments or "float32")
        except Exception as error:
            bench.add({"shape": text, "batch": None, "variant": None, "error": reason(error)})
        om.release(args.device)
    alone = ", ".join(f"{kind} {rate / 1e9:.2f} G parameters/s" for kind, rate in rates.items())
    notes = [
        "`resident` has no update and no offload; every variant is checkpointed per layer, with the default kernels. "
        "Only one variant was in memory at a time. GPU peak is of what the variant itself holds.",
        f"Only AdamW on {bench.threads} threads: {alone}.",
        *(f"AdamW on the GPU, {kind} moments: {said}." for kind, said in bench.on_gpu.items()),
    ]
    title = "SlideFormer: default settings next to fixed ones"
    finish("slideformer/auto", bench.rows, args, COLUMNS, title=title, notes=notes)


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
