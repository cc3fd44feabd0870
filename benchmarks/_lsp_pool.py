"""Runs of `lsp_quality` in this process, one after the other and timed, or several at a time in processes of their own.

Small models leave a GPU idle between launches, so runs beside each other end sooner; their seconds say nothing and are
left out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks._lsp_run import before_training, train

HERE: dict[str, Any] = {}
"""Of a process: what all its runs begin with."""


class Job(NamedTuple):
    task: str
    method: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.task} {self.method} {self.rate:g} seed {self.seed}"


def load(args: Any) -> dict[str, Any]:
    """The model, the tasks, and each task's figures before training."""
    from benchmarks.lsp_quality import Task
    from ondevice.api.opening import resolve_device
    from ondevice.data import pad_id_of
    from ondevice.models import load_model

    device = torch.device(resolve_device(args.device))
    half = args.precision == "bfloat16" or (args.precision == "auto" and device.type == "cuda")
    base = load_model(args.model, dtype="float32")
    names = args.tasks.split(",")
    tasks = {name: Task(name, args.data, base.tokenizer, args.eval_rows) for name in names}
    counts = [int(number) for number in args.steps.split(",")] * (1 if "," in args.steps else len(names))
    pad_id = pad_id_of(base.tokenizer)
    return {
        "device": device, "half": half, "base": base, "tasks": tasks, "steps": dict(zip(names, counts, strict=True)),
        "before": {name: before_training(task, base, pad_id, device, half) for name, task in tasks.items()},
    }  # fmt: skip


def work(here: dict[str, Any], args: Any, job: Job) -> dict[str, Any]:
    """One run."""
    task, before, steps = (here[key][job.task] for key in ("tasks", "before", "steps"))
    place = (here["device"], here["half"])
    run = train(args, task, here["base"], before, job.method, job.rate, job.seed, steps, *place)
    gc.collect()
    if here["device"].type == "cuda":
        torch.cuda.empty_cache()
    return run


class Runner:
    """Runs of jobs; a context, since its processes end with it.

    Args:
        here: what `load` gave in this process.
    """

    def __init__(self, args: Any, here: dict[str, Any]) -> None:
        self.args, self.here, self.started, self.missing = args, here, time.perf_counter(), list[Job]()
        self.pool: ProcessPoolExecutor | None = None
        if args.workers > 1:
            self.pool = ProcessPoolExecutor(args.workers, get_context("spawn"), _begin, (args,))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def late(self) -> bool:
        return time.perf_counter() - self.started > self.args.time_budget_s

    def run(self, jobs: list[Job]) -> Iterator[dict[str, Any]]:
        """Their results as they end; jobs that begin too late are `missing`."""
        if self.pool is None:
            for job in jobs:
                if self.late():
                    self.missing.append(job)
                else:
                    yield work(self.here, self.args, job)
            return
        left = max(0.0, self.started + self.args.time_budget_s - time.perf_counter())
        ends = time.time() + min(left, 1e9)
        tasks = {self.pool.submit(_work, job, ends): job for job in jobs}
        for done in as_completed(tasks):
            run = done.result()
            if run is None:
                self.missing.append(tasks[done])
            else:
                yield run | {"step_s": None, "look_s": None, "seconds": None}


def _begin(args: Any) -> None:
    torch.set_num_threads(1)
    HERE.update(args=args, **load(args))


def _work(job: Job, ends: float) -> dict[str, Any] | None:
    return None if time.time() > ends else work(HERE, HERE["args"], job)
