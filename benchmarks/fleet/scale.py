"""What a simulated fleet of many devices costs: seconds of a processor and memory, by devices.

A tiny random Llama, rows that a template gives (4 a device, split by label: a Dirichlet
distribution of 0.1), q = 2; a tenth of the devices drop out of a round, a tenth answer late, a
fifth lie, and the server takes a trimmed mean. Each size is a process of its own. `answers` is the
server alone: it reads, checks, combines and stores so many answers of 32 numbers, for an adapter of
368,640 elements.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish, parse_args

NEEDS = ()
WORDS = (("dull", "cold", "clumsy", "poor"), ("fine", "warm", "clever", "rich"))
ROWS_A_DEVICE = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--answers", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=3)


def simulated(devices: int, rounds: int) -> dict[str, Any]:
    """Run a fleet in this process."""
    from ondevice.fleet.config import FleetRun
    from ondevice.fleet.simulate import simulate

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        with rows.open("w") as file:
            for i in range(ROWS_A_DEVICE * devices):
                text = f"a {WORDS[i % 2][i // 2 % 4]} film {i % 97}"
                file.write(json.dumps({"text": text, "label": i % 2}) + "\n")
        config = FleetRun.load(None, {
            "model.source": "tiny:llama", "data.path": str(rows), "data.task": "sst2", "train.out": Path(folder) / "f",
            "train.batch_size": 2, "train.eval_rows": 40, "method.queries": 2, "method.learning_rate": 1e-2,
            "fleet.rounds": rounds, "fleet.combine": "trimmed_mean", "fleet.trim": 0.25,
            "simulation.devices": devices, "simulation.dirichlet": 0.1, "simulation.dropout": 0.1,
            "simulation.late": 0.1, "simulation.hostile": 0.2,
        })  # fmt: skip
        marks: list[float] = []
        result = simulate(config, on_round=lambda done: marks.append(time.process_time()))
    each = (marks[-1] - marks[0]) / (len(marks) - 1)
    return {
        "what": "a simulated round",
        "count": devices,
        "cpu_s": each,
        "hashes": result.hashes_equal,
    }


def answered(count: int) -> dict[str, Any]:
    """Take a round of `count` answers, in this process."""
    import numpy as np

    from benchmarks.fleet.replay import charter
    from ondevice.fleet.messages import TaskReply
    from ondevice.fleet.numbers import pack
    from ondevice.fleet.rounds import Rounds
    from ondevice.fleet.store import Store

    fleet = charter("rademacher", 8)
    server, draw = Rounds(fleet), np.random.default_rng(0)
    begin = server.state.hash
    given = [
        TaskReply(
            fleet.id, 0, begin, device, 32, 1.0, pack(draw.normal(0, 3, 32).tolist())
        ).to_bytes()
        for device in range(count)
    ]
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder), fleet) as store:
        before = time.process_time()
        current = server.begin(range(count))
        for device, answer in enumerate(given):
            server.receive(answer, device)
        answers = list(current.answers.values())
        store.add(server.close(0), server.state, answers=answers)
        seconds = time.process_time() - before
    return {
        "what": "a server's round: tasks, answers, outcome, stored",
        "count": count,
        "cpu_s": seconds,
        "hashes": True,
    }


def apart(kind: str, *values: int) -> dict[str, Any]:
    """Measure in a process of its own, whose peak memory is then its."""
    command = [sys.executable, "-m", "benchmarks.fleet.scale", "--one", kind, *map(str, values)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if "--one" in sys.argv:
        kind, *values = sys.argv[sys.argv.index("--one") + 1 :]
        found = simulated(*map(int, values)) if kind == "devices" else answered(*map(int, values))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(found | {"peak_bytes": peak}))
        return
    args = parse_args(__doc__, arguments)
    rows = [apart("devices", count, args.rounds) for count in args.devices]
    rows += [apart("answers", count) for count in args.answers]
    for row in rows:
        row["each_ms"] = 1000 * row["cpu_s"] / row["count"]
        row["hashes"] = "yes" if row["hashes"] else "no"
    finish(
        "fleet/scale",
        rows,
        args,
        show_versions=["numpy", "torch"],
        title="Fleets of many devices",
        columns=[
            {"key": "what", "title": "What"},
            {"key": "count", "title": "Devices"},
            {"key": "cpu_s", "title": "Seconds of a processor", "digits": 2},
            {"key": "each_ms", "title": "A device, ms", "digits": 2},
            {"key": "peak_bytes", "title": "Peak memory of the process, bytes"},
            {"key": "hashes", "title": "One hash"},
        ],
        notes=[
            "One thread. Seconds are of the processor, because other processes shared the machine."
        ],
    )


if __name__ == "__main__":
    main()
