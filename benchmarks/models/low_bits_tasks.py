"""Accuracy after fine-tuning weights that lie on no grid, in float32 and in 4.55 bits: several seeds.

    python -m benchmarks.models.off_grid FOLDER
    python -m benchmarks.models.low_bits_tasks FOLDER/tuned --runs FOLDER/runs

Each run is `ondevice.train` with MeSP over the folder's weights as they are, or rounded once to
`q4dq` with levels chosen on rows of the tasks (embedding and head in 8 bits), as an export with
`--quantize q4dq --rounding rows` has them. Runs of one seed have the same first adapter and the
same order of rows in both forms. A finished run is a file below --runs: a second call goes on where
the first one ended. All runs of a seed come before those of the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, parse_args
from benchmarks.models.sst2 import ADAPTER

NEEDS = ("torch",)
FORMS = ("float32", "q4dq")
CALIBRATION_ROWS = 64
COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "form", "title": "Weights"},
    {"key": "bits", "title": "Bits a weight", "digits": 2},
    {"key": "steps", "title": "Steps"},
    {"key": "seeds", "title": "Seeds"},
    {"key": "before", "title": "Accuracy before", "digits": 3},
    {"key": "mean_accuracy", "title": "after, mean", "digits": 3},
    {"key": "accuracy", "title": "after, by seed", "digits": 3},
    {"key": "against_float32", "title": "less float32's", "digits": 3},
    {"key": "error", "title": "Standard error of the difference", "digits": 3},
    {"key": "loss", "title": "Loss on validation rows", "digits": 3},
]
Run = tuple[str, str, int | None]
"""Task, form and seed; without a seed the model is evaluated as it is."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a model off the grid")
    add_arguments(parser, "--data", "--eval-rows", "--processes")
    parser.add_argument("--tasks", default="sst2,rte")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-4, help="falls linearly to 0")
    parser.add_argument("--loss", default="vocabulary", help="or answers")
    parser.add_argument("--tokens", type=int, default=256, help="longer rows are cut")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, required=True, help="folder of finished runs")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="begin no run after so many seconds"
    )


def calibration_rows(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Return the first training rows of the tasks, as many of each."""
    from ondevice.data import read_dataset

    tasks = args.tasks.split(",")
    rows: list[list[int]] = []
    for task in tasks:
        found = read_dataset(
            args.data / task / "train.jsonl", tokenizer, task=task, max_length_tokens=args.tokens
        )
        rows += [list(item.example.ids) for item in found.items[: CALIBRATION_ROWS // len(tasks)]]
    return rows


def rounded(args: argparse.Namespace) -> float:
    """Write the model with rounded weights once, and return its bits a weight."""
    from benchmarks.models.low_bits import Four, eight_bits
    from benchmarks.models.off_grid import save
    from ondevice.models import load_model
    from ondevice.nn.calibrated import round_model

    folder, four = args.runs / "q4dq", Four(chosen=True, scale_bits=8)
    note = folder / "bits.json"
    if note.is_file():
        return float(json.loads(note.read_text()))
    started = time.perf_counter()
    loaded = load_model(str(args.folder), dtype="float32", device="cpu")
    table = loaded.family.embedding.weight
    table.data = eight_bits(table.data)
    grids = round_model(
        loaded.family, calibration_rows(args, loaded.tokenizer), four.scale_bits, four.group
    )
    bits = four.bits([loaded.model.get_parameter(name) for name in grids])
    save(loaded.model, loaded.tokenizer, folder)
    note.write_text(json.dumps(bits))
    print(f"rounded in {time.perf_counter() - started:.0f} s", flush=True)
    return bits


def file_of(args: argparse.Namespace, run: Run) -> Path:
    task, form, seed = run
    name = "before" if seed is None else f"{seed} of {args.steps} steps"
    return args.runs / task / form / f"{name}.json"


def measure(args: argparse.Namespace, run: Run, until: float) -> dict[str, Any] | None:
    """Train and evaluate, and write accuracy and loss; None if the time is over."""
    from ondevice import evaluate, train

    if time.time() > until:
        return None
    task, form, seed = run
    started = time.perf_counter()
    model = str(args.folder if form == "float32" else args.runs / form)
    train_rows, valid_rows = (args.data / task / f"{part}.jsonl" for part in ("train", "valid"))
    out = file_of(args, run)
    out.parent.mkdir(parents=True, exist_ok=True)
    if seed is None:
        found = evaluate(
            model, valid_rows, task=task, most_rows=args.eval_rows, device=args.device,
            max_length_tokens=args.tokens,
        )  # fmt: skip
    else:
        settings = {
            "model.source": model, "model.device": args.device, "model.dtype": "float32",
            "data.path": str(train_rows), "data.eval_path": str(valid_rows), "data.task": task,
            "data.max_length_tokens": args.tokens, "method.name": "mesp", **ADAPTER,
            "method.loss": args.loss, "train.steps": args.steps, "train.seed": seed,
            "train.batch_size": args.batch, "train.schedule": "linear",
            "method.learning_rate": args.rate, "train.eval_every": args.steps,
            "train.eval_rows": args.eval_rows, "train.checkpoint_every": args.steps,
            "train.out": str(out.with_suffix("")),
        }  # fmt: skip
        result = train(settings, overwrite=True, force=True).result
        if result.interrupted or result.evaluation is None:
            raise KeyboardInterrupt
        found = result.evaluation
    figures = {"accuracy": found.accuracy, "loss": found.loss}
    part = out.with_suffix(".part")
    part.write_text(json.dumps(figures))
    os.replace(part, out)
    print(run, figures, f"{time.perf_counter() - started:.0f} s", flush=True)
    return figures


def table(args: argparse.Namespace, bits: float) -> list[dict[str, Any]]:
    """Return a row for each task and form, of the seeds that both forms have."""
    rows = []
    for task in args.tasks.split(","):
        by_form = {
            form: {seed: json.loads(file.read_text()) for seed in (None, *range(args.seeds))
                   if (file := file_of(args, (task, form, seed))).is_file()}
            for form in FORMS
        }  # fmt: skip
        seeds = [seed for seed in range(args.seeds) if all(seed in by_form[f] for f in FORMS)]
        if not seeds:
            continue
        first = [by_form["float32"][seed]["accuracy"] for seed in seeds]
        for form, runs in by_form.items():
            accuracy = [runs[seed]["accuracy"] for seed in seeds]
            change = [ours - theirs for ours, theirs in zip(accuracy, first, strict=True)]
            several = form != "float32" and len(seeds) > 1
            rows.append({
                "task": task, "form": form, "bits": 32.0 if form == "float32" else bits,
                "steps": args.steps, "seeds": len(seeds), "before": runs.get(None, {}).get("accuracy"),
                "mean_accuracy": statistics.mean(accuracy), "accuracy": accuracy,
                "against_float32": statistics.mean(change),
                "error": statistics.stdev(change) / len(seeds) ** 0.5 if several else None,
                "loss": [runs[seed]["loss"] for seed in seeds],
            })  # fmt: skip
    return rows


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=1)
    until = time.time() + args.budget_s
    bits = rounded(args)
    left = [
        (task, form, seed)
        for seed in (*range(args.seeds), None)
        for task in args.tasks.split(",")
        for form in FORMS
        if not file_of(args, (task, form, seed)).is_file()
    ]
    if args.processes == 1:
        done = [measure(args, run, until) for run in left]
    else:
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
            futures = [pool.submit(measure, args, run, until) for run in left]
            done = [future.result() for future in futures]
    if missing := done.count(None):
        print(f"left out for want of time: {missing} runs", flush=True)
    notes = [
        f"MeSP, rank 8 on every linear layer, {args.steps} steps of {args.batch} rows, rate "
        f"{args.rate:g} falling to 0, loss over the {args.loss}; {args.eval_rows} validation rows. "
        f"Rows of at most {args.tokens} tokens. Levels were chosen on {CALIBRATION_ROWS} training "
        "rows of the tasks; embedding and head in 8 bits."
    ]
    finish(
        "models/low_bits_tasks", table(args, bits), args, COLUMNS,
        title="Accuracy after training over weights off the grid", notes=notes,
    )  # fmt: skip


if __name__ == "__main__":
    main()
