"""Does a run that is started and resumed on a busy machine choose once?

Each of `--runs` runs is started with everything left to the machine, and resumed. Of five, one goes
through the command (`ondevice train`), the others through `ondevice.train`. Before a resume in this
process everything that a run measures is made to say something else: bfloat16 units, placement,
length, method, kernels, threads. Several run at the same time (`--jobs`), with so many busy
processes next to them that the load is at least `--load`.
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
from ondevice.training import choices
from ondevice.training import rows as run_rows
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
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after so long")


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
    measure = run_rows.length_of

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
        patch("ondevice.training.choices.has_bfloat16_units", lambda: next(calls) % 2 == 0),
        patch("ondevice.models.choice.choose_method", lambda *_: other),
        patch.object(choices, "has_liger", lambda device: next(calls) % 2 == 0),
        patch.object(run_rows, "length_of", other_length),
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


def turn_of(given: tuple[int, str]) -> dict[str, Any]:
    """Start a run and resume it; return what it chose and what was refused."""
    turn, folder = given
    kind = list(KINDS)[turn % len(KINDS)]
    rows = Path(folder) / "rows.jsonl"
    out = Path(folder) / str(turn)
    by_command = turn % COMMAND_EVERY == 0
    refusals = [start(kind, rows, out, 1, False, by_command)]
    taken = [choice_of(out)]
    if by_command:
        refusals.append(start(kind, rows, out, 2, True, True))
    else:
        with other_measurements(turn):
            refusals.append(start(kind, rows, out, 2, True, False))
    taken.append(choice_of(out))
    return {
        "kind": kind,
        "by_command": by_command,
        "choices": taken,
        "refusals": [text for text in refusals if text],
        "changed": 0 if refusals[1] else changed(out),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    args = parse_args(__doc__, arguments)
    for name in choices.NAMED_THREADS:  # they would name what is to be chosen
        os.environ.pop(name, None)
    began = time.perf_counter()
    done = []
    pools = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        busy(args.load - args.jobs) as count,
        pools.Pool(args.jobs) as pool,
    ):
        given = [{"text": f"{'ab'[i % 2]}{i}", "label": ["no", "yes"][i % 2]} for i in range(12)]
        rows = "\n".join(map(json.dumps, given)) + "\n"
        (Path(folder) / "rows.jsonl").write_text(rows)
        turns = [(turn, folder) for turn in range(args.runs)]
        for result in pool.imap_unordered(turn_of, turns):
            done.append(result)
            print(f"{len(done)}/{args.runs}", end="\r", file=sys.stderr, flush=True)
            if time.perf_counter() - began > 60 * args.minutes:
                break
    loads = [result["load"] for result in done]
    table = {kind: [result for result in done if result["kind"] == kind] for kind in KINDS}
    rows_of_table = []
    for kind, results in table.items():
        taken = {text for result in results for text in result["choices"]}
        refused = [text for result in results for text in result["refusals"]]
        rows_of_table.append(
            {
                "kind": kind,
                "starts": len(results),
                "resumes": len(results),
                "by_command": 2 * sum(result["by_command"] for result in results),
                "choices": len(taken),
                "refusals": len(refused),
                "changed": sum(result["changed"] for result in results),
                "choice": "; ".join(sorted(taken)),
                "errors": "; ".join(refused),
            }
        )
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
            f"{count} busy processes of this benchmark and {args.jobs} runs at a time; "
            f"{time.perf_counter() - began:.0f} s in all. "
            f"Chosen: {rows_of_table[0]['choice']}"
        ],
    )


if __name__ == "__main__":
    main()
