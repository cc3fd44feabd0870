"""The training loop: steps, evaluations, checkpoints and events; the same for every session."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.train import events
from ondevice.train.history import RunResult
from ondevice.train.lock import RunLock
from ondevice.train.log import Sink
from ondevice.train.run import BatchSource, EvaluateFn, Run
from ondevice.train.schedule import constant
from ondevice.train.stop import StopRequest

if TYPE_CHECKING:
    from ondevice.methods.session import Session

__all__ = ["BatchSource", "EvaluateFn", "RunResult", "StopRequest", "run_loop"]


def run_loop(
    session: Session,
    batches: BatchSource,
    *,
    start: events.Start,
    steps: int,
    learning_rate: float | Callable[[int], float],
    out: Path,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_every: int = 100,
    eval_every: int = 0,
    evaluate_fn: EvaluateFn | None = None,
    sinks: Iterable[Sink] = (),
    stop: StopRequest | None = None,
) -> RunResult:
    """Train, or go on training, until `steps` steps are done.

    A resumed run gives the bits of one that was never stopped. On SIGINT, SIGTERM or SIGHUP the running step
    ends, a checkpoint is saved, and the result says `interrupted`; a second signal raises KeyboardInterrupt.

    Args:
        start: the head of the log. Its `identity`, seed and model hash must be those of the run that is
            resumed; its backend and steps are set here.
        learning_rate: a number, or a pure function of the step (`schedule.py`).
        out: the run's folder, made if need be.
        resume: go on from the newest intact checkpoint in `out`, or begin if there is none.
        overwrite: delete the run that is in `out` and begin.
        checkpoint_every: steps between two checkpoints; the end and a best evaluation save one too.
        eval_every: steps between two evaluations; 0 for only one, at the end. Nothing without `evaluate_fn`.
        sinks: called with every event.
        stop: lets another thread stop the run.

    Raises:
        BusyError: another run holds `out`.
        CheckpointError: `out` has a run and neither `resume` nor `overwrite` is set; or the run is another
            one; or no checkpoint is whole.
        TrainingError: the loss or a projected gradient is not a finite number; checkpoints stay.
        StorageError: the disk is full; the last checkpoint is intact.
    """
    rate_at = learning_rate if callable(learning_rate) else constant(learning_rate)
    start = replace(start, backend=session.backend, steps=steps)
    stop = stop if stop is not None else StopRequest()
    with RunLock(out), stop:
        run = Run(session, start, out, steps, stop, evaluate_fn, eval_every, checkpoint_every)
        first = run.open(resume, overwrite, sinks)
        with run.log:
            try:
                return run.train(batches, rate_at, first)
            except Exception as error:
                run.failed(error)
                raise
            finally:
                run.end_saving()
