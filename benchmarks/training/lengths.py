"""Steps of rows of about one length (`data.group_by_length`): positions of an epoch, CPU seconds of prge.

    python -m benchmarks.training.lengths                SmolLM2-135M, ten minutes on two cores

The paper's appendix A.6 saves padding by smaller batches of the same rows. Here the batch stays,
and its rows are as drawn, grouped by length, or packed. Seconds are of `prge --paper` with one
query over the first steps of an epoch, drawn and grouped ones in turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import add_arguments, finish, parse_args
from benchmarks.training.packing import first_rows
from ondevice.core.registry import method_config, open_session
from ondevice.data import Batches, pad_id_of, read_dataset
from ondevice.models import load_model

NEEDS = ("torch",)
ORDERS: dict[str, dict[str, bool]] = {
    "drawn": {},
    "grouped": {"group_by_length": True},
    "packed": {"packing": True},
}
TIMED = ("drawn", "grouped")
COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "batch_size", "title": "Rows a step"},
    {"key": "tokens", "title": "Tokens of an epoch", "digits": 0},
    {"key": "drawn", "title": "Positions, as drawn", "digits": 0},
    {"key": "grouped", "title": "grouped", "digits": 0},
    {"key": "packed", "title": "packed", "digits": 0},
    {"key": "saved", "title": "Grouped / drawn", "digits": 2},
    {"key": "drawn_step", "title": "Positions of a timed step, as drawn", "digits": 0},
    {"key": "grouped_step", "title": "grouped", "digits": 0},
    {"key": "drawn_s", "title": "CPU seconds a step, as drawn", "digits": 2},
    {"key": "grouped_s", "title": "grouped", "digits": 2},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data")
    parser.add_argument("--tasks", default="sst2,rte,squad")
    parser.add_argument("--count", type=int, default=1000, help="first training rows of a task")
    parser.add_argument("--tokens", type=int, default=256, help="longer rows are cut")
    parser.add_argument("--batches", default="4,16", help="rows a step; the first is timed")
    parser.add_argument("--steps", type=int, default=16, help="timed ones")


def positions(dataset: Any, size: int, pad: int) -> dict[str, Any]:
    """Return the positions of an epoch's complete steps in each order."""
    steps = range(len(dataset.items) // size)
    found = {}
    for name, how in ORDERS.items():
        batches = Batches(dataset, size, None, 0, pad, **how)
        found[name] = sum(batches.at(step).ids.size for step in steps)
    rows = [row for step in steps for row in batches.rows_at(step)]
    tokens = sum(len(dataset.items[row].example) for row in rows)
    return {"tokens": tokens, **found, "saved": found["grouped"] / found["drawn"]}


def timed(session: Any, dataset: Any, size: int, pad: int, steps: int) -> dict[str, float]:
    """Return positions and CPU seconds of a step, the mean of the first steps."""
    orders = {name: Batches(dataset, size, None, 0, pad, **ORDERS[name]) for name in TIMED}
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    computed: dict[str, list[int]] = {name: [] for name in TIMED}
    for step in range(steps):
        for name in TIMED if step % 2 else reversed(TIMED):
            batch = orders[name].at(step)
            begin = time.process_time()
            session.step(batch.ids, batch.labels, step, 0.0)
            seconds[name].append(time.process_time() - begin)
            computed[name].append(batch.ids.size)
    return {f"{name}_s": mean(seconds[name]) for name in TIMED} | {
        f"{name}_step": mean(computed[name]) for name in TIMED
    }


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=1)
    loaded = load_model(args.model, dtype="float32", device="cpu")
    pad = pad_id_of(loaded.tokenizer)
    session = open_session(loaded, method_config("prge", {"paper": True, "queries": 1}), 0)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for task in args.tasks.split(","):
            path = first_rows(
                args.data / task / "train.jsonl", args.count, Path(scratch) / f"{task}.jsonl"
            )
            dataset = read_dataset(path, loaded.tokenizer, task=task, max_length_tokens=args.tokens)
            for number, size in enumerate(map(int, args.batches.split(","))):
                row = {"task": task, "batch_size": size, **positions(dataset, size, pad)}
                if number == 0:
                    row |= timed(session, dataset, size, pad, args.steps)
                rows.append(row)
                print(row, flush=True)
    notes = [
        f"SmolLM2's tokenizer, the first {args.count} rows of at most {args.tokens} tokens, seed 0; "
        "a last step that is not complete is left out. A position is a token or padding. "
        f"Seconds: one query, {args.steps} steps."
    ]
    finish(
        "training/lengths", rows, args, COLUMNS, title="Steps of rows of one length", notes=notes
    )


if __name__ == "__main__":
    main()
