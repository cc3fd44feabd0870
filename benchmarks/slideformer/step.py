"""Steps of full-parameter AdamW with the layer-sliding engine, without offload, and with other
programs.

    python -m benchmarks.slideformer.step --shapes Qwen2.5-7B --batches 8,16 --variants resident,slideformer --out FILE

A value is the wall time from one step's end to the next one's, in a run of consecutive steps that
began with others. Variants take turns. Weights and tokens are random; every token is labelled.
`bound_s` is the least that a step can take: max(8PT/F, bytes in / B, bytes out / B, P / M), with F
the resident step's rate, B of pinned copies and M of the update next to the copies of a step, which
take their part of the same memory, all measured here; P/M counts what the host updates.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import add_arguments, finish, machine_info, median, parse_args
from benchmarks.offload import model as om
from benchmarks.offload.live import Live, Running, Sliding, merge, reason, short
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.offload.device import open_device
from ondevice.offload.engine import chrome_trace, host_threads

NEEDS = ("cuda",)
SLIDING = ("slideformer", "slideformer-bf16", "slideformer-int8")
RESIDENT = ("resident", "resident_window", "resident_adamw")
PEERS = (
    "fsdp2",
    "torchao",
    "torchao-fp32",
    "deepspeed-2",
    "deepspeed-3",
    "roundpipe",
    "roundpipe-late",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = [
    {"key": "shape", "title": "Shape"},
    {"key": "batch", "title": "Batch"},
    {"key": "variant", "title": "Variant"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "tflops", "title": "TFLOP/s", "digits": 0},
    {"key": "of_resident", "title": "Of no offload", "digits": 3},
    {"key": "of_bound", "title": "Of the bound", "digits": 3},
    {"key": "bound_by", "title": "Bound by"},
    {"key": "hiding_factor", "title": "Hiding factor", "digits": 2},
    {"key": "gpu_peak_bytes", "title": "GPU peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "host_bytes", "title": "Host, ours (GB)", "scale": 1e-9, "digits": 1},
    {"key": "host_rss_peak_bytes", "title": "Host peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "error", "title": "Not run"},
]
NOTES = [
    "TFLOP/s is 8 · parameters · tokens / time: 2 for the forward pass, 2 for its recomputation, 4 for the backward "
    "pass; all parameters count, attention's products do not.",
    "GPU peak is of what the variant itself holds, without the CUDA context. Variants are checkpointed per layer, and "
    "`resident` has no update: no step can be faster.",
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="Qwen2.5-7B", help=", ".join(om.SHAPES))
    parser.add_argument("--batches", default="8,16,32")
    parser.add_argument(
        "--variants", default="resident,slideformer", help=", ".join((*RESIDENT, *SLIDING, *PEERS))
    )
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="of SlideformerConfig"
    )
    add_arguments(parser, "--rounds", "--host-gib")
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps before a variant's first run; 1 before others"
    )
    parser.add_argument("--limit-gib", type=float, help="GPU memory that PyTorch may take")
    parser.add_argument(
        "--calibrate", type=int, default=200_000_000, help="parameters of the update that is timed"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        help="also a Chrome trace and spans of a step: FILE-shape-variant-batch",
    )
    parser.add_argument(
        "--budget-s", type=float, default=1e9, help="begin nothing new so long after the start"
    )


class Bench(Running):
    """All rows of a run; the file is written after each."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        SlideformerConfig(**self.options)
        self.machine = machine_info()
        if args.limit_gib and args.device != "cpu":
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.limit_gib * 2**30 / whole))
        self.copies = om.copy_rates(args.device)
        om.release(args.device)
        self.updates: dict[str, tuple[float, float]] = {}  # alone, and next to copies
        self.say("copies GB/s", {name: round(rate / 1e9, 1) for name, rate in self.copies.items()})

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            document = {
                "benchmark": "slideformer/step",
                "partial": True,
                "machine": self.machine,
                "rows": self.rows,
            }
            self.args.out.write_text(json.dumps(document) + "\n")
        shown = ("step_s", "tokens_per_s", "tflops", "of_resident", "bound_s", "of_bound", "bound_by", "hiding_factor",
                 "gpu_peak_bytes", "host_bytes", "segments_constant", "first_loss", "error")  # fmt: skip
        self.say(
            row["shape"],
            row["variant"],
            row["batch"],
            {k: short(row[k]) for k in shown if row.get(k)},
        )

    def shape(self, shape: str) -> None:
        """Every variant: as many at once as host memory holds, the first one without offload next
        to all of them."""
        names, batches = (
            self.args.variants.split(","),
            [int(word) for word in self.args.batches.split(",")],
        )
        base = next((name for name in names if name in ("resident", "resident_window")), None)
        block = om.random_block(shape, self.args.device)
        for name in names:
            kind = om.sliding_moments(name)
            if name in SLIDING and kind not in self.updates:
                threads = int(
                    self.options.get("threads") or host_threads(torch.device(self.args.device).type)
                )
                opened = open_device(self.args.device)
                alone, beside = (
                    om.update_rate(kind, threads, self.args.calibrate, one)
                    for one in (None, opened)
                )
                opened.close()
                self.updates[kind] = alone, beside
                self.say(f"update, {kind}: {_rates(alone, beside)}, {threads} threads")
        om.release(self.args.device)
        self.data = om.Batches(om.shape_dims(shape)[0].vocab, self.args.length)
        waiting = [name for name in names if name != base]
        live: dict[str, Live] = {}
        try:
            if base is not None:
                self.build(live, base, shape, block, batches)
            turn = 0
            while waiting or not turn:
                self.group(live, waiting, shape, block, base, batches)
                for rows in batches:
                    self.measure(live, shape, rows, base, turn)
                turn += 1
                for name in [name for name in live if name != base]:
                    self.close(live.pop(name))
        finally:
            for name in list(live):
                self.close(live.pop(name))

    def group(
        self, live: dict[str, Live], waiting: list[str], shape: str, block: torch.Tensor, base: str | None,
        batches: list[int],
    ) -> None:  # fmt: skip
        """Build as many of `waiting` as host memory holds at once; what does not fit alone is
        refused."""
        free = self.free_bytes()
        while waiting:
            need, why = om.host_need(
                waiting[0], shape, self.options, max(batches), self.args.length
            )
            if need > free and any(name != base for name in live):
                return
            name = waiting.pop(0)
            if need > free:
                message = f"does not fit: {need / 1e9:.1f} GB of host memory ({why}), {free / 1e9:.1f} GB are free"
                self.refuse(shape, name, batches, message)
            elif self.build(live, name, shape, block, batches):
                free -= need

    def build(
        self, live: dict[str, Live], name: str, shape: str, block: torch.Tensor, batches: list[int]
    ) -> bool:
        if self.late():
            self.refuse(shape, name, batches, "not run: out of time")
            return False
        try:
            live[name] = Live(name, self.args, shape, block, self.options)
        except Exception as error:
            self.refuse(shape, name, batches, reason(error))
            om.release(self.args.device)
            return False
        one, pinned = live[name], ""
        if isinstance(one.variant, Sliding):
            pinned = f"; locking {one.pin_bytes / 1e9:.1f} GB took {one.pin_s:.1f} s of it"
        self.say(f"{shape} {name}: built in {one.build_s:.1f} s{pinned}")
        return True

    def refuse(self, shape: str, name: str, batches: list[int], why: str) -> None:
        for rows in batches:
            self.add({"shape": shape, "batch": rows, "variant": name, "error": why})

    def free_bytes(self) -> int:
        available = psutil.virtual_memory().available
        if self.args.host_gib:
            available = max(
                available, int(self.args.host_gib * 2**30) - psutil.Process().memory_info().rss
            )
        return available - 2**30

    def measure(
        self, live: dict[str, Live], shape: str, rows: int, base: str | None, turn: int
    ) -> None:
        """One batch size: runs of all variants in turns, then their rows. In later groups the base
        runs briefly."""
        by_name: dict[str, dict[str, Any]] = {}
        errors = {name: "not run: it failed before" for name, one in live.items() if one.failed}
        for number in range(self.args.rounds):
            names = [name for name in live if name not in errors]
            for name in reversed(names) if number % 2 else names:
                share = self.args.repeats // self.args.rounds + (
                    number < self.args.repeats % self.args.rounds
                )
                share = min(1, share) if name == base and turn else share
                if not share or self.late():
                    continue
                warmup = 1 if number or name in RESIDENT else self.args.warmup
                try:
                    merge(by_name, name, live[name].run(self.data, rows, warmup, share))
                except Exception as error:
                    errors[name] = reason(error)
        beside = median(by_name[base]["step_s"]) if base in by_name else None
        for name, one in live.items():
            row = {"shape": shape, "batch": rows, "variant": name, "group": turn}
            if name in by_name:
                row |= self.row(one, shape, rows, by_name[name], beside)
            if name in errors or name not in by_name:
                row["error"] = errors.get(name, "not run: out of time")
            self.add(row)
        if errors:
            om.release(self.args.device)

    def row(
        self, one: Live, shape: str, rows: int, seen: dict[str, Any], beside: float | None
    ) -> dict[str, Any]:
        """Everything about one variant at one batch size."""
        parameters, tokens = om.shape_dims(shape)[0].parameters, rows * self.args.length
        step_s, work = median(seen["step_s"]), 8.0 * parameters * tokens
        row: dict[str, Any] = {
            **seen, "parameters": parameters, "tokens_per_s": tokens / step_s, "tflops": work / step_s / 1e12,
            "of_resident": beside / step_s if beside else None, "first_loss": one.first_loss, "build_s": one.build_s,
            "host_rss_peak_bytes": one.host_peak, "limit_gib": self.args.limit_gib, "device": self.args.device,
        }  # fmt: skip
        if not isinstance(one.variant, Sliding):
            return row
        engine = one.variant.engine
        row |= {"host_bytes": engine.host_bytes, "pin_s": one.pin_s, "pin_bytes": one.pin_bytes}
        row |= {
            "options": self.options,
            "kernels": engine.kernels,
            "disk_fraction": engine.config.disk_fraction,
        }
        last = engine.overlap
        if last is None:
            return row
        row |= last.to_dict()
        _, beside_copies = self.updates[om.sliding_moments(one.name)]
        bounds = {
            "h2d": last.h2d_bytes / self.copies["h2d"],
            "d2h": last.d2h_bytes / self.copies["d2h"],
            "update": sum(unit.parameters for unit in engine.store.owned) / beside_copies,
        } | ({"compute": beside} if beside else {})
        by = max(bounds, key=lambda name: bounds[name])
        row |= {
            "bounds_s": bounds,
            "bound_s": bounds[by],
            "bound_by": by,
            "of_bound": bounds[by] / step_s,
        }
        if self.args.trace:
            stem = self.args.trace.with_suffix("")
            path = stem.with_name(f"{stem.name}-{shape}-{one.name}-{rows}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            chrome_trace(engine.spans, path)
            title = f"{shape}, batch {rows}, {one.name}, {_machine(self.machine)}"
            spans = {"title": title, "wall_s": last.wall_s, "spans": engine.spans}
            path.with_suffix(".spans.json").write_text(json.dumps(spans) + "\n")
        return row


def _rates(alone: float, beside: float) -> str:
    return f"{alone / 1e9:.2f} G parameters/s by itself, {beside / 1e9:.2f} during a step's copies"


def _machine(machine: dict[str, Any]) -> str:
    return f"{machine['gpus'][0]['name'] if machine['gpus'] else machine['cpu']}, {machine['cores']} cores"


def main() -> None:
    args = parse_args(__doc__, arguments)
    bench = Bench(args)
    for shape in args.shapes.split(","):
        try:
            bench.shape(shape)
        except Exception as error:
            bench.add({"shape": shape, "batch": None, "variant": None, "error": reason(error)})
        om.release(args.device)
    copies = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in bench.copies.items())
    updates = ", ".join(f"{kind} {_rates(*both)}" for kind, both in bench.updates.items())
    notes = [*NOTES, f"Calibration: copies {copies}; update {updates}."]
    finish(
        "slideformer/step",
        bench.rows,
        args,
        COLUMNS,
        title="SlideFormer: steps per variant",
        notes=notes,
    )


if __name__ == "__main__":
    main()
