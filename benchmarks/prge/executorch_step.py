"""The cost of a training step as an ExecuTorch program: time, bytes, memory, lowering.

    python -m benchmarks.prge.executorch_step --programs build/programs --record
    python -m benchmarks.prge.executorch_step --only q4 --programs build/programs

One factor at a time is changed around float32 weights, noise in ATen ops, tiled loss, 64 tokens, q
= 1, B = 1; every token carries a label. Lowering (of `train_step` alone) and memory are measured in
a process for each program, times in turns in one process that holds them all. Growth is counted
from a process that has imported ExecuTorch and its kernels and not yet opened the program: Python
with PyTorch is most of the rest. Rows are written one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.committed import RESULTS
from benchmarks.common import (
    add_arguments,
    finish,
    interleaved,
    machine_info,
    median,
    parse_args,
    write_result,
)
from benchmarks.prge.programs import (
    Q4,
    Program,
    Spec,
    add_programs,
    child,
    ensure,
    folder_of,
    program_memory,
    wanted,
)

NEEDS = ("executorch",)
NAME = "prge/executorch_step"
CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, op generator": {"generator": "op"},
    "fp32, plain loss": {"loss": "plain"},
    "fp32, op loss": {"loss": "op"},
    "fp32, 128 tokens": {"length": 128},
    "8da4w": {"quantize": "8da4w"},
    "q4": Q4,
    "q4, ATen noise, tiled loss": {"quantize": "q4"},
    "q4, 128 tokens": {**Q4, "length": 128},
}
COLUMNS = [
    {"key": "config", "title": "Program"},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
    {"key": "pte_bytes", "title": ".pte (MB)", "digits": 1, "scale": 1e-6},
    {"key": "planned_bytes", "title": "Arena (MB)", "digits": 1, "scale": 1e-6},
    {"key": "growth_rss_bytes", "title": "RSS growth (MB)", "digits": 0, "scale": 1e-6},
    {"key": "growth_anonymous_bytes", "title": "of it RssAnon (MB)", "digits": 0, "scale": 1e-6},
    {"key": "baseline_rss_bytes", "title": "RSS before (MB)", "digits": 0, "scale": 1e-6},
    {"key": "peak_rss_bytes", "title": "Peak RSS (MB)", "digits": 0, "scale": 1e-6},
    {"key": "lowering_cpu_s", "title": "Lowering (CPU s)", "digits": 0},
    {"key": "lowering_peak_bytes", "title": "Lowering RSS (MB)", "digits": 0, "scale": 1e-6},
    {"key": "instructions", "title": "Instructions"},
]  # fmt: skip


def time_child(arguments: list[str]) -> dict[str, Any]:
    """Seconds a step of all programs, in turns."""
    folder, repeats = Path(arguments[0]), int(arguments[1])
    programs = {
        name: Program(Spec(**values), folder) for name, values in json.loads(arguments[2]).items()
    }
    return interleaved(
        {name: program.call for name, program in programs.items()}, repeats, warmup=2
    )


def goals(rows: list[dict[str, Any]]) -> list[str]:
    """Each goal with its measurement; those whose rows are missing are left out."""
    by_name = {row["config"]: row for row in rows}
    fp32, q4 = by_name.get("fp32"), by_name.get("q4")
    limits: list[tuple[str, float, float, str]] = []
    if fp32:
        limits.append(("float32 program", fp32["pte_bytes"] / 1e6, 560, "MB"))
    if q4:
        limits.append(("q4 program", q4["pte_bytes"] / 1e6, 100, "MB"))
        if q4["step_s"]:
            limits.append(("q4 step at 64 tokens", median(q4["step_s"]), 0.20, "s"))
        limits.append(("q4 peak RSS of the Python process", q4["peak_rss_bytes"] / 1e6, 450, "MB"))
        limits.append(("q4 RSS growth", q4["growth_rss_bytes"] / 1e6, 450, "MB"))
    if fp32 and q4:
        limits.append(("q4 bytes / float32 bytes", q4["pte_bytes"] / fp32["pte_bytes"], 0.30, ""))
    words = [
        f"{what} {value:.3g} {unit}".strip()
        + f", goal {limit:g}: {'met' if value <= limit else 'not met'}"
        for what, value, limit, unit in limits
    ]
    return ["Goals. " + "; ".join(words) + "."] if words else []


def measure(name: str, spec: Spec, folder: Path) -> dict[str, Any]:
    """One row, without its time."""
    facts = ensure(spec, folder)
    peak = program_memory(spec, folder)
    row = {key: getattr(spec, key) for key in ("quantize", "generator", "loss", "length")}
    kept = ("pte_bytes", "planned_bytes", "delegates", "instructions")
    kept += tuple(key for key in facts if key.startswith("lowering_"))
    return {
        "config": name,
        **row,
        "step_s": None,
        **peak,
        **{key: facts[key] for key in kept},
        "lowered_at_commit": facts["commit"],
    }


def earlier(name: str) -> list[dict[str, Any]]:
    """The rows that are recorded for this machine."""
    path = RESULTS / name / f"{machine_info()['name']}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def arguments(parser: argparse.ArgumentParser) -> None:
    add_programs(parser)
    parser.add_argument(
        "--only", choices=list(CONFIGS), help="this row; the others stay as recorded"
    )
    parser.add_argument(
        "--length", type=int, default=0, help="tokens of every program, for a quick try"
    )
    add_arguments(parser, "--note")


def main() -> None:
    args = parse_args(__doc__, arguments)
    changed = {"model": args.model} | ({"length": args.length} if args.length else {})
    specs = {
        name: replace(Spec(), **values | changed)
        for name, values in CONFIGS.items()
        if args.only in (None, name)
    }
    rows = {row["config"]: row for row in earlier(NAME)} if args.only and args.record else {}
    model = args.model.split(":")[-1]
    title = f"A P-RGE step (q = 1, B = 1, LoRA-FA r = 16 on q and v) of {model} as an ExecuTorch program"
    extra: dict[str, Any] = {
        "command": "python -m benchmarks.prge.executorch_step",
        "title": title,
        "show_versions": ["torch", "executorch"],
    }

    def ordered() -> list[dict[str, Any]]:
        return [rows[name] for name in CONFIGS if name in rows]

    with folder_of(args) as folder:
        specs = {name: spec for name, spec in specs.items() if wanted(spec, folder, args)}
        for name, spec in specs.items():
            rows[name] = measure(name, spec, folder)
            print(json.dumps(rows[name]), file=sys.stderr, flush=True)
            if args.record:
                write_result(NAME, ordered(), None, COLUMNS, **extra)
        if specs:
            load = os.getloadavg()[0]
            jobs = json.dumps({name: asdict(spec) for name, spec in specs.items()})
            times = child(
                "benchmarks.prge.executorch_step", "--time", str(folder), str(args.repeats), jobs
            )
            for name, seconds in times.items():
                rows[name] |= {"step_s": seconds, "load_before": load}
    if rows:
        finish(NAME, ordered(), args, COLUMNS, notes=[*goals(ordered()), *args.note], **extra)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--time"]:
        print(json.dumps(time_child(sys.argv[2:])))
    else:
        main()
