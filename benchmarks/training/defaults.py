"""Does every method learn with the settings that it has by default? SST-2 and a chat set, several
seeds.

    python -m benchmarks.training.defaults --processes 14 --budget-s 280 --log defaults.jsonl --record      on a GPU
    python -m benchmarks.training.defaults --methods mesp,full --seeds 1 --device cpu

A run is `ondevice train` with a method, the model, the rows, a number of steps and a seed; what it
is evaluated on changes nothing in it. Methods are those of the registry: 60 steps with gradients,
500 without. The chat set is Alpaca's rows as conversations. The held-out rows are evaluated before
and after. A method learns if every seed lowers the held-out loss and, on SST-2, raises the
accuracy. The first seed of every method comes first, then the second; what runs when the budget is
over is ended, and the same command with the same --log goes on with what is missing.

    --variants "mezo loss=answers learning_rate=1e-5; full learning_rate=3e-5"      others next to them, to choose
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTimeError
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, machine_info, parse_args

NEEDS = ("cuda",)
SETS = ("sst2", "chat")
COLUMNS = [
    {"key": "method", "title": "Method"},
    {"key": "set", "title": "Rows"},
    {"key": "steps", "title": "Steps"},
    {"key": "settings", "title": "Settings"},
    {"key": "accuracy_before", "title": "Accuracy before", "digits": 3},
    {"key": "mean_accuracy", "title": "after, mean", "digits": 3},
    {"key": "accuracy", "title": "after, by seed", "digits": 3},
    {"key": "loss_before", "title": "Held-out loss before", "digits": 3},
    {"key": "mean_loss", "title": "after, mean", "digits": 3},
    {"key": "loss", "title": "after, by seed", "digits": 3},
    {"key": "learns", "title": "Learns"},
]


@dataclass(frozen=True)
class Job:
    """A run, or with no method the evaluation of the model as it is."""

    set: str
    method: str
    steps: int
    settings: str
    seed: int


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--processes", "--log")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of sst2/ and alpaca/"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", default="", help="by commas; all of the registry")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of methods with a gradient")
    parser.add_argument("--zeroth-steps", type=int, default=500)
    parser.add_argument("--eval-rows", type=int, default=200)
    parser.add_argument(
        "--variants",
        default="",
        help="settings that are not the default: METHOD KEY=VALUE ...; ...",
    )
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="end after so many seconds"
    )


def main() -> None:
    """What --log lacks is run, the defaults first; then the table of what is there."""
    args = parse_args(__doc__, arguments, repeats=1)
    jobs = jobs_of(args)
    records = read_log(args.log)
    done = {job_of(record) for record in records}
    for record in run([job for job in jobs if job not in done], args):
        records.append(record)
        print(json.dumps(record), flush=True)
        if args.log:
            with args.log.open("a") as file:
                file.write(json.dumps(record) + "\n")
    records = [record for record in records if job_of(record) in set(jobs)]
    rows = table(records)
    if not rows:
        raise SystemExit(
            "no run has ended within the budget: the same command with a larger --budget-s goes on"
        )
    missing = len(jobs) - len(records)
    notes = [
        f"{args.model}; {args.eval_rows} held-out rows; {args.seeds} seeds, by number; the model as it is has the "
        "accuracy and the loss before. Learns: every seed lowers the held-out loss and, on SST-2, raises the accuracy.",
        *([f"{missing} runs are missing: the time was over."] if missing else []),
    ]
    title = "SmolLM2-135M with each method's defaults: SST-2 and a chat set"
    finish("training/defaults", rows, args, COLUMNS, title=title, notes=notes)


def jobs_of(args: Any) -> list[Job]:
    """All runs: the model as it is, then every method's first seed, its second, ..., each time the
    long ones first."""
    from ondevice.core.registry import method, method_names

    names, sets = args.methods.split(",") if args.methods else method_names(), args.sets.split(",")
    variants = [(name, default_of(name)) for name in names]
    for words in filter(None, map(str.strip, args.variants.split(";"))):
        name, _, settings = words.partition(" ")
        variants.append((name, settings.strip()))
    jobs = [
        Job(rows, name, args.zeroth_steps if method(name).order == "zeroth" else args.steps, settings, seed)
        for name, settings in variants for rows in sets for seed in range(args.seeds)
    ]  # fmt: skip
    return [
        *(Job(rows, "", 0, "", 0) for rows in sets),
        *sorted(
            jobs, key=lambda job: (job.settings != default_of(job.method), job.seed, -job.steps)
        ),
    ]


def run(jobs: list[Job], args: Any) -> Iterable[dict[str, Any]]:
    """Results as the runs end; those that run when the budget is over are ended, and give none."""
    began, context = time.monotonic(), get_context("spawn")
    turn = context.Value("i", 0)
    gpus = 0 if args.device == "cpu" else len(machine_info()["gpus"])
    pool = ProcessPoolExecutor(args.processes, context, begin, (turn, args.processes, gpus))
    try:
        tasks = [pool.submit(work, job, args) for job in jobs]
        limit = (
            None
            if args.budget_s == float("inf")
            else max(0.0, args.budget_s - (time.monotonic() - began))
        )
        for task in as_completed(tasks, timeout=limit):
            yield task.result()
    except OutOfTimeError:
        print(f"{args.budget_s:g} s are over", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()


def begin(turn: Any, processes: int, gpus: int) -> None:
    """Give this process its share of the cores and one of the GPUs; before torch is imported."""
    with turn.get_lock():
        mine, turn.value = turn.value, turn.value + 1
    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(mine % gpus)


def work(job: Job, args: Any) -> dict[str, Any]:
    """One run, as a user has it. What it raises is part of the result."""
    from ondevice.core.errors import OndeviceError

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = measured(job, args, Path(folder))
        except OndeviceError as error:
            figures = {"error": str(error)}
    return {**asdict(job), **figures, "seconds": time.perf_counter() - started}


def measured(job: Job, args: Any, folder: Path) -> dict[str, Any]:
    """Accuracy and loss on the held-out rows, and for a run its rate and losses on the way."""
    from ondevice import evaluate, train
    from ondevice.data import length_of, read_rows
    from ondevice.models import load_model
    from ondevice.training.events import Start, Step

    task = "sst2" if job.set == "sst2" else None
    rows, held_out = (rows_of(job.set, part, args.data, folder) for part in ("train", "valid"))
    if not job.method:
        model, read = load_model(args.model), read_rows(rows, task=task)
        length = length_of(
            read, model.tokenizer, most_tokens=model.dims.max_positions
        ).tokens  # what training takes
        shared: dict[str, Any] = {
            "most_rows": args.eval_rows,
            "device": args.device,
            "max_length_tokens": length,
        }
        before = evaluate(args.model, held_out, task=task, **shared)
        return {"accuracy": before.accuracy, "loss": before.loss}
    settings = {
        "model.source": args.model, "model.device": args.device, "method.name": job.method, "data.path": str(rows),
        "data.task": task, "train.steps": job.steps, "train.seed": job.seed, "train.out": str(folder / "run"),
        "data.eval_path": str(held_out), "train.eval_rows": args.eval_rows, "train.checkpoint_every": job.steps,
    }  # fmt: skip
    if job.settings != default_of(job.method):
        settings |= {
            f"method.{key}": value
            for key, value in (pair.split("=") for pair in job.settings.split())
        }
    seen: dict[str, Any] = {"losses": []}

    def keep(event: Any) -> None:
        if isinstance(event, Start):
            seen.update(dtype=event.config["model"]["dtype"])
        elif isinstance(event, Step):
            seen["losses"].append(event.loss)
            if len(seen["losses"]) % 250 == 0:
                loss = statistics.mean(seen["losses"][-100:])
                print(
                    f"{job}: {len(seen['losses'])} steps, loss {loss:.4f}",
                    file=sys.stderr,
                    flush=True,
                )

    result = train(
        {key: value for key, value in settings.items() if value is not None}, sinks=[keep]
    ).result
    assert result.evaluation is not None
    return {**seen, "accuracy": result.evaluation.accuracy, "loss": result.evaluation.loss}


def default_of(name: str) -> str:
    """The words of a method's default: what mostly decides how it learns, so that a log outlives a
    change of it."""
    from ondevice.core.registry import method

    fields = method(name).config.model_fields
    return "default " + " ".join(
        f"{key}={fields[key].default}" for key in ("learning_rate", "loss") if key in fields
    )


def rows_of(name: str, part: str, data: Path, folder: Path) -> Path:
    """The file of a set's rows; a chat set's are written as conversations."""
    if name == "sst2":
        return data / "sst2" / f"{part}.jsonl"
    path = folder / f"{part}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for line in (data / "alpaca" / f"{part}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            asked = row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "")
            turns = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": row["output"]},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def read_log(path: Path | None) -> list[dict[str, Any]]:
    """Finished runs of a log; a last line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path and path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def job_of(record: dict[str, Any]) -> Job:
    return Job(record["set"], record["method"], record["steps"], record["settings"], record["seed"])


def table(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each set and method, over its seeds."""
    before = {record["set"]: record for record in records if not record["method"]}
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        if record["method"] and "error" not in record:
            groups.setdefault((record["set"], record["method"], record["settings"]), []).append(
                record
            )
    rows = []
    for (name, method, settings), runs in sorted(
        groups.items(), key=lambda item: (SETS.index(item[0][0]), item[0][1:])
    ):
        start = before.get(name, {"accuracy": None, "loss": None})
        row: dict[str, Any] = {
            "method": method, "set": name, "steps": runs[0]["steps"], "settings": settings,
            "seeds": [run["seed"] for run in runs],
            **{f"{key}_before": start[key] for key in ("accuracy", "loss")},
            **{key: [run[key] for run in runs] for key in ("accuracy", "loss")},
        }  # fmt: skip
        row["mean_loss"] = statistics.mean(row["loss"])
        better = start["loss"] is not None and all(loss < start["loss"] for loss in row["loss"])
        if start["accuracy"] is None:
            row["accuracy"] = row["mean_accuracy"] = None
        else:
            row["mean_accuracy"] = statistics.mean(row["accuracy"])
            better = better and all(accuracy > start["accuracy"] for accuracy in row["accuracy"])
        rows.append(row | {"learns": "yes" if better else "no"})
    return rows


if __name__ == "__main__":
    main()
