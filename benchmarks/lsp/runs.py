"""Runs of `benchmarks.lsp.quality`: a method on a task with a rate and a seed, trained and
evaluated.

They run in this process, one after the other and timed, or several at a time in processes of their
own: small models leave a GPU idle between launches, so runs next to each other end sooner, but
their seconds say nothing and are left out.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks.lsp.methods import Lsp, Trained, gradient_bytes, looks_every, nbytes, open_method
from benchmarks.lsp.report import BASE
from benchmarks.tasks import LENGTHS, Task
from ondevice.data import Batches, pad_id_of
from ondevice.methods.lsp.config import ProjectorConfig
from ondevice.training.evaluate import evaluate_dataset

CURVES = ("evaluated_at", "losses", "accuracies", "seconds", "train_losses")
OTHER_SEED = 1000
"""Added to a run's seed: the order of the batches on which projectors are judged."""


class Stopwatch:
    """Seconds that are counted until `stop`, and again from `start`, with what the device still has
    to do."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0
        self.start()

    def start(self) -> None:
        self._wait()
        self.since = time.perf_counter()

    def stop(self) -> None:
        self._wait()
        self.seconds += time.perf_counter() - self.since

    def read(self) -> float:
        self.stop()
        self.start()
        return self.seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def evaluate(run: Any, task: Task, pad_id: int) -> tuple[float, float | None]:
    """Validation loss, nats an answer token, and accuracy, None if there is nothing to choose."""
    evaluation = evaluate_dataset(
        run, task.valid, pad_id, batch_size=128 if run.device.type == "cuda" else 16
    )
    assert evaluation is not None
    return evaluation.loss, evaluation.accuracy


def before_training(
    task: Task, base: Any, pad_id: int, device: torch.device, half: bool
) -> dict[str, Any]:
    """The base model's figures, as a run of no steps; they begin the curves of every run. A
    backward pass, too, so that no run pays for what a device does once."""
    run = Trained(base, device, half)
    loss, accuracy = evaluate(run, task, pad_id)
    run.model.requires_grad_(True)
    run.loss(Batches(task.train, 1, LENGTHS, 0, pad_id).at(0)).backward()
    return {
        "task": task.name, "method": BASE, "learning_rate": None, "seed": None, "evaluated_at": [0], "losses": [loss],
        "accuracies": [accuracy], "seconds": [0.0], "train_losses": [], "diverged_at": None, "step_s": None,
        "look_s": None, "looks": None, "memory_bytes": None, "state_bytes": None, "gradient_bytes": None,
    }  # fmt: skip


def train(
    args: Any, task: Task, base: Any, before: dict[str, Any], method: str, rate: float, seed: int, steps: int,
    device: torch.device, half: bool,
) -> dict[str, Any]:  # fmt: skip
    """One run: its curves (CURVES, `train_losses` the means between evaluations), seconds of a
    step, `look_s` those of the backward passes and updates with a look or a decomposition, and
    bytes.

    It ends where the training loss is no number; that is asked before looks, decompositions and
    evaluations.
    """
    pad_id, every = pad_id_of(base.tokenizer), args.eval_every
    sizes = {"subspace": args.subspace, "nonzeros": args.nonzeros, "check_every": args.check_every}
    projectors = ProjectorConfig(**sizes, threshold=args.threshold)
    run, looks = Trained(base, device, half), looks_every(method, args.check_every)[1]
    optimizer = open_method(method, run, seed, projectors, args.rank, args.refresh)
    batches, others = (
        Batches(task.train, args.batch_size, LENGTHS, s, pad_id) for s in (seed, seed + OTHER_SEED)
    )
    result = (
        before
        | {"method": method, "learning_rate": rate, "seed": seed}
        | {key: [*before[key]] for key in CURVES}
    )
    total, gradients, done, watch, look_s = (
        torch.zeros((), device=device),
        0,
        0,
        Stopwatch(device),
        list[float](),
    )
    for step in range(steps):
        loss = run.loss(batches.at(step))
        total += loss.detach()
        at_end = (step + 1) % every == 0 or step + 1 == steps
        long = step % looks == 0 or step % args.refresh == 0
        if (at_end or long) and not math.isfinite(float(total)):
            result["diverged_at"] = step
            break
        before_s = watch.read() if long else 0.0
        loss.backward()
        if not step:
            gradients = gradient_bytes(run, optimizer)
        if isinstance(optimizer, Lsp) and optimizer.finish_look():
            watch.stop()
            batch = others.at(step)
            optimizer.held_out(lambda batch=batch: run.loss(batch).backward())
            watch.start()
        optimizer.step(rate)
        done += 1
        if not optimizer.looked and not at_end:
            continue
        watch.stop()
        if optimizer.looked:
            look_s.append(watch.seconds - before_s)
        if at_end:
            mean = float(total) / (step % every + 1)
            values = (step + 1, *evaluate(run, task, pad_id), round(watch.seconds, 3), mean)
            for name, value in zip(CURVES, values, strict=True):
                result[name].append(value)
            total.zero_()
        watch.start()
    watch.stop()
    state = nbytes(optimizer.tensors())
    result |= {"step_s": watch.seconds / done if done else None, "look_s": look_s or None}
    result |= {"looks": getattr(optimizer, "looks", None)}
    return result | {
        "memory_bytes": state + gradients,
        "state_bytes": state,
        "gradient_bytes": gradients,
    }


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
    from ondevice.models import load_model
    from ondevice.training.choices import resolve_device

    device = torch.device(resolve_device(args.device))
    half = args.precision == "bfloat16" or (args.precision == "auto" and device.type == "cuda")
    base = load_model(args.model, dtype="float32")
    names = args.tasks.split(",")
    tasks = {name: Task(name, args.data, base.tokenizer, args.eval_rows) for name in names}
    counts = [int(number) for number in args.steps.split(",")] * (
        1 if "," in args.steps else len(names)
    )
    pad_id = pad_id_of(base.tokenizer)
    before = {
        name: before_training(task, base, pad_id, device, half) for name, task in tasks.items()
    }
    _free(device)
    steps = dict(zip(names, counts, strict=True))
    return {
        "device": device,
        "half": half,
        "base": base,
        "tasks": tasks,
        "steps": steps,
        "before": before,
    }


def work(here: dict[str, Any], args: Any, job: Job) -> dict[str, Any]:
    """One run."""
    task, before, steps = (here[key][job.task] for key in ("tasks", "before", "steps"))
    place = (here["device"], here["half"])
    run = train(args, task, here["base"], before, job.method, job.rate, job.seed, steps, *place)
    _free(here["device"])
    return run


def _free(device: torch.device) -> None:
    """Give other runs the memory that this process no longer needs."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class Runner:
    """Runs of jobs; a context, since its processes end with it.

    Args:
        here: what `load` gave in this process.
    """

    def __init__(self, args: Any, here: dict[str, Any]) -> None:
        self.args, self.here, self.started, self.missing = (
            args,
            here,
            time.perf_counter(),
            list[Job](),
        )
        self.pool: ProcessPoolExecutor | None = None
        if args.workers > 1:
            context = get_context("forkserver")
            context.set_forkserver_preload([__name__])  # torch is imported once for all
            numbers = context.SimpleQueue()
            for number in range(args.workers):
                numbers.put(number)
            self.pool = ProcessPoolExecutor(args.workers, context, _begin, (args, numbers))

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


def _begin(args: Any, numbers: Any) -> None:
    """Workers take GPUs in turn, the last one first: this program's own is the first."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device((-1 - numbers.get()) % torch.cuda.device_count())
    HERE.update(args=args, **load(args))


def _work(job: Job, ends: float) -> dict[str, Any] | None:
    return None if time.time() > ends else work(HERE, HERE["args"], job)
