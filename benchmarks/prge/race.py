"""A race of zeroth-order and first-order fine-tuning to the same answers: what helps, separately and
together.

Each variant is written in words, behind '@' its rates: 'xs q4 r16 adam refresh500@1e-3,3e-3'.
Words: what moves (`full` all of B behind a random A, `grad-a` or `act` behind the A of one exact
gradient or of the activations, `xs` the small R of C R A from one exact gradient, `diag` its
diagonal only, `rand` the whole between random C and A), `q4`, `r16`, `b4` (rows a step),
`onesided`, `fo` (backpropagation), a rule (`sgd`, `momentum`, `adam`, `sign`, `muon`, `norm`,
`norm-momentum`), `vocab` (the loss over all tokens instead of the answers), `refresh500` (a new
exact gradient every so many steps), `cal256` (of so many rows, 64 otherwise), `exact0.2` (each
exact gradient is a step of that many rates, too), `power0.5` (A's columns by their singular
values), `cone0.5` (so much of a direction's squared length lies along the mean of earlier
estimates, ConMeZO), `pool6` (one direction made of so many, by their losses, MeZO-GV), `grow500`
(one query before that step, `q` after it), `top5` (exact gradients in so many layers at the top, as
Addax and ElasticZO mix them), `eps1e-2`, `t500` (steps). Rates fall linearly to 0.

Training takes all rows but the last --choose-rows; the rate of a variant is chosen by accuracy on
those, and accuracy is reported on the validation rows. Figures are the last ones of a run, not the
best. Runs that --log already has are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_arguments, finish, parse_args

NEEDS = ("cuda",)
MAX_TOKENS = 256
DEFAULT = "full q4 vocab@4e-3;full q4@4e-3;xs q4@1e-3;xs q4 refresh500@1e-3;fo full sgd@4e-2;fo full adam@5e-4"
MILESTONES = (500, 1000, 2000)
COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "variant", "title": "Variant"},
    {"key": "rate", "title": "Rate"},
    {"key": "seeds", "title": "Seeds"},
    {"key": "steps", "title": "Steps"},
    {"key": "numbers", "title": "Numbers"},
    {"key": "row_forwards", "title": "Row forwards a step", "digits": 1},
    {"key": "seconds", "title": "Seconds a run", "digits": 1},
    *(
        {"key": f"at_{step}", "title": f"Accuracy at {step}", "digits": 3}
        for step in MILESTONES[:-1]
    ),
    {"key": "chosen_on", "title": "Where rates are chosen", "digits": 3},
    {"key": "mean", "title": "Last accuracy, mean", "digits": 3},
    {"key": "deviation", "title": "Deviation", "digits": 3},
    {"key": "accuracy", "title": "Last accuracy, by seed", "digits": 3},
    {"key": "averaged", "title": "Averaged adapter", "digits": 3},
    {"key": "loss", "title": "Last loss", "digits": 3},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data", "--eval-rows", "--choose-rows", "--dtype", "--log")
    parser.add_argument("--tasks", default="sst2")
    parser.add_argument("--variants", default=DEFAULT, help="separated by semicolons; see above")
    parser.add_argument("--seeds", default="5", help="so many from 0, or a list such as '3,4,'")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--fo-steps", type=int, default=1000)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--runs", type=int, default=24, help="runs in one pass")
    parser.add_argument("--fo-runs", type=int, default=12, help="first-order runs in one pass")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=float("inf"),
        help="start nothing new after so many seconds",
    )


def read_log(path: Path | None) -> list[dict[str, Any]]:
    """Finished runs of a log; a last line that was cut off is left out."""
    if path is None or not path.is_file():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def summarize(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task, variant, length and rate, over all its seeds; `chosen` marks each
    variant's best rate by accuracy where rates are chosen."""
    grouped: dict[tuple[Any, ...], dict[float, list[dict[str, Any]]]] = {}
    for record in records:
        rates = grouped.setdefault((record["task"], record["variant"], record["steps"]), {})
        rates.setdefault(record["rate"], []).append(record)
    rows = []
    for rates in grouped.values():
        best = max(rates, key=lambda rate: chosen(rates[rate]))
        for rate, runs in rates.items():
            rows.append(_row(sorted(runs, key=lambda run: run["seed"])) | {"chosen": rate == best})
    return sorted(rows, key=lambda row: (row["task"], -row["mean"]))


def _row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one variant at one rate."""
    accuracy = [run["curve"][-1][3] for run in runs]
    row = {
        key: runs[0].get(key)
        for key in ("task", "variant", "rate", "steps", "numbers", "row_forwards", "dtype")
    }
    row |= {
        "seeds": len(runs), "seconds": statistics.mean(run["seconds"] for run in runs),
        "mean": statistics.mean(accuracy), "deviation": statistics.stdev(accuracy) if len(runs) > 1 else None,
        "accuracy": accuracy, "averaged": statistics.mean(run["curve"][-1][6] for run in runs),
        "loss": statistics.mean(run["curve"][-1][4] for run in runs), "chosen_on": chosen(runs)[0],
    }  # fmt: skip
    for step in MILESTONES[:-1]:
        points = [point[3] for run in runs for point in run["curve"] if point[0] == step]
        row[f"at_{step}"] = statistics.mean(points) if points else None
    return row


def chosen(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean accuracy, then less loss, where rates are chosen."""
    last = [run["curve"][-1] for run in runs]
    return statistics.mean(point[1] for point in last), -statistics.mean(point[2] for point in last)


def show(row: dict[str, Any]) -> str:
    deviation = "" if row["deviation"] is None else f" ± {row['deviation']:.3f}"
    at = " ".join(
        f"{step}:{row[f'at_{step}']:.3f}"
        for step in MILESTONES[:-1]
        if row[f"at_{step}"] is not None
    )
    return (
        f"{row['task']} | {row['variant']} @ {row['rate']:g}, {row['seeds']} seeds, "
        f"{row['steps']} steps: "
        f"{row['mean']:.3f}{deviation} (averaged {row['averaged']:.3f}, where chosen {row['chosen_on']:.3f}) {at} "
        f"loss {row['loss']:.3f}, {row['row_forwards']:.1f} row forwards, {row['seconds']:.1f} s a run"
    )


class Log:
    """Finished runs, and those of the group that runs; a file of them is read first and added
    to."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.records = path, read_log(path)
        self.known = {
            self.key(r["task"], r["variant"], r["steps"], r["rate"], r["seed"])
            for r in self.records
        }
        self.latest: list[dict[str, Any]] = []

    @staticmethod
    def key(task: str, variant: str, steps: int, rate: float, seed: int) -> tuple[Any, ...]:
        return task, variant, steps, rate, seed

    def add(self) -> None:
        """Keep the latest runs, and write those that are finished."""
        self.records += self.latest
        if self.path:
            with self.path.open("a") as file:
                file.writelines(
                    json.dumps(record) + "\n" for record in self.latest if record["finished"]
                )

    def print(self) -> None:
        """Print the variants of the latest group, and their mean accuracies step by step."""
        tasks, names = ({record[key] for record in self.latest} for key in ("task", "variant"))
        for row in summarize(
            r for r in self.records if r["task"] in tasks and r["variant"] in names
        ):
            if row["chosen"]:
                print(show(row), flush=True)
        curves: dict[tuple[str, float], list[Any]] = {}
        for record in self.latest:
            curves.setdefault((record["variant"], record["rate"]), []).append(record["curve"])
        for (name, rate), values in curves.items():
            points = []
            for point in zip(*values, strict=True):
                reported, chosen = (
                    statistics.mean(run[column] for run in point) for column in (3, 1)
                )
                points.append(f"{point[0][0]:g}:{reported:.3f}/{chosen:.3f}")
            print(f"  {name} @ {rate:g}, reported/chosen: {' '.join(points)}", flush=True)


def read_sets(args: argparse.Namespace, task: str, tokenizer: Any) -> tuple[Any, Any, Any]:
    """Rows to train on, to choose rates on, and to report on."""
    from ondevice import read_dataset

    train, valid = (
        read_dataset(
            args.data / task / f"{part}.jsonl", tokenizer, task=task, max_length_tokens=MAX_TOKENS
        )
        for part in ("train", "valid")
    )
    cut = len(train.items) - args.choose_rows
    return (
        replace(train, items=train.items[:cut]),
        replace(train, items=train.items[cut:]),
        replace(valid, items=valid.items[: args.eval_rows]),
    )


def chunks(args: argparse.Namespace, task: str, log: Log) -> list[list[tuple[Any, float, int]]]:
    """Runs that the log has not, as (variant, rate, seed), in passes."""
    from benchmarks.prge.variants import Variant

    seeds = (
        [int(x) for x in args.seeds.split(",") if x]
        if "," in args.seeds
        else list(range(int(args.seeds)))
    )
    groups: dict[tuple[Any, ...], list[tuple[Variant, float, int]]] = {}
    for text in filter(None, (text.strip() for text in args.variants.split(";"))):
        name, _, rates = text.partition("@")
        variant = Variant.parse(name.strip(), args.steps, args.fo_steps)
        for rate in map(float, rates.split(",")):
            for seed in seeds:
                if log.key(task, variant.text, variant.steps, rate, seed) not in log.known:
                    groups.setdefault(variant.group(), []).append((variant, rate, seed))
    found = []
    for members in groups.values():
        parts = -(-len(members) // (args.fo_runs if members[0][0].first_order else args.runs))
        found += [
            members[i * len(members) // parts : (i + 1) * len(members) // parts]
            for i in range(parts)
        ]
    return found


def main() -> None:
    args = parse_args(__doc__, arguments)
    from benchmarks.prge.racing import race
    from benchmarks.prge.racing_model import RacingModel
    from ondevice import load_model

    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention is faster on short rows
    log = Log(args.log)
    models: dict[str, Any] = {}
    for task in args.tasks.split(","):
        sets: Any = None
        for chunk in chunks(args, task, log):
            before = time.perf_counter()
            if before - started > args.budget_s:
                print(
                    f"left out for want of time: {task}, {len(chunk)} runs such as {chunk[0]}",
                    flush=True,
                )
                continue
            dtype = "float32" if chunk[0][0].first_order else args.dtype
            if dtype not in models:
                device = "cuda" if torch.cuda.is_available() else "cpu"
                loaded = load_model(args.model, dtype=dtype, device=device)
                models[dtype] = loaded, RacingModel(loaded)
            loaded, model = models[dtype]
            sets = sets or read_sets(args, task, loaded.tokenizer)
            fixed = {"task": task, "dtype": dtype}

            def report(rows: list[dict[str, Any]], fixed: dict[str, Any] = fixed) -> None:
                log.latest = [fixed | row for row in rows]

            log.latest = []
            try:
                done = race(model, sets, chunk, args.eval_every, started + args.budget_s, report)
            except torch.cuda.OutOfMemoryError as error:
                print(
                    f"out of memory: {task}, {len(chunk)} runs such as {chunk[0]}: {error}",
                    flush=True,
                )
                torch.cuda.empty_cache()
                continue
            log.add()
            now = time.perf_counter()
            end = "" if done else ", not finished"
            print(
                f"# {len(chunk)} runs in {now - before:.1f} s{end}; {now - started:.0f} s since the start",
                flush=True,
            )
            log.print()
    note = (
        f"Trained on all training rows but the last {args.choose_rows}, if the rate of each variant was chosen by "
        f"mean accuracy of the last step; accuracies are of the last step on {args.eval_rows} validation rows. "
        f"Zeroth-order forward passes in {args.dtype} (TF32 products), losses in float32. Row forwards count a "
        "backward pass as two and spread the exact gradients over the steps. Seconds are a run's share of a pass that "
        "many runs went through together, without evaluations."
    )
    finish("prge/race", summarize(log.records), args, columns=COLUMNS, notes=[note],
           title="Fine-tuning SmolLM2-135M-Instruct to the same answers")  # fmt: skip


if __name__ == "__main__":
    main()
