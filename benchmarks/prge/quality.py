"""Accuracy of zeroth-order and first-order fine-tuning by the paper's protocol (P-RGE, Tables 1 and
8).

1,000 training rows, 500 validation rows, effective batch 16, best accuracy over the evaluations of
a run. All seeds and rates of a method run at once, as adapters of one forward pass. The results are
written after every method.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.common import add_arguments, finish, parse_args, write_result

NEEDS = ("torch",)
VARIANTS: dict[str, dict[str, Any]] = {
    "zo q=1": {"queries": 1, "batch": 16},
    "zo q=2": {"queries": 2, "batch": 8},
    "zo q=4": {"queries": 4, "batch": 4},
    "zo q=8": {"queries": 8, "batch": 2},
    "zo q=16": {"queries": 16, "batch": 1},
    "zo q=4 rademacher": {"queries": 4, "batch": 4, "noise": "rademacher"},
    "half: q=4 B=2": {"queries": 4, "batch": 2},
    "half: q=8 B=1": {"queries": 8, "batch": 1},
    "half: one-sided q=7 B=2": {"queries": 7, "batch": 2, "estimator": "one_sided"},
    "half: one-sided q=15 B=1": {"queries": 15, "batch": 1, "estimator": "one_sided"},
    "half: top 12 layers": {"queries": 4, "batch": 4, "top_layers": 12},
    "half: v only": {"queries": 4, "batch": 2, "target_modules": ["v_proj"]},
    "half: rank 4": {"queries": 4, "batch": 2, "rank": 4, "alpha": 4},
    "half: rank 4, v only": {
        "queries": 4,
        "batch": 2,
        "rank": 4,
        "alpha": 4,
        "target_modules": ["v_proj"],
    },
    "fo lora-fa": {"name": "lora-fa", "batch": 8},
}
MAX_TOKENS = 256
COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "method", "title": "Method"},
    {"key": "learning_rate", "title": "Learning rate"},
    {"key": "schedule", "title": "Schedule"},
    {"key": "steps", "title": "Steps"},
    {"key": "row_forwards", "title": "Row forwards a step"},
    {"key": "mean_accuracy", "title": "Best accuracy, mean", "digits": 3},
    {"key": "deviation", "title": "Deviation", "digits": 3},
    {"key": "accuracy", "title": "Best accuracy, by seed", "digits": 3},
    {"key": "final_accuracy", "title": "Last accuracy", "digits": 3},
    {"key": "loss", "title": "Best loss", "digits": 3},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data", "--eval-rows", "--dtype")
    parser.add_argument("--tasks", default="sst2,rte")
    parser.add_argument(
        "--variants",
        default="zo q=1;zo q=4;zo q=16;fo lora-fa",
        help="separated by semicolons; '@1e-3,3e-3:linear' after one gives its rates, and a schedule if not constant",
    )
    parser.add_argument("--scale", type=float, default=1e-2, help="perturbation scale")
    parser.add_argument(
        "--steps", default="20000", help="zeroth-order steps; one number, or one for each task"
    )
    parser.add_argument("--fo-steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="end the run after so many seconds"
    )


class Task:
    """Rows of one task, encoded once."""

    def __init__(self, name: str, folder: Path, tokenizer: Any, eval_rows: int) -> None:
        from ondevice import read_dataset

        self.name = name
        self.train, self.valid = (
            read_dataset(
                folder / name / f"{part}.jsonl", tokenizer, task=name, max_length_tokens=MAX_TOKENS
            )
            for part in ("train", "valid")
        )
        self.valid.items[:] = self.valid.items[:eval_rows]


def parse_variant(text: str) -> tuple[str, dict[str, Any], list[tuple[float, str]]]:
    """'zo q=4@1e-3,3e-3:linear' to its name, its settings and its (rate, schedule) pairs."""
    name, _, rates = text.partition("@")
    settings = {"name": "prge", **VARIANTS[name]}
    default = "3e-3" if settings["name"] == "prge" else "3e-4"
    pairs = [part.partition(":")[::2] for part in (rates or default).split(",")]
    return name, settings, [(float(rate), schedule or "constant") for rate, schedule in pairs]


def forwards(settings: dict[str, Any], layers: int) -> float:
    """Rows that pass through the whole model in one zeroth-order step."""
    rows, top = settings["batch"], min(settings.get("top_layers", layers), layers)
    copies = (
        settings["queries"] + 1
        if settings.get("estimator") == "one_sided"
        else 2 * settings["queries"]
    )
    return round(rows * (layers - top) / layers + rows * copies * top / layers, 2)


def measure(
    args: Any, task: Task, variant: str, steps: int, deadline: float, save: Any
) -> list[dict[str, Any]]:
    """The model before training, and all seeds and rates of one method; `save` gets the rows at
    every evaluation."""
    from benchmarks.prge.batched import BatchedRuns
    from ondevice import load_model, method_config
    from ondevice.data import Batches
    from ondevice.training.schedule import WarmupDecay

    name, settings, pairs = parse_variant(variant)
    zeroth = settings["name"] == "prge"
    fields = {key: value for key, value in settings.items() if key not in ("name", "batch")}
    config = method_config(
        settings["name"], fields | ({"perturbation_scale": args.scale} if zeroth else {})
    )
    steps, every = (
        (steps, args.eval_every) if zeroth else (args.fo_steps, max(1, args.fo_steps // 20))
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(args.model, dtype=args.dtype if zeroth else "float32", device=device)
    members = [(rate, schedule, seed) for rate, schedule in pairs for seed in range(args.seeds)]
    orders = [Batches(task.train, settings["batch"], None, seed, 0) for seed in range(args.seeds)]
    schedules = [WarmupDecay(cast(Any, schedule), rate, steps) for rate, schedule, _ in members]
    rates = np.array(
        [[schedule(step) for schedule in schedules] for step in range(steps)], dtype=np.float32
    )
    seeds = [seed for _, _, seed in members]
    runs = BatchedRuns(
        loaded, config, task.train, task.valid, seeds, [orders[seed] for seed in seeds], rates
    )
    before = runs.evaluate()
    rows = [{
        "task": task.name, "method": "zero-shot", "learning_rate": None, "schedule": None, "steps": 0,
        "row_forwards": None, "mean_accuracy": before[0][0], "deviation": None, "accuracy": before[0][:1].tolist(),
        "final_accuracy": before[0][:1].tolist(), "loss": before[1][:1].tolist(),
    }]  # fmt: skip
    row_forwards = forwards(settings, loaded.dims.layers) if zeroth else None
    accuracies, losses, done, started = [], [], 0, time.perf_counter()
    while done < steps and time.perf_counter() < deadline:
        runs.run(done, min(done + every, steps))
        done = min(done + every, steps)
        accuracy, loss = runs.evaluate()
        accuracies.append(accuracy)
        losses.append(loss)
        fixed = {"task": task.name, "method": name, "steps": done, "row_forwards": row_forwards}
        rows[1:] = [
            fixed
            | {"learning_rate": rate, "schedule": schedule}
            | figures(accuracies, losses, i * args.seeds, args.seeds)
            for i, (rate, schedule) in enumerate(pairs)
        ]
        save(rows)
    print(f"{name}: {done} steps in {time.perf_counter() - started:.1f} s", flush=True)
    for row in rows[1:]:
        print(
            {
                key: row[key]
                for key in ("learning_rate", "schedule", "accuracy", "curve", "loss_curve")
            },
            flush=True,
        )
    return rows


def figures(accuracies: list[Any], losses: list[Any], first: int, seeds: int) -> dict[str, Any]:
    """Summarise the evaluations of one method and rate; those of seed i are in column first + i."""
    accuracy, loss = (np.array(values)[:, first : first + seeds] for values in (accuracies, losses))
    best = accuracy.max(0).tolist()
    return {
        "mean_accuracy": statistics.mean(best), "deviation": statistics.stdev(best) if seeds > 1 else None,
        "accuracy": best, "final_accuracy": accuracy[-1].tolist(), "loss": np.nanmin(loss, 0).tolist(),
        "curve": accuracy.mean(1).round(4).tolist(), "loss_curve": loss.mean(1).round(4).tolist(),
        "curves": accuracy.T.round(4).tolist(),
    }  # fmt: skip


def comparisons(rows: list[dict[str, Any]]) -> list[str]:
    """Each method's best rate against q = 1 and against FO-LoRA-FA, seed by seed, in points of
    accuracy."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["task"], row["method"])
        if key not in best or row["mean_accuracy"] > best[key]["mean_accuracy"]:
            best[key] = row
    notes = []
    for (task, method), row in best.items():
        for peer in ("zo q=1", "fo lora-fa"):
            other = best.get((task, peer))
            if other is None or method in ("zo q=1" if peer == "zo q=1" else "", peer, "zero-shot"):
                continue
            pairs = zip(row["accuracy"], other["accuracy"], strict=False)
            points = [100 * (ours - theirs) for ours, theirs in pairs]
            spread = f" ± {statistics.stdev(points):.1f}" if len(points) > 1 else ""
            each = ", ".join(f"{point:+.1f}" for point in points)
            mean = f"{statistics.mean(points):+.1f}{spread}"
            notes.append(f"{task}: {method} minus {peer}, points by seed: {each}; mean {mean}.")
    return notes


def main() -> None:
    args = parse_args(__doc__, arguments)
    from ondevice.models import load_tokenizer

    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention is faster on short rows
    tokenizer = load_tokenizer(args.model)
    rows: list[dict[str, Any]] = []
    tasks = args.tasks.split(",")
    steps = [int(number) for number in args.steps.split(",")]
    text = f"{args.seeds} seeds, perturbation scale {args.scale}, zeroth-order forward passes in {args.dtype}, "
    text += "losses in float32; the best accuracy is over all evaluations of a run."
    extra: dict[str, Any] = {
        "columns": COLUMNS,
        "title": "Accuracy after fine-tuning SmolLM2-135M-Instruct",
    }
    for name, count in zip(tasks, steps * len(tasks) if len(steps) == 1 else steps, strict=True):
        task = Task(name, args.data, tokenizer, args.eval_rows)
        for variant in filter(None, args.variants.split(";")):
            if time.perf_counter() - started > args.budget_s:
                break
            first = int(any(row["task"] == name for row in rows))

            def save(
                new: list[dict[str, Any]], old: tuple[Any, ...] = tuple(rows), first: int = first
            ) -> None:
                extra["notes"] = [text, *comparisons([*old, *new])]
                if args.out:
                    write_result("prge/quality", [*old, *new[first:]], args.out, **extra)

            rows += measure(args, task, variant, count, started + args.budget_s, save)[first:]
    finish("prge/quality", rows, args, **extra)


if __name__ == "__main__":
    main()
