"""One run of `lsp_quality`: a method on a task with a rate and a seed, timed and evaluated."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks._lsp_methods import LENGTHS, Lsp, Trained, gradient_bytes, nbytes, open_method
from benchmarks._lsp_report import BASE
from ondevice.data import Batches, pad_id_of
from ondevice.offload.lsp.config import ProjectorConfig
from ondevice.train.evaluate import evaluate_dataset

if TYPE_CHECKING:
    from benchmarks.lsp_quality import Task

CURVES = ("evaluated_at", "losses", "accuracies", "seconds", "train_losses")
OTHER_SEED = 1000
"""Added to a run's seed: the order of the batches on which projectors are judged."""


class Stopwatch:
    """Seconds that are counted until `stop`, and again from `start`, with what the device still has to do."""

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
    """Validation loss, nats an answer token, and accuracy, None where there is nothing to choose."""
    found = evaluate_dataset(run, task.valid, pad_id, batch_size=128 if run.device.type == "cuda" else 16)
    assert found is not None
    return found.loss, found.accuracy


def before_training(task: Task, base: Any, pad_id: int, device: torch.device, half: bool) -> dict[str, Any]:
    """The base model's figures, as a run of no steps; they begin the curves of every run. A backward pass, too, so that
    no run pays for what a device does once."""
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
    """One run: its curves (CURVES, `train_losses` the means between evaluations), seconds of a step, `look_s` those
    of the backward passes and updates with a look or a decomposition, and bytes.

    It ends where the training loss is no number; that is asked before looks, decompositions and evaluations.
    """
    pad_id, every = pad_id_of(base.tokenizer), args.eval_every
    sizes = {"subspace": args.subspace, "nonzeros": args.nonzeros, "check_every": args.check_every}
    projectors = ProjectorConfig(**sizes, threshold=args.threshold)
    run = Trained(base, device, half)
    optimizer = open_method(method, run, seed, projectors, args.rank, args.refresh)
    batches, others = (Batches(task.train, args.batch_size, LENGTHS, s, pad_id) for s in (seed, seed + OTHER_SEED))
    result = before | {"method": method, "learning_rate": rate, "seed": seed} | {key: [*before[key]] for key in CURVES}
    total, gradients, done, watch, look_s = torch.zeros((), device=device), 0, 0, Stopwatch(device), list[float]()
    for step in range(steps):
        loss = run.loss(batches.at(step))
        total += loss.detach()
        at_end = (step + 1) % every == 0 or step + 1 == steps
        long = step % args.check_every == 0 or step % args.refresh == 0
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
    return result | {"memory_bytes": state + gradients, "state_bytes": state, "gradient_bytes": gradients}
