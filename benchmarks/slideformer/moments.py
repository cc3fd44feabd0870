"""What AdamW's moments in 16 and 8 bits cost: thousands of steps of full training with each kind,
next to float32.

    python -m benchmarks.slideformer.moments --processes 9 --record                     on a GPU
    python -m benchmarks.slideformer.moments --rows wikitext --processes 2 --record     also without one

With `--rows sst2` a run is `ondevice train --method slideformer` of SmolLM2-135M. With `--rows
wikitext` it is a Llama of 4 layers and 256 columns that learns WikiText-2's bytes from nothing, at
a rate at which every step counts. A seed sees the same rows in the same order whatever the kind.
All states stay in host memory, so that the C++ pass updates them. `off` is how far the losses of a
run are from those with float32 moments and the same seed: the mean of the absolute differences over
the last hundred steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_arguments, finish, parse_args
from benchmarks.training.defaults import Job, run
from ondevice.runtime_ops.layer_adam import BYTES, KINDS

NEEDS = ("cuda",)
NAME, LAST = "slideformer/moments", 100
ON_HOST = {"window": 3, "resident_layers": 0, "resident_tables": False, "gradient_buffers": 4}
SIZES = {"layers": 4, "hidden": 256, "intermediate": 704, "heads": 4, "kv_heads": 4}
ROWS, LENGTH, RATE = 8, 64, 5e-4
COLUMNS = [
    {"key": "rows", "title": "Rows"},
    {"key": "moments", "title": "Moments"},
    {"key": "bytes", "title": "Bytes a parameter", "digits": 1},
    {"key": "steps", "title": "Steps"},
    {"key": "mean_accuracy", "title": "Accuracy, mean", "digits": 3},
    {"key": "mean_loss", "title": "Held-out loss, mean", "digits": 4},
    {"key": "loss", "title": "by seed", "digits": 4},
    {"key": "mean_trained", "title": f"Training loss, last {LAST} steps", "digits": 4},
    {"key": "off", "title": "off float32's, by seed", "digits": 4},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", choices=("sst2", "wikitext"), default="sst2")
    add_arguments(parser, "--model", "--eval-rows", "--processes")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of sst2/ and wikitext2/"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="end after so many seconds"
    )


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=1)
    runs: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in args.kinds.split(",")}
    for kind, seed, record in (on_sst2 if args.rows == "sst2" else on_wikitext)(args):
        print(
            kind,
            seed,
            {key: record.get(key) for key in ("accuracy", "loss", "error", "seconds")},
            flush=True,
        )
        if "error" not in record:
            runs[kind][seed] = record
    rows = [
        row(kind, found, runs.get("float32", {}), args) for kind, found in runs.items() if found
    ]
    if not rows:
        raise SystemExit("no run has ended within the budget")
    trained = "SmolLM2-135M, 4 rows a step and the method's other defaults"
    if args.rows == "wikitext":
        sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items())
        trained = (
            f"Llama ({sizes}) from nothing, bytes, {ROWS} rows of {LENGTH} a step, rate {RATE:g}"
        )
    held = ", ".join(f"{key} {value}" for key, value in ON_HOST.items())
    notes = [f"{trained}; {args.eval_rows} held-out rows. All states in host memory: {held}."]
    finish(
        NAME,
        rows,
        args,
        COLUMNS,
        title="SlideFormer: moments in 16 and 8 bits against float32",
        notes=notes,
    )


def on_sst2(args: Any) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Kind, seed and record of every run of `ondevice train`."""
    settings = " ".join(f"{key}={str(value).lower()}" for key, value in ON_HOST.items())
    jobs = [
        Job("sst2", "slideformer", args.steps, f"moments={kind} {settings}", seed)
        for seed in range(args.seeds) for kind in args.kinds.split(",")
    ]  # fmt: skip
    for record in run(jobs, args):
        yield record["settings"].partition(" ")[0].removeprefix("moments="), record["seed"], record


def on_wikitext(args: Any) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The same of every run from nothing."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // args.processes))
    jobs = [(kind, seed) for seed in range(args.seeds) for kind in args.kinds.split(",")]
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        tasks = {pool.submit(from_nothing, *job, args): job for job in jobs}
        for task in as_completed(tasks):
            yield *tasks[task], task.result()


def from_nothing(kind: str, seed: int, args: Any) -> dict[str, Any]:
    """The losses of a run's steps, and the mean over the bytes of rows that none of them saw."""
    import torch

    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.models.load import tiny_model
    from ondevice.offload.engine import OffloadEngine

    device = (
        args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    config = SlideformerConfig(**{**ON_HOST, "moments": kind})
    engine = OffloadEngine(tiny_model("llama", seed, **SIZES).family, config, device)
    texts = [_bytes(args.data / "wikitext2" / f"{part}.txt") for part in ("train", "valid")]
    places, losses = np.random.default_rng(seed), list[float]()
    for step in range(args.steps):
        ids = _rows(texts[0], places.integers(0, len(texts[0]) - LENGTH, ROWS))
        losses.append(engine.step(ids, ids, step, RATE))
    held_out = _rows(texts[1], np.arange(args.eval_rows) * LENGTH % (len(texts[1]) - LENGTH))
    nll, labelled = engine.evaluate(held_out, held_out)
    engine.close()
    return {"losses": losses, "loss": float(nll.sum() / labelled.sum())}


def _bytes(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int64)


def _rows(text: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.stack([text[place : place + LENGTH] for place in places])


def row(kind: str, found: dict[int, Any], exact: dict[int, Any], args: Any) -> dict[str, Any]:
    """The row of a kind, over the seeds that have ended."""
    seeds = sorted(found)
    trained = [found[seed]["losses"][-LAST:] for seed in seeds]
    off = [
        statistics.mean(
            abs(a - b) for a, b in zip(losses, exact[seed]["losses"][-LAST:], strict=True)
        )
        for seed, losses in zip(seeds, trained, strict=True)
        if seed in exact and kind != "float32"
    ]
    accuracy = [
        found[seed]["accuracy"] for seed in seeds if found[seed].get("accuracy") is not None
    ]
    return {
        "rows": args.rows, "moments": kind, "bytes": BYTES["split", kind].stored, "steps": args.steps, "seeds": seeds,
        "accuracy": accuracy or None, "mean_accuracy": statistics.mean(accuracy) if accuracy else None,
        "loss": [found[seed]["loss"] for seed in seeds],
        "mean_loss": statistics.mean(found[seed]["loss"] for seed in seeds),
        "mean_trained": statistics.mean(statistics.mean(losses) for losses in trained), "off": off or None,
    }  # fmt: skip


if __name__ == "__main__":
    main()
