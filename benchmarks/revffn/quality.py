"""Validation loss of RevFFN's couplings after equal tokens, next to full fine-tuning and LoRA; the
paper's Table 3.

    python -m benchmarks.revffn.quality --seeds 0,1 --out a.json           on a GPU; a part of the seeds at a time
    python -m benchmarks.revffn.quality --from-results a.json b.json --record

Alpaca's answers on SmolLM2-135M, or on a small random mixture of experts (`--model tiny:qwen2_moe
--rate-scale 30`). Half-width couplings with both stages, without stage 1, and with only stage 1,
in the same number of steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, command_of, finish, median, parse_args, write_result

NEEDS = ("cuda",)
NAME = "revffn/quality"
HALF = {"stage1_learning_rate": 1e-3}
SKIP = {"skip_stage1": True}
ONLY = {"skip_stage1": False, "stage1_only": True}
PAPER = {"coupling": "paper", "streams": "float32", "recompute": "stored"}
WAYS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "full fine-tuning": ("sft-fused", 3e-5, {"optimizer": "adamw", "recompute": False}),
    "LoRA": ("lora", 3e-4, {"recompute": False}),
    "RevFFN full": ("revffn", 3e-5, SKIP),
    "RevFFN exact": ("revffn", 1e-4, {"coupling": "exact", "skip_stage1": False} | HALF),
    "RevFFN exact w/o stage 1": ("revffn", 1e-4, {"coupling": "exact"} | SKIP),
    "RevFFN exact w/o stage 2": ("revffn", 1e-4, {"coupling": "exact"} | ONLY | HALF),
    "RevFFN paper": ("revffn", 1e-4, PAPER | {"skip_stage1": False} | HALF),
    "RevFFN paper w/o stage 1": ("revffn", 1e-4, PAPER | SKIP),
    "RevFFN paper w/o stage 2": ("revffn", 1e-4, PAPER | ONLY | HALF),
}
"""A way, its learning rate, its settings. The paper's coupling trains with stored activations,
whose gradients are those that its inverse would give if it converges."""


def run(args: Any, loaded: Any, task: Any, name: str, seed: int) -> dict[str, Any]:
    """One way with one seed: losses before and after, seconds a step; a loss that is no number is
    None."""
    import torch

    from benchmarks.revffn.peers import open_way
    from benchmarks.tasks import LENGTHS
    from ondevice.core.errors import TrainingError
    from ondevice.data import Batches, pad_id_of
    from ondevice.training.evaluate import evaluate_dataset

    kind, rate, settings = WAYS[name]
    rate *= args.rate_scale
    settings = dict(settings)
    if kind == "revffn":
        settings["learning_rate"] = rate
        if not settings.get("skip_stage1", True) and not settings.get("stage1_only"):
            settings["stage1_steps"] = args.steps // 5
    model: Any = copy.deepcopy(loaded.model).to(args.device)
    mine = replace(loaded, model=model, family=type(loaded.family)(model))
    way: Any = open_way(mine, kind, seed=seed, **settings)
    pad = pad_id_of(loaded.tokenizer)
    batches = Batches(task.train, args.batch_size, LENGTHS, seed, pad)

    def evaluate() -> float | None:
        way.eval_batch_size, way.lengths_tokens = None, LENGTHS
        evaluation = evaluate_dataset(
            way, task.valid, pad, batch_size=64 if args.device == "cuda" else 8
        )
        return (
            evaluation.loss if evaluation is not None and math.isfinite(evaluation.loss) else None
        )

    before, tokens, started, spent = evaluate(), 0, time.perf_counter(), 0
    try:
        for step in range(args.steps):
            batch = batches.at(step)
            if not math.isfinite(way.step(batch.ids, batch.labels, step, rate)):
                break
            tokens, spent = tokens + batch.ids.size, step + 1
    except TrainingError as error:
        print(f"{name}, seed {seed}, step {spent}: {error}", flush=True)
    if args.device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / max(spent, 1)
    after = evaluate() if spent == args.steps else None
    return {"before": before, "after": after, "step_s": seconds, "tokens": tokens, "seed": seed}


def rows_of(runs: dict[str, list[dict[str, Any]]], model: str) -> list[dict[str, Any]]:
    """One row a way, with every seed's figures."""
    base = [one["after"] for one in runs.get("full fine-tuning", []) if one["after"] is not None]
    rows = []
    for name, actual in runs.items():
        after = [one["after"] for one in actual if one["after"] is not None]
        rows.append({
            "model": model, "method": name, "seeds": [one["seed"] for one in actual],
            "before": actual[0]["before"], "loss": after or None, "failed": len(actual) - len(after),
            "ratio": median(after) / median(base) if after and base else None,
            "step_s": [one["step_s"] for one in actual], "tokens": actual[0]["tokens"],
        })  # fmt: skip
    return rows


def merged(paths: list[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of several result files of the same settings, as if they had been one run; and their
    notes."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    notes: list[str] = []
    for path in paths:
        document = json.loads(path.read_text())
        notes += [note for note in document["notes"] if note not in notes]
        for row in document["rows"]:
            losses = iter([*(row["loss"] or []), *[None] * row["failed"]])
            actual = runs.setdefault(row["model"], {}).setdefault(row["method"], [])
            actual += [
                {
                    "before": row["before"],
                    "after": next(losses),
                    "step_s": step_s,
                    "tokens": row["tokens"],
                    "seed": seed,
                }
                for seed, step_s in zip(row["seeds"], row["step_s"], strict=True)
            ]
    return [row for model, actual in runs.items() for row in rows_of(actual, model)], notes


COLUMNS: list[dict[str, Any]] = [
    {"key": "model", "title": "Model"},
    {"key": "method", "title": "Way"},
    {"key": "before", "title": "Loss before", "digits": 3},
    {"key": "loss", "title": "Loss after", "digits": 4},
    {"key": "ratio", "title": "× full fine-tuning", "digits": 3},
    {"key": "failed", "title": "Runs that failed"},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data")
    parser.add_argument("--task", default="alpaca")
    parser.add_argument("--methods", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--eval-rows", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rate-scale", type=float, default=1.0, help="every rate times this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--time-budget-s", type=float, default=540.0, help="no run begins later")
    parser.add_argument(
        "--from-results", type=Path, nargs="+", help="run nothing: one table of these files"
    )


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=1)
    title = "RevFFN: validation loss after equal tokens"
    if args.from_results:
        rows, notes = merged(args.from_results)
        finish(NAME, rows, args, COLUMNS, title=title, notes=notes)
        return
    import torch

    from benchmarks.tasks import Task
    from ondevice.models import load_model

    torch.set_float32_matmul_precision("high")
    loaded, started = load_model(args.model), time.perf_counter()
    task = Task(args.task, args.data, loaded.tokenizer, args.eval_rows)
    names = [name.strip() for name in args.methods.split(",")]
    if unknown := [name for name in names if name not in WAYS]:
        raise SystemExit(f"--methods: expected some of {', '.join(WAYS)}; received {unknown[0]}")
    runs: dict[str, list[dict[str, Any]]] = {}
    notes = [
        f"{args.task}, float32 weights, batches of {args.batch_size} rows of at most 256 tokens, {args.steps} steps "
        f"(stage 1: a fifth of them), constant rates, {args.eval_rows} rows of validation. "
        + "; ".join(f"{name} {WAYS[name][1] * args.rate_scale:g}" for name in names)
        + ". Medians and ranges are over seeds."
    ]
    late: list[str] = []
    for seed in map(int, args.seeds.split(",")):
        for name in names:
            if time.perf_counter() - started > args.time_budget_s:
                late.append(f"{name} (seed {seed})")
                continue
            runs.setdefault(name, []).append(run(args, loaded, task, name, seed))
            print(
                f"{time.perf_counter() - started:.0f} s: {name}, seed {seed}: {runs[name][-1]}",
                flush=True,
            )
            if args.out:
                write_result(NAME, rows_of(runs, args.model), args.out, COLUMNS, title=title, notes=notes,
                             command=command_of(NAME))  # fmt: skip
    if late:
        notes.append(f"Not run for lack of time: {'; '.join(late)}.")
    finish(NAME, rows_of(runs, args.model), args, COLUMNS, title=title, notes=notes)


if __name__ == "__main__":
    main()
