"""Steps of LSP-Offload on one and on several GPUs of a host, next to the same engine with whole
gradients (the schedule of ZeRO-Offload, Algorithm 1), over a slow bus.

    python -m benchmarks.lsp.ranks --shape Qwen2.5-7B --gpus 2,1 --rows-each 1,4,16 --bus 15

Every number of GPUs and variant is a run of `torchrun`, with random weights and the method's
default settings; a run on n of N GPUs has n / N of the cores. Its batches are `--rows-each` for
each GPU, and the same rows for all together. A value is the wall time from one step's end to the
next one's on rank 0, the median after warm-up, without a check.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from benchmarks.common import finish, parse_args
from benchmarks.offload import model as om
from benchmarks.slideformer.ranks import LIMIT_S, OnRanks, compare, run, work
from ondevice.methods.lsp.config import LspConfig
from ondevice.methods.lsp.engine import LspEngine

NEEDS = ("cuda",)
NAME, VARIANTS = "lsp/ranks", ("lsp", "zero")
COLUMNS = [
    {"key": "variant", "title": "Variant"},
    {"key": "gpus", "title": "GPUs"},
    {"key": "rows", "title": "Batch"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "times_zero", "title": "Times Zero", "digits": 2},
    {"key": "weak", "title": "Times one GPU, weak", "digits": 2},
    {"key": "strong", "title": "Times one GPU, strong", "digits": 2},
    {"key": "bus_bytes", "title": "Bus, both ways, each (MB)", "scale": 1e-6, "digits": 1},
    {"key": "host_bytes_rank", "title": "Host, each (GB)", "scale": 1e-9, "digits": 2},
    {"key": "device_bytes", "title": "GPU peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "bound", "title": "Bound by"},
    {"key": "error", "title": "Not run"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="Qwen2.5-7B", help=", ".join(om.SHAPES))
    parser.add_argument("--gpus", default="2,1", help="numbers of GPUs")
    parser.add_argument(
        "--rows-each", default="1,4,16", help="rows of each GPU, and of all together"
    )
    parser.add_argument(
        "--bus", type=float, default=15.0, help="GB/s in each direction of each GPU; 0: as it is"
    )
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="of LspConfig"
    )
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="end what still runs so long after the start"
    )
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--batches", help=argparse.SUPPRESS)
    parser.add_argument("--visible", type=int, help=argparse.SUPPRESS)


class Projected(OnRanks):
    """LSP-Offload, or the same engine with whole gradients."""

    def open_engine(self, args: Any, options: dict[str, Any], device: str) -> None:
        if args.worker == "zero":
            options |= {"project": False, "schedule": "zero"}
        if args.bus:
            options["bus_limit_gb_per_s"] = args.bus
        family = om.make_family(args.shape, om.random_block(args.shape, device))
        self.engine = LspEngine(
            family, LspConfig(timeout_s=LIMIT_S, **options), device, ranks=self.ranks
        )

    def figures(self) -> dict[str, Any]:
        figures = super().figures()
        return figures | {"bus_bytes": figures.get("h2d_bytes", 0) + figures.get("d2h_bytes", 0)}


def main() -> None:
    args = parse_args(__doc__, arguments)
    if args.worker:
        work(args, Projected)
    began, rows = time.monotonic(), list[dict[str, Any]]()
    each = [int(word) for word in args.rows_each.split(",")]
    for gpus in (int(word) for word in args.gpus.split(",")):
        batches = list(
            dict.fromkeys([*(n * gpus for n in each), *(n for n in each if n % gpus == 0)])
        )
        for variant in args.variants.split(","):
            left_s = args.budget_s - (time.monotonic() - began)
            rows += run(args, variant, gpus, batches, left_s, "benchmarks.lsp.ranks")
            compare(rows, args.length)
            if args.out:
                args.out.write_text(json.dumps({"benchmark": NAME, "partial": True, "rows": rows}))
    zero = {
        (row["gpus"], row["rows"]): row.get("tokens_per_s")
        for row in rows
        if row["variant"] == "zero"
    }
    for row in rows:
        if (
            row["variant"] != "zero"
            and "step_s" in row
            and (other := zero.get((row["gpus"], row["rows"])))
        ):
            row["times_zero"] = row["tokens_per_s"] / other
    bus = "the machine's own bus"
    if args.bus:
        bus = f"a bus of {args.bus:g} GB/s in each direction of each GPU, simulated"
    notes = [
        f"{args.shape}, {args.length:,} tokens a row, {bus}, medians of {args.repeats} steps; options: "
        f"{' '.join(args.option) or 'none'}. Weak is compared with one GPU with the rows "
        "of each, strong with one GPU with all rows; a run on n of N GPUs has n / N of the cores."
    ]
    finish(NAME, rows, args, COLUMNS, title="LSP-Offload on the GPUs of a host", notes=notes)


if __name__ == "__main__":
    main()
