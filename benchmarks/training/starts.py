"""Does a run that is started and resumed on a busy machine choose once?

Each of `--runs` runs is started with everything left to the machine, and resumed. Of five, one goes
through the command (`ondevice train`), the others through `ondevice.train`. Before a resume in this
process everything that a run measures is made to say something else: bfloat16 units, placement,
length, method, kernels, threads. So many busy processes run next to it that the load is `--load`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import ondevice
from benchmarks.common import ROOT, finish, median, parse_args
from ondevice.core.errors import OndeviceError
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.training import choices, length
from ondevice.training.events import FILE_NAME, Resume, read_log, read_start
from ondevice.training.identity import DATE

NEEDS = ()
KINDS: dict[str, dict[str, Any]] = {
    "no method named": {},
    "slideformer": {"method.name": "slideformer"},
}
COMMAND_EVERY = 5


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--load", type=int, default=8)


def _burn() -> None:
    while True:
        sum(range(100_000))


@contextmanager
def busy(load: int) -> Iterator[int]:
    """Run busy processes until the machine has this load; yield how many they are."""
    count = max(0, round(load - os.getloadavg()[0]))
    processes = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield count
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def other_measurements(turn: int) -> Iterator[None]:
    """Let everything that a run measures say something else, and again at each call."""
    calls = itertools.count(turn)
    measure = length.length_of

    def other_length(*arguments: Any, **options: Any) -> Any:
        found = measure(*arguments, **options)
        return replace(found, tokens=found.tokens + 1 + next(calls) % 7)

    def other_placement(self: SlideformerConfig) -> SlideformerConfig:
        taken = {"window": 2 + next(calls) % 2, "gradient_buffers": 2 + next(calls) % 3}
        return self.decided(resident_layers=0, resident_tables=False, **taken)

    before = torch.get_num_threads()
    torch.set_num_threads(1 + before % 2)
    other = ("lora", "method lora: another choice")
    with (
        patch("ondevice.planning.precision.has_bfloat16_units", lambda: next(calls) % 2 == 0),
        patch("ondevice.models.choice.choose_method", lambda *_: other),
        patch.object(choices, "has_liger", lambda device: next(calls) % 2 == 0),
        patch.object(length, "length_of", other_length),
        patch.object(SlideformerConfig, "fixed", other_placement),
    ):
        try:
            yield
        finally:
            torch.set_num_threads(before)


def settings(kind: str, rows: Path, out: Path, steps: int) -> dict[str, Any]:
    run = {"model.source": "tiny:llama", "data.path": str(rows), "train.out": str(out)}
    return {**run, "train.steps": steps, "train.batch_size": 2, **KINDS[kind]}


def start(kind: str, rows: Path, out: Path, steps: int, resume: bool, by_command: bool) -> str:
    """Start or resume a run; return the error that refused it, or nothing."""
    if by_command:
        given = itertools.chain.from_iterable(
            ("--set", f"{key}={value}") for key, value in settings(kind, rows, out, steps).items()
        )
        command = [sys.executable, "-m", "ondevice", "train", *given, "--json"]
        done = subprocess.run(
            [*command, *(["--resume"] if resume else [])],
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        return "" if done.returncode == 0 else done.stderr[-500:]
    try:
        ondevice.train(settings(kind, rows, out, steps), resume=resume)
    except OndeviceError as error:
        return str(error)
    return ""


def choice_of(out: Path) -> str:
    """Return what a run chose, as text; the date is its own."""
    head = read_start(out / FILE_NAME)
    assert head is not None
    decided = {key: value for key, value in head.decided.items() if key != DATE}
    return json.dumps(decided, sort_keys=True)


def changed(out: Path) -> int:
    """Return how many resumes computed with something else than the run's beginning."""
    events = [entry.event for entry in read_log(out / FILE_NAME).entries]
    resumes = [event for event in events if isinstance(event, Resume)]
    assert len(resumes) == 1, out
    settings_of_a_resume = {"train.steps"}
    return sum(bool(set(event.changed) - settings_of_a_resume) for event in resumes)


def main() -> None:
    args = parse_args(__doc__, arguments)
    for name in choices.NAMED_THREADS:  # they would name what is to be chosen
        os.environ.pop(name, None)
    table = {kind: {"choices": set(), "refusals": [], "changed": 0, "runs": 0, "by_command": 0}
             for kind in KINDS}  # fmt: skip
    loads = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, busy(args.load) as count:
        rows = Path(folder) / "rows.jsonl"
        given = [{"text": f"{'ab'[i % 2]}{i}", "label": ["no", "yes"][i % 2]} for i in range(12)]
        rows.write_text("\n".join(map(json.dumps, given)) + "\n")
        for turn in range(args.runs):
            kind = list(KINDS)[turn % len(KINDS)]
            row = table[kind]
            out = Path(folder) / str(turn)
            by_command = turn % COMMAND_EVERY == 0
            row["runs"] += 1
            row["by_command"] += by_command
            row["refusals"] += filter(None, [start(kind, rows, out, 1, False, by_command)])
            row["choices"].add(choice_of(out))
            if by_command:
                refused = start(kind, rows, out, 2, True, True)
            else:
                with other_measurements(turn):
                    refused = start(kind, rows, out, 2, True, False)
            row["refusals"] += filter(None, [refused])
            row["choices"].add(choice_of(out))
            if not refused:
                row["changed"] += changed(out)
            loads.append(os.getloadavg()[0])
            print(f"{turn + 1}/{args.runs}", end="\r", file=sys.stderr, flush=True)
    rows_of_table = [
        {
            "kind": kind,
            "starts": row["runs"],
            "resumes": row["runs"],
            "by_command": 2 * row["by_command"],
            "choices": len(row["choices"]),
            "refusals": len(row["refusals"]),
            "changed": row["changed"],
            "choice": "; ".join(sorted(row["choices"])),
            "errors": "; ".join(row["refusals"]),
        }
        for kind, row in table.items()
    ]
    finish(
        "training/starts",
        rows_of_table,
        args,
        show_versions=["python", "torch"],
        title="Starts and resumes on a busy machine whose measurements change",
        columns=[
            {"key": "kind", "title": "Run"},
            {"key": "starts", "title": "Starts"},
            {"key": "resumes", "title": "Resumes"},
            {"key": "by_command", "title": "Of both, by command"},
            {"key": "choices", "title": "Different choices"},
            {"key": "changed", "title": "Resumes that computed otherwise"},
            {"key": "refusals", "title": "Refusals"},
        ],
        notes=[
            f"Load average {min(loads):.1f} to {max(loads):.1f}, median {median(loads):.1f}, with "
            f"{count} busy processes of this benchmark; {time.perf_counter() - began:.0f} s in all. "
            f"Chosen: {rows_of_table[0]['choice']}"
        ],
    )


if __name__ == "__main__":
    main()
