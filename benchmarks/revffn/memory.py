"""RevFFN's memory by depth on a CPU, and Qwen1.5-MoE-A2.7B's shape trained whole on one GPU.

    python -m benchmarks.revffn.memory                    peak memory at 12, 24 and 48 layers (CPU, or --device cuda)
    python -m benchmarks.revffn.memory --cuda             the paper's Table 1: 14.3B random weights in bfloat16

By depth: what a step holds beyond weights and optimizer state, from the allocator's own record.
With --cuda every way runs in the same process over the same weights, in turns, each at the largest
batch that its memory allows: `--limit-gb` for all but the first rows of RevFFN, which have
`--target-gb`, the paper's peak.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

from benchmarks.common import command_of, finish, median, parse_args

NEEDS = ("torch",)
LAYERS = (12, 24, 48)
GIGA = 1e-9
DEPTH: dict[str, tuple[str, dict[str, Any]]] = {
    "RevFFN, exact": ("revffn", {"coupling": "exact"}),
    "RevFFN, full": ("revffn", {"coupling": "full"}),
    "RevFFN's network, activations stored": (
        "revffn",
        {"coupling": "exact", "recompute": "stored"},
    ),
    "Checkpoint a block, updates in hooks": ("sft-fused", {"optimizer": "adamw"}),
    "Checkpoint a block": ("sft", {"optimizer": "adamw"}),
    "No checkpoint": ("sft", {"optimizer": "adamw", "recompute": False}),
}
FULL = {"optimizer": "adafactor"}
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "revffn-full": ("revffn", FULL, True),
    "revffn-exact": ("revffn", FULL | {"coupling": "exact"}, True),
    "revffn-parts": ("revffn", FULL | {"micro_batch_size": 8}, True),
    "revffn-80": ("revffn", FULL, False),
    "sft": ("sft", {}, False),
    "lomo": ("lomo", {}, False),
    "galore": ("galore", {"rank": 128, "refresh": 0}, False),
    "lora": ("lora", {}, False),
    "dora": ("dora", {}, False),
    "ia3": ("ia3", {}, False),
}
"""Of the GPU: a way, its settings, and whether it has to do with the paper's peak instead of all of
the memory."""
PAPER = {
    "revffn-full": (39.5, 24.6), "sft": (65.4, 19.7), "lomo": (42.2, 17.3), "galore": (45.1, 35.2),
    "lora": (18.2, 75.4), "dora": (19.5, 71.8), "ia3": (17.9, 74.1),
}  # fmt: skip
"""Peak in GB and samples a second of Table 1."""


def depth(args: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Bytes of a step beyond weights and optimizer, by layers."""
    import numpy as np
    import torch

    from benchmarks.common import peak_bytes
    from benchmarks.revffn.peers import make, open_way

    torch.set_num_threads(1)
    rows, first, device = [], dict[str, int](), args.device or "cpu"
    ids = np.random.default_rng(0).integers(0, 2048, (args.rows, args.length))
    for name, (way, settings) in DEPTH.items():
        for layers in LAYERS:
            loaded = make("narrow", layers, device=device)
            opened = open_way(loaded, way, **settings)
            opened.step(ids, ids, 0, 1e-5)  # the optimizer's state is made with the first step
            peak = peak_bytes(partial(opened.step, ids, ids, 1, 1e-5), device)
            opened.close()
            first.setdefault(name, peak)
            rows.append(
                {
                    "method": name,
                    "layers": layers,
                    "net_bytes": peak,
                    "growth": peak / first[name] - 1,
                }
            )
            print(rows[-1], flush=True)
    columns = [
        {"key": "method", "title": "Method"},
        {"key": "layers", "title": "Layers"},
        {
            "key": "net_bytes",
            "title": "Peak beyond weights and optimizer (MB)",
            "digits": 2,
            "scale": 1e-6,
        },
        {
            "key": "growth",
            "title": f"Growth from {LAYERS[0]} layers (%)",
            "digits": 1,
            "scale": 100,
        },
    ]
    notes = [
        f"Llama of hidden 256, vocabulary 2048, {args.rows} rows of {args.length} tokens, float32, AdamW. `full` keeps "
        "4 bits a value and layer for its inversion, in host memory if there is a GPU; `exact` keeps nothing."
    ]
    return rows, columns, notes


class Gpu:
    """The model of a shape, and every way in turns."""

    def __init__(self, args: Any, ways: dict[str, tuple[str, dict[str, Any], bool]] | None = None) -> None:  # fmt: skip
        import numpy as np
        import torch

        from benchmarks.revffn.peers import make

        self.ways = WAYS if ways is None else ways
        self.args, self.cuda, self.started = args, args.device == "cuda", time.perf_counter()
        self.loaded = make(args.shape, args.layers, getattr(torch, args.dtype), args.device)
        self.random, self.vocab = np.random.default_rng(0), self.loaded.dims.vocab
        self.weights = sum(p.numel() * p.element_size() for p in self.loaded.model.parameters())

    def limit(self, name: str) -> float:
        return (self.args.target_gb if self.ways[name][2] else self.args.limit_gb) * 1e9

    def step(self, name: str, rows: int) -> tuple[float, int] | None:
        """Seconds and peak bytes of a step of `rows`, after a small one; None if memory does not
        suffice."""
        import torch

        from benchmarks.revffn.peers import open_way
        from ondevice.core.errors import OndeviceError

        kind, settings, _ = self.ways[name]
        way = open_way(self.loaded, kind, loss_tiles=self.args.loss_tiles, **settings)
        try:
            way.step(*self.batch(2), 0, self.args.rate)
            return self._timed(way, rows)
        except (torch.OutOfMemoryError, OndeviceError) as error:
            print(f"{name}, {rows} rows: {type(error).__name__}: {str(error)[:160]}", flush=True)
            return None
        finally:
            way.close()
            del way
            for parameter in self.loaded.model.parameters():
                parameter.grad = None
            if (
                self.cuda
                and torch.cuda.memory_reserved() > 1.2 * torch.cuda.memory_allocated() + 20e9
            ):
                torch.cuda.empty_cache()

    def _timed(self, way: Any, rows: int) -> tuple[float, int]:
        import torch

        from benchmarks.common import peak_bytes

        batch = self.batch(rows)
        if not self.cuda:
            started = time.perf_counter()
            peak = self.weights + peak_bytes(lambda: way.step(*batch, 1, self.args.rate))
            return time.perf_counter() - started, peak
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        way.step(*batch, 1, self.args.rate)
        torch.cuda.synchronize()
        return time.perf_counter() - started, torch.cuda.max_memory_allocated()

    def batch(self, rows: int) -> tuple[Any, Any]:
        ids = self.random.integers(0, self.vocab, (rows, self.args.length))
        return ids, ids

    def largest(self, name: str) -> int | None:
        """Rows that fit: from two probes in a straight line, a little less than it says; None: not
        even two do."""
        probes, small, more = [], 4, 8
        if "micro_batch_size" in self.ways[name][1]:
            small, more = 16, 32
        for rows in (small, more):
            measured = self.step(name, rows)
            if measured is None or measured[1] > self.limit(name):
                break
            probes.append(measured[1])
        if not probes:
            measured = self.step(name, 2)
            return 2 if measured is not None and measured[1] <= self.limit(name) else None
        if len(probes) == 1:
            return small
        each = max(1.0, (probes[1] - probes[0]) / (more - small))
        rows = more + int((self.limit(name) - probes[1]) / each * 0.97)
        return max(more, min(rows, self.args.max_rows) // 4 * 4)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def table(args: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """The paper's Table 1."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    gpu, names = Gpu(args), args.methods.split(",")
    print(f"{gpu.weights * GIGA:.2f} GB of weights after {gpu.seconds:.0f} s", flush=True)
    rows_of = {name: gpu.largest(name) for name in names}
    print(f"rows {rows_of} after {gpu.seconds:.0f} s", flush=True)
    by_name: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for turn in range(-1, args.repeats):  # the first round warms up
        for name in reversed(names) if turn % 2 else names:
            rows = rows_of[name]
            if rows is None or gpu.seconds > args.time_budget_s:
                continue
            one = gpu.step(name, rows)
            while (one is None or one[1] > gpu.limit(name)) and rows > 2:
                rows = rows_of[name] = max(2, int(rows * 0.9) // 2 * 2)
                by_name[name] = []
                one = gpu.step(name, rows)
            if turn >= 0 and one is not None:
                by_name[name].append(one)
        print(f"round {turn} after {gpu.seconds:.0f} s", flush=True)
    return _rows(gpu, rows_of, by_name), COLUMNS, _notes(gpu)


def _rows(
    gpu: Gpu, rows_of: dict[str, int | None], measured: dict[str, list[tuple[float, int]]]
) -> list[dict[str, Any]]:
    rates = {
        name: [(rows_of[name] or 0) * gpu.args.length / seconds for seconds, _ in steps]
        for name, steps in measured.items()
    }
    sft = median(rates["sft"]) if rates.get("sft") else None
    rows = []
    for name, steps in measured.items():
        peak, rate = PAPER.get(name, (None, None))
        rows.append({
            "method": name, "rows": rows_of[name] if steps else None,
            "peak_bytes": max((size for _, size in steps), default=None), "step_s": [s for s, _ in steps] or None,
            "tokens_per_s": rates[name] or None,
            "ratio": median(rates[name]) / sft if sft and rates[name] else None,
            "paper_gb": peak, "paper_ratio": rate / PAPER["sft"][1] if rate else None,
        })  # fmt: skip
    return rows


COLUMNS: list[dict[str, Any]] = [
    {"key": "method", "title": "Way"},
    {"key": "rows", "title": "Rows"},
    {"key": "peak_bytes", "title": "Peak (GB)", "digits": 2, "scale": GIGA},
    {"key": "step_s", "title": "Step (s)", "digits": 2},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "ratio", "title": "× SFT", "digits": 2},
    {"key": "paper_gb", "title": "Paper (GB)", "digits": 1},
    {"key": "paper_ratio", "title": "Paper, × SFT", "digits": 2},
]


def _notes(gpu: Gpu) -> list[str]:
    a, weights = gpu.args, gpu.weights * GIGA
    count = gpu.loaded.dims.parameters
    return [
        f"{a.shape}, {count * GIGA:.2f}e9 parameters, {a.dtype}: {weights:.1f} GB of weights. Rows of {a.length} "
        f"random tokens, all labelled, {a.loss_tiles} tiles of the vocabulary. Peaks are of PyTorch's allocator. "
        f"RevFFN has {a.target_gb} GB, except revffn-80; the others {a.limit_gb} GB; at most {a.max_rows} rows.",
        "RevFFN and SFT: Adafactor, all parameters but the router. AdamW needs 8 bytes a parameter more "
        f"({8 * count * GIGA:.0f} GB), in 8 bits 2 ({2 * count * GIGA:.0f} GB). revffn-parts: the batch in parts of 8 "
        "rows. LOMO: SGD in hooks. GaLore: rank 128 with Adam, in hooks, each expert a matrix; its step without "
        "decompositions. LoRA, DoRA (rank 16, attention and shared expert) and (IA)3: peft, AdamW. All but RevFFN with "
        "a checkpoint a block.",
        f"Of the paper's peaks, those of LoRA, DoRA and (IA)3 (17.9 to 19.5 GB) are below the {weights:.1f} GB of the "
        f"weights in 16 bits, and SFT's 65.4 GB leave {65.4 - 2 * weights:.1f} GB for optimizer and activations on "
        "top of weights and gradients.",
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cuda", action="store_true", help="the GPU's part")
    parser.add_argument("--device", help="cuda or cpu (default: cuda with --cuda, else cpu)")
    parser.add_argument("--shape", default="Qwen1.5-MoE-A2.7B")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", default=",".join(WAYS))
    parser.add_argument("--rows", type=int, default=4, help="of the table by depth")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--limit-gb", type=float, default=80.0)
    parser.add_argument("--target-gb", type=float, default=39.5)
    parser.add_argument("--max-rows", type=int, default=96)
    parser.add_argument("--loss-tiles", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--time-budget-s", type=float, default=330.0, help="no step begins later")


def main() -> None:
    args = parse_args(__doc__, arguments)
    if args.cuda:
        args.device = args.device or "cuda"
        rows, columns, notes = table(args)
        title = f"All parameters of {args.shape} on one GPU"
        command = command_of("revffn/memory")
        finish("revffn/memory_cuda", rows, args, columns, title=title, notes=notes, command=command)
        return
    rows, columns, notes = depth(args)
    finish(
        "revffn/memory",
        rows,
        args,
        columns,
        title="Memory of a training step by depth",
        notes=notes,
    )


if __name__ == "__main__":
    main()
