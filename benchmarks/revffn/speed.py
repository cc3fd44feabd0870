"""RevFFN's speed next to SFT with checkpointing on one GPU of 80 GB, over the same weights: with every
block computed again, with what `recompute: auto` keeps, and with all activations stored.

    python -m benchmarks.revffn.speed --profile

Qwen1.5-MoE-A2.7B's shape in bfloat16 (28.6 GB), random weights, Adafactor for all. Each way takes a
step of the same rows, and one of the most rows that its memory allows; ways take turns, and stay
open in between. What `auto` keeps is what a plan for `--plan-device` within `--limit-gb` decides.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from benchmarks.common import finish, median, parse_args
from benchmarks.revffn.memory import GIGA, Gpu

NEEDS = ("cuda",)
ADAFACTOR = {"optimizer": "adafactor"}
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "reversible": ("revffn", ADAFACTOR | {"recompute": "reversible"}, False),
    "auto": ("revffn", ADAFACTOR | {"recompute": "auto"}, False),
    "stored": ("revffn", ADAFACTOR | {"recompute": "stored"}, False),
    "sft": ("sft", ADAFACTOR, False),
}
KERNELS = {
    "products": ("gemm", "cutlass", "nvjet", "cublas", "grouped", "xmma", "splitk"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "copies between host and GPU": ("memcpy htod", "memcpy dtoh"),
}
"""Parts of a profile, by words in the names of their kernels; the others go element by element."""


class Speed(Gpu):
    """Ways that stay open, each with the optimizer's state of its first step."""

    def __init__(self, args: Any) -> None:
        super().__init__(args, WAYS)
        self.open: dict[tuple[str, Any], Any] = {}

    def kept(self, name: str, rows: int) -> Any:
        """Return what a way keeps in a step of so many rows; None if it is not RevFFN."""
        from ondevice.core.registry import method_config
        from ondevice.planning.devices import find_device
        from ondevice.planning.estimate import plan

        kind, settings, _ = WAYS[name]
        if kind != "revffn":
            return None
        if settings["recompute"] != "auto":
            return settings["recompute"]
        a = self.args
        device = find_device(a.plan_device).within(int(a.limit_gb / GIGA))
        config = method_config("revffn", {**settings, "loss_tiles": a.loss_tiles})
        shape = {"batch_size": rows, "length_tokens": a.length, "dtype": a.dtype}
        planned = plan(self.loaded.dims, config, device=device, **shape)
        return planned.request.method.recompute

    def step(self, name: str, rows: int) -> tuple[float, int] | None:
        """Seconds and peak bytes of a step; None if memory does not suffice."""
        import torch

        from ondevice.core.errors import OndeviceError

        for other in self.open.values():
            other.close()
        try:
            return self._timed(self.way(name, rows), rows)
        except (torch.OutOfMemoryError, OndeviceError) as error:
            print(f"{name}, {rows} rows: {type(error).__name__}: {str(error)[:160]}", flush=True)
            return None
        finally:
            for parameter in self.loaded.model.parameters():
                parameter.grad = None

    def way(self, name: str, rows: int) -> Any:
        """Return the way, open; its first step, of two rows, makes the optimizer's state."""
        from benchmarks.revffn.peers import open_way

        kind, settings, _ = WAYS[name]
        kept = self.kept(name, rows)
        if kept is not None:
            settings = settings | {"recompute": kept}
        key = (name, kept)
        if key in self.open:
            self.open[key].resume()
        else:
            self.open[key] = open_way(
                self.loaded, kind, loss_tiles=self.args.loss_tiles, **settings
            )
            self.open[key].step(*self.batch(2), 0, self.args.rate)
        return self.open[key]

    def parts(self, name: str, rows: int) -> dict[str, float]:
        """Seconds of a step's kernels by part."""
        import torch

        if self.step(name, rows) is None:
            return {}
        way = self.way(name, rows)
        batch = self.batch(rows)
        kinds = torch.profiler.ProfilerActivity
        kind = kinds.CUDA if self.cuda else kinds.CPU
        with torch.profiler.profile(activities=[kind]) as profile:
            way.step(*batch, 1, self.args.rate)
            if self.cuda:
                torch.cuda.synchronize()
        seconds = dict.fromkeys((*KERNELS, "element by element"), 0.0)
        for event in profile.key_averages():
            took = event.self_device_time_total if self.cuda else event.self_cpu_time_total
            seconds[part_of(event.key)] += took * 1e-6
        return seconds


def part_of(kernel: str) -> str:
    """Return the part of a step that a kernel belongs to."""
    name = kernel.lower()
    found = (part for part, words in KERNELS.items() if any(word in name for word in words))
    return next(found, "element by element")


def table(args: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure every way at equal rows and at its largest batch, in turns."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    speed = Speed(args)
    print(f"{speed.weights * GIGA:.2f} GB of weights after {speed.seconds:.0f} s", flush=True)
    cases = cases_of(speed)
    print(f"{list(cases)} after {speed.seconds:.0f} s", flush=True)
    measured: dict[tuple[str, int], list[tuple[float, int]]] = {case: [] for case in cases}
    for turn in range(-1, args.repeats):  # the first round warms up
        for case in reversed(list(cases)) if turn % 2 else list(cases):
            if speed.seconds > args.time_budget_s:
                continue
            one = speed.step(*case)
            if turn >= 0 and one is not None and one[1] <= speed.limit(case[0]):
                measured[case].append(one)
        print(f"round {turn} after {speed.seconds:.0f} s", flush=True)
    parts = {}
    if args.profile:
        parts = {case: speed.parts(*case) for case in cases if case[1] == max(args.equal_rows)}
        print(f"profiles after {speed.seconds:.0f} s", flush=True)
    return _rows(speed, cases, measured, parts), _notes(speed)


def cases_of(speed: Speed) -> dict[tuple[str, int], str]:
    """Return ways and rows, in the order of the table, and what the rows are.

    The largest batch of `auto` is that of `reversible`, with what is left kept.
    """
    cases = {}
    for rows in speed.args.equal_rows:
        for name in WAYS:
            cases[name, rows] = "equal"
    largest = {name: speed.largest(name) for name in ("reversible", "stored", "sft")}
    largest["auto"] = largest["reversible"]
    for name in WAYS:
        rows = largest[name]
        if rows is None or (name == "auto" and speed.kept(name, rows) == "reversible"):
            continue
        cases.setdefault((name, rows), "largest")
    for name, rows in list(cases):  # more than its memory holds
        if rows > (largest[name] or 0):
            del cases[name, rows]
    return cases


def _rows(
    speed: Speed,
    cases: dict[tuple[str, int], str],
    measured: dict[tuple[str, int], list[tuple[float, int]]],
    parts: dict[tuple[str, int], dict[str, float]],
) -> list[dict[str, Any]]:
    rates = {
        case: [case[1] * speed.args.length / seconds for seconds, _ in steps]
        for case, steps in measured.items()
    }
    best = max((median(rates[case]) for case in cases if case[0] == "sft" and rates[case]), default=None)  # fmt: skip
    rows = []
    for case, steps in measured.items():
        name, count = case
        sft = rates.get(("sft", count))
        ours = median(rates[case]) if steps else None
        rows.append({
            "method": name, "rows": count, "batch": cases[case], "kept": speed.kept(name, count),
            "peak_bytes": max((size for _, size in steps), default=None),
            "step_s": [seconds for seconds, _ in steps] or None, "tokens_per_s": rates[case] or None,
            "ratio": ours / median(sft) if ours and sft else None,
            "ratio_best": ours / best if ours and best else None,
            **{f"{part} (s)": seconds for part, seconds in parts.get(case, {}).items()},
        })  # fmt: skip
    return rows


COLUMNS: list[dict[str, Any]] = [
    {"key": "method", "title": "Way"},
    {"key": "rows", "title": "Rows"},
    {"key": "batch", "title": "Batch"},
    {"key": "kept", "title": "`recompute`"},
    {"key": "peak_bytes", "title": "Peak (GB)", "digits": 2, "scale": GIGA},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "ratio", "title": "× SFT, same rows", "digits": 3},
    {"key": "ratio_best", "title": "× SFT at its best", "digits": 3},
    *(
        {"key": f"{part} (s)", "title": f"{part} (s)".capitalize(), "digits": 3}
        for part in (*KERNELS, "element by element")
    ),
]


def _notes(speed: Speed) -> list[str]:
    a = speed.args
    return [
        f"{a.shape}, {speed.loaded.dims.parameters * GIGA:.2f}e9 parameters, {a.dtype}, rows of {a.length} random "
        f"tokens, all labelled, {a.loss_tiles} tiles of the vocabulary. Adafactor, all parameters but the router; SFT "
        "with a checkpoint a block and all gradients until its update. Peaks are of PyTorch's allocator, at most "
        f"{a.limit_gb} GB; at most {a.max_rows} rows. `auto` as a plan for {a.plan_device} decides it.",
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="Qwen1.5-MoE-A2.7B")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--equal-rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--limit-gb", type=float, default=78.0)
    parser.add_argument("--target-gb", type=float, default=39.5)
    parser.add_argument("--max-rows", type=int, default=160)
    parser.add_argument("--loss-tiles", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--plan-device", default="h100", help="of the plan that decides `auto`")
    parser.add_argument("--profile", action="store_true", help="also kernels' seconds by part")
    parser.add_argument("--time-budget-s", type=float, default=200.0, help="no step begins later")


def main() -> None:
    args = parse_args(__doc__, arguments)
    started = time.perf_counter()
    rows, notes = table(args)
    print(f"{time.perf_counter() - started:.0f} s in all", flush=True)
    title = f"Steps of {args.shape}, all parameters, on one GPU"
    finish("revffn/speed", rows, args, COLUMNS, title=title, notes=notes)


if __name__ == "__main__":
    main()
