"""A training step beside busy processes on two cores, by how its threads wait for each other, or
by their number.

python -m benchmarks.training.neighbour                two cores, idle and with five busy processes
python -m benchmarks.training.neighbour --busy 2       with another number of them
python -m benchmarks.training.neighbour --program DIR  steps of a block program, by its threads

The model has SmolLM2-135M's shape and random weights; the step is MeSP's default one in eager
PyTorch. Each way of waiting has a process of its own, which is stopped while another takes its step:
threads that wait actively would take the cores. The busy processes run on the same two cores, at the
same priority, and only while the busy rows are measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, command_of, finish, parse_args

NEEDS = ("torch", "transformers")
SHAPE = {"layers": 30, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "vocab": 49_152}  # fmt: skip
ROWS, TOKENS = 1, 128
WAYS: dict[str, dict[str, str]] = {
    "as libraries choose": {"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": ""},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
    "passive (ours)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
OF_PROGRAMS: dict[str, dict[str, str]] = {
    "two threads": {"OMP_NUM_THREADS": "2"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
LIMIT_S = 50.0
"""Seconds that the busy processes run at most."""
BUSY = "while True: pass"
COLUMNS = [
    {"key": "neighbours", "title": "Busy processes"},
    {"key": "way", "title": "Threads wait"},
    {"key": "step_s", "title": "Step (s)", "digits": 2},
    {"key": "step_cpu_s", "title": "Step (CPU s)", "digits": 2},
]


def main() -> None:
    """Measure every way, idle and beside busy processes."""
    if "--serve" in sys.argv:
        serve()
        return

    def more(parser: Any) -> None:
        parser.add_argument("--busy", type=int, default=5, help="busy processes")
        parser.add_argument("--cores", type=int, default=2)
        parser.add_argument("--program", default="", help="an artifact of block programs")

    args = parse_args(__doc__, more)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    ways = OF_PROGRAMS if args.program else WAYS
    served = {way: Served(environment, args.program) for way, environment in ways.items()}
    rows = []
    for busy in (0, args.busy):
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
        started = time.perf_counter()
        try:
            figures: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for _ in range(args.repeats):
                for way, one in served.items():
                    if not busy or time.perf_counter() - started < LIMIT_S:
                        figures[way].append(one.step())
        finally:
            for other in others:
                other.kill()
        for way, steps in figures.items():
            seconds, cpu_seconds = ([pair[part] for pair in steps] for part in (0, 1))
            rows.append(
                {"neighbours": busy, "way": way, "step_s": seconds, "step_cpu_s": cpu_seconds}
            )
            print(rows[-1], flush=True)
    for one in served.values():
        one.close()
    notes = [
        f"{args.cores} cores, one row of {TOKENS} tokens, every token labelled, rank 8 on all seven "
        "linear layers, AdamW; "
        + ("a block program." if args.program else "random weights of SmolLM2-135M's shape.")
    ]
    title = "A step beside busy processes"
    name = "training/neighbour_programs" if args.program else "training/neighbour"
    columns = COLUMNS
    if args.program:
        columns = [
            column | {"title": "Threads"} if column["key"] == "way" else column
            for column in COLUMNS
        ]
        title = "A block program's step beside busy processes"
    shown = {"command": command_of("training/neighbour"), "show_versions": ("torch", "executorch")}
    finish(name, rows, args, columns=columns, title=title, notes=notes, **shown)


class Served:
    """A process that takes a step when it is asked to."""

    def __init__(self, environment: dict[str, str], program: str) -> None:
        named = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}
        kept = {key: value for key, value in os.environ.items() if key not in named}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training.neighbour", "--serve", program],
            cwd=ROOT,
            env={**kept, **{key: value for key, value in environment.items() if value}},
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        self.step()

    def step(self) -> tuple[float, float]:
        """Return the seconds and CPU seconds of one step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("done "):
                self.process.send_signal(signal.SIGSTOP)
                seconds, cpu_seconds = line.split()[1:]
                return float(seconds), float(cpu_seconds)
        raise SystemExit("a measured process has ended")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def serve() -> None:
    """Take a step for every line of standard input."""
    import numpy as np

    from ondevice.api.open import open_artifact
    from ondevice.core.registry import method_config, open_session
    from ondevice.exporters.executorch.session import load_runtime
    from ondevice.models.load import tiny_model

    if program := sys.argv[-1]:
        load_runtime()
        from executorch.extension.pybindings import portable_lib

        portable_lib._unsafe_reset_threadpool(int(os.environ["OMP_NUM_THREADS"]))
        session = open_artifact(Path(program))
    else:
        session = open_session(tiny_model("llama", **SHAPE), method_config("mesp", {"rank": 8}), 0)
    ids = np.random.default_rng(0).integers(256, size=(ROWS, TOKENS))
    for number, _ in enumerate(sys.stdin):
        started, cpu = time.perf_counter(), time.process_time()
        session.step(ids, ids, number, 3e-4)
        print("done", time.perf_counter() - started, time.process_time() - cpu, flush=True)


if __name__ == "__main__":
    main()
