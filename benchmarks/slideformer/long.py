"""One long row: a step of all parameters with the MLPs in tiles of tokens, in limited GPU memory.

    python -m benchmarks.slideformer.long --shape Qwen2.5-7B --length 131072 --cap-gib 24 --host-gib 110 --out FILE

First the loss at `--short` tokens with tiles and without, then steps at `--length` with tiles, and
last without them, which may not fit. The rate is 0 before the long steps, so that all losses at a
length are of the same weights. `planned` is what `ondevice plan` counts, by part. Weights are
random; every token is labelled.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch

from benchmarks.common import add_arguments, finish, parse_args, write_result
from benchmarks.offload import model as om
from benchmarks.offload.live import reason
from benchmarks.slideformer.large import used_bytes
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.memory import memory
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.tiles import tile

NEEDS = ("cuda",)
COLUMNS = [
    {"key": "shape", "title": "Shape"},
    {"key": "length", "title": "Tokens"},
    {"key": "tiles", "title": "MLP tiles (tokens)"},
    {"key": "loss", "title": "Loss", "digits": 6},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "gpu_peak_bytes", "title": "GPU peak (GiB)", "scale": 2**-30, "digits": 2},
    {"key": "planned_bytes", "title": "Planned (GiB)", "scale": 2**-30, "digits": 2},
    {"key": "planned", "title": "by part (GiB)"},
    {"key": "host_bytes", "title": "Host (GB)", "scale": 1e-9, "digits": 1},
    {"key": "error", "title": "Not run"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="Qwen2.5-7B", help=", ".join(om.SHAPES))
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--short", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048, help="of a tile")
    parser.add_argument("--moments", default="float32")
    parser.add_argument("--cap-gib", type=float, default=24.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-s", type=float, default=500.0)
    add_arguments(parser, "--host-gib")


class Bench:
    """An engine with tiles, which it can go without, and the rows of its steps."""

    def __init__(self, args: Any) -> None:
        self.args, self.began = args, time.time()
        self.cuda = torch.device(args.device).type == "cuda"
        if self.cuda:
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gib * 2**30 / whole))
        self.config = SlideformerConfig(
            window=2, resident_layers=0, resident_tables=False, gradient_buffers=4, timeout_s=500.0,
            moments=args.moments, mlp_chunk_tokens=args.tokens, loss_chunk_tokens=1024,
        )  # fmt: skip
        self.before = used_bytes()
        self.data = {n: om.Batches(self.dims.vocab, n) for n in (args.short, args.length)}
        self.family = om.make_family(args.shape, om.random_block(args.shape, args.device))
        om.release(args.device)
        self.engine = OffloadEngine(self.family, self.config, args.device)
        self.rows: list[dict[str, Any]] = []
        self.steps = 0

    @property
    def dims(self) -> Any:
        return om.shape_dims(self.args.shape)[0]

    def step(self, length: int, rate: float, tiles: bool) -> None:
        """A step and its row; an error is a row, too."""
        args = self.args
        config = self.config.model_copy(update={} if tiles else {"mlp_chunk_tokens": None})
        parts = memory(self.dims, config, 1, length, 2)
        row: dict[str, Any] = {
            "shape": args.shape, "length": length, "tiles": args.tokens if tiles else None,
            "planned_bytes": sum(parts.values()), "cap_gib": args.cap_gib,
            "planned": ", ".join(f"{k} {v / 2**30:.2f}" for k, v in parts.items() if v),
        }  # fmt: skip
        ids = self.data[length].get(1, 0)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        try:
            row["loss"] = self.engine.step(ids, ids, self.steps, rate)
            self.engine.flush()
            row["step_s"] = [time.perf_counter() - started]
            row["gpu_peak_bytes"] = torch.cuda.max_memory_allocated() if self.cuda else None
            row["host_bytes"] = used_bytes() - self.before
        except Exception as error:
            row["error"] = reason(error)
        self.steps += 1
        self.rows.append(row)
        if args.out:
            write_result("slideformer/long", self.rows, args.out, COLUMNS)
        print(f"[{time.time() - self.began:5.0f} s]", row, flush=True)

    def untile(self) -> None:
        """Go without tiles."""
        self.engine.untile()
        self.engine.untile = lambda: None

    def run(self) -> None:
        """Short rows both ways, long ones with tiles, and last without."""
        args = self.args
        self.step(args.short, 0.0, True)
        self.untile()
        self.step(args.short, 0.0, False)
        self.engine.untile = tile(self.family, args.tokens)
        for _ in range(args.repeats):
            if time.time() - self.began < args.budget_s - 120 or not self.cuda:
                self.step(args.length, 1e-5, True)
        if time.time() - self.began < args.budget_s - 100 or not self.cuda:
            self.untile()
            self.step(args.length, 0.0, False)


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=2)
    bench = Bench(args)
    bench.run()
    finish(
        "slideformer/long",
        bench.rows,
        args,
        COLUMNS,
        title="SlideFormer: one long row with and without tiles of tokens",
        notes=[
            f"At most {args.cap_gib:g} GiB of GPU memory; a window of 2 layers, 4 gradient buffers, "
            "losses in chunks of 1,024 tokens, each layer's input in host memory. A step's time has "
            "its last updates."
        ],
    )
    sys.stdout.flush()
    os._exit(0)  # a step that did not fit leaves threads that wait


if __name__ == "__main__":
    main()
