"""The benchmark of the defaults: its order, the end of its time, and what it says of a method."""

from __future__ import annotations

import os
import time
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.training.defaults import default_of, jobs_of, run, table

ARGS: dict[str, Any] = {"methods": "mesp,mezo", "sets": "sst2,chat", "seeds": 2, "steps": 60, "zeroth_steps": 500,
                        "variants": "mezo loss=auto", "device": "cpu", "processes": 1}  # fmt: skip


def test_every_method_has_a_first_seed_before_one_has_a_second() -> None:
    jobs = jobs_of(SimpleNamespace(**ARGS))
    assert [job.method for job in jobs[:2]] == ["", ""] and len(jobs) == len(set(jobs)) == 2 + 8 + 4
    assert [(job.method, job.seed, job.steps) for job in jobs[2:10]] == [
        *[("mezo", 0, 500)] * 2, *[("mesp", 0, 60)] * 2, *[("mezo", 1, 500)] * 2, *[("mesp", 1, 60)] * 2,
    ]  # fmt: skip
    assert all(job.settings == "loss=auto" for job in jobs[10:])


def test_runs_are_ended_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "alpaca").mkdir()
    os.mkfifo(
        tmp_path / "alpaca" / "train.jsonl"
    )  # nobody writes: a run that reads it never ends by itself
    before, began = set(active_children()), time.monotonic()
    args = SimpleNamespace(**ARGS | {"sets": "chat"}, data=tmp_path, budget_s=1.0)
    assert list(run(jobs_of(args), args)) == [] and time.monotonic() - began < 60
    for process in set(active_children()) - before:
        deadline = (
            time.monotonic() + 60
        )  # another thread waits for it too, and only one of two hears that it ended
        while process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not process.is_alive()


def test_a_method_counts_as_learning_if_every_seed_learns() -> None:
    def record(method: str, seed: int, accuracy: float, loss: float) -> dict[str, Any]:
        settings = default_of(method) if method else ""
        return {"set": "sst2", "method": method, "steps": 60, "settings": settings, "seed": seed, "accuracy": accuracy,
                "loss": loss}  # fmt: skip

    start = record("", 0, 0.5, 8.0)
    good, bad = (
        [record("mesp", n, 0.8, 1.0) for n in (1, 0)],
        [record("full", n, 0.5 + n / 9, 1.0) for n in (0, 1)],
    )
    rows = {
        row["method"]: row
        for row in table([*good, *bad, start, start | {"method": "lsp", "error": "no memory"}])
    }
    assert rows.keys() == {"mesp", "full"}
    assert (
        rows["mesp"]["learns"] == "yes"
        and rows["full"]["learns"] == "no"
        and rows["mesp"]["seeds"] == [0, 1]
    )
