"""The paper's Table 2 columns: MMLU, GSM8K and MT-Bench of the model before and after each way to
train it.

    python -m benchmarks.revffn.tasks --record          trains on Alpaca, then asks; on a GPU

Everything is the command line's own: `ondevice train`, then `ondevice eval --task`, all ways and
tasks side by side. MT-Bench has no judge here: its column counts the answers that were saved for
one. A task that does not end in time keeps the rows that it has; the table says how many.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, add_arguments, finish, parse_args
from benchmarks.revffn.quality import WAYS

NEEDS = ("cuda",)
_STARTED = count()
NAMES = ("full fine-tuning", "LoRA", "RevFFN full", "RevFFN exact", "RevFFN paper")
BASE = "before training"
METHODS = {"sft-fused": "full", "lora": "lora", "revffn": "revffn"}
SETTINGS = {"revffn": ("coupling", "streams", "recompute", "stage1_learning_rate", "skip_stage1")}
TASKS: dict[str, list[str]] = {
    "mmlu": ["--shots", "5"],
    "gsm8k": ["--max-new-tokens", "200"],
    "mt_bench": ["--max-new-tokens", "200"],
}
COLUMNS = [
    {"key": "method", "title": "Way"},
    {"key": "task", "title": "Task"},
    {"key": "rows", "title": "Rows"},
    {"key": "correct", "title": "Correct"},
    {"key": "accuracy", "title": "Accuracy (%)", "digits": 1, "scale": 100},
    {"key": "low", "title": "95% from", "digits": 1, "scale": 100},
    {"key": "high", "title": "to", "digits": 1, "scale": 100},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--methods", default=",".join(NAMES))
    parser.add_argument(
        "--limits",
        type=int,
        nargs=3,
        default=(500, 100, 10),
        help="rows of mmlu, gsm8k and mt_bench",
    )
    parser.add_argument("--task-s", type=float, default=600.0, help="seconds that a task may take")


def training(args: Any, name: str, out: Path) -> list[str]:
    """The command that trains a way."""
    kind, rate, settings = WAYS[name]
    method = METHODS[kind]
    command = ["train", "--method", method, "--model", args.model, "--data", str(args.data / "alpaca/train.jsonl"),
               "--steps", str(args.steps), "--batch-size", str(args.batch_size), "--learning-rate", str(rate),
               "--out", str(out), "--max-length", "256"]  # fmt: skip
    chosen = {key: value for key, value in settings.items() if key in SETTINGS.get(method, ())}
    if chosen and not chosen.get("skip_stage1", True):
        chosen["stage1_steps"] = args.steps // 5
    for key, value in chosen.items():
        command += ["--set", f"method.{key}={json.dumps(value).strip(chr(34))}"]
    return command


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """An `ondevice` command in a process of its own, on the next GPU of those there are."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if (gpus := torch.cuda.device_count()) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(next(_STARTED) % gpus)
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "ondevice", *command],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
        )


def asking(args: Any, name: str, folder: Path) -> dict[str, subprocess.Popen[bytes]]:
    """All tasks of one trained way, begun."""
    trained = folder / name.replace(" ", "-")
    source = args.model if name in (BASE, "LoRA") else str(trained / "model")
    adapter = ["--adapter", str(trained / "adapter")] if name == "LoRA" else []
    begun = {}
    for (task, extra), limit in zip(TASKS.items(), args.limits, strict=True):
        out = folder / f"{name}-{task}"
        command = ["eval", source, *adapter, "--task", task, "--data", str(args.data / task), "--limit", str(limit),
                   "--out", str(out), *extra]  # fmt: skip
        begun[task] = start(command, folder / f"{name}-{task}.log")
    return begun


def row(name: str, task: str, folder: Path) -> dict[str, Any]:
    """The figures that the task left."""
    path = folder / f"{name}-{task}" / "figures.json"
    if not path.is_file():
        log = folder / f"{name}-{task}.log"
        raise RuntimeError(f"{name}, {task}: no figures\n{log.read_text(errors='replace')[-2000:]}")
    figures = json.loads(path.read_text())
    low, high = figures["accuracy_interval"] or (None, None)
    return {"method": name, "task": task, "rows": figures["rows"], "correct": figures["correct"],
            "accuracy": figures["accuracy"], "low": low, "high": high}  # fmt: skip


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=1)
    names = [name.strip() for name in args.methods.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        running: dict[str, dict[str, subprocess.Popen[bytes]]] = {BASE: asking(args, BASE, folder)}
        deadline = {BASE: time.monotonic() + args.task_s}
        trainings = {
            name: start(
                training(args, name, folder / name.replace(" ", "-")), folder / f"{name}.log"
            )
            for name in names
        }
        while trainings or running:
            time.sleep(0.5)
            for name, process in list(trainings.items()):
                if process.poll() is None:
                    continue
                del trainings[name]
                if process.returncode:
                    print(
                        f"{name}: training failed\n{(folder / f'{name}.log').read_text()[-2000:]}",
                        flush=True,
                    )
                    continue
                print(f"{name}: trained", flush=True)
                running[name], deadline[name] = (
                    asking(args, name, folder),
                    time.monotonic() + args.task_s,
                )
            for name, tasks in list(running.items()):
                for task, process in list(tasks.items()):
                    if process.poll() is None:
                        if time.monotonic() > deadline[name]:
                            process.send_signal(
                                signal.SIGINT
                            )  # as Ctrl-C: it keeps the rows so far
                            deadline[name] = time.monotonic() + 60
                        continue
                    del tasks[task]
                    rows.append(row(name, task, folder))
                    print(rows[-1], flush=True)
                if not tasks:
                    del running[name]
    order = [BASE, *NAMES]
    rows.sort(key=lambda actual: (list(TASKS).index(actual["task"]), order.index(actual["method"])))
    notes = [
        f"{args.model}, {args.steps} steps of {args.batch_size} rows of Alpaca of at most 256 tokens, one seed. MMLU "
        "with 5 examples, GSM8K without and at most 200 tokens an answer; intervals are Wilson's. MT-Bench: answers "
        "saved for a judge. `paper` trains with stored activations."
    ]
    finish(
        "revffn/tasks",
        rows,
        args,
        COLUMNS,
        title="MMLU, GSM8K and MT-Bench by way of training",
        notes=notes,
    )


if __name__ == "__main__":
    main()
