"""The training loop: steps, evaluations, checkpoints and events; the same for every session."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ondevice.artifact.files import sha256_file
from ondevice.core.errors import CheckpointError, OndeviceError, StorageError, TrainingError
from ondevice.training import events
from ondevice.training.callbacks import Callback, Callbacks
from ondevice.training.checkpoint import CheckpointStore, RunLock
from ondevice.training.events import FILE_NAME, EventLog, LogContent, Sink, read_log
from ondevice.training.metrics import History, PeakMemory, RunResult
from ondevice.training.schedule import constant

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.data import Batch
    from ondevice.training.evaluate import EvalResult

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class StopRequest:
    """A request to stop the run, by a signal or by `request`; True once there is one. A context manager.

    Signals are taken only in the main thread, only while open, and not those that the process was started to
    ignore (`nohup`). The second signal raises KeyboardInterrupt where the program is.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._before: dict[int, Any] = {}

    def request(self, reason: str = "request") -> None:
        """Stop after the running step; another thread may call this."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __call__(self) -> bool:
        """Return True once the run shall stop; for `should_stop` callbacks."""
        return bool(self.reason)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.reason:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)


EvaluateFn = Callable[[Callable[[], bool]], "EvalResult | None"]
"""Takes `should_stop`; returns the figures, or None if the evaluation was abandoned."""


class BatchSource(Protocol):
    """Data by step number (`ondevice.data.Batches`); a pure function, so it has no state to save."""

    def at(self, step: int) -> Batch:
        """Return the batch of step `step`: `ids` and `labels`, int64 [batch_size, length_tokens]."""
        ...


@dataclass
class Saving:
    """A checkpoint that is being written; seconds of `time.perf_counter`."""

    step: int
    began_s: float
    end_s: float = 0.0
    path: Path = Path()
    error: BaseException | None = None


@dataclass
class Run:
    """The state of one call of `run_loop`."""

    session: Session
    start: events.Start
    out: Path
    steps: int
    stop: StopRequest
    evaluate_fn: EvaluateFn | None
    eval_every: int
    checkpoint_every: int
    patience: int | None = None
    callbacks: Callbacks | None = None
    score: Callable[[int], float] | None = None
    accept_changes: bool = False

    def __post_init__(self) -> None:
        self.identity = identity_of(self.start)
        self.store = CheckpointStore(
            self.out, self.identity, seed=self.start.seed, backend=self.start.backend
        )
        self.memory = PeakMemory()
        self.history = History()
        self.done = 0
        self.saved: Path | None = None
        self.saving: tuple[threading.Thread, Saving] | None = None
        self.evaluation: EvalResult | None = None
        self.best_evaluation: EvalResult | None = None
        self.evaluated: set[int] = set()
        self.without_better = 0  # evaluations since the best one
        self.changed: dict[str, Any] = {}
        self.log: EventLog

    def open(self, resume: bool, overwrite: bool, sinks: Iterable[Sink]) -> int:
        """Begin in an empty folder, or restore the run that is in it; return the first step to run."""
        path = self.out / FILE_NAME
        if not resume and not overwrite and (self.store.paths() or read_log(path).intact_bytes):
            raise CheckpointError(
                f"{self.out} already holds a run",
                hint="`--resume` goes on with it, `--overwrite` deletes it, `train.out` names another folder",
            )
        warnings: list[str] = []
        content, name = LogContent(), ""
        if resume and not overwrite:
            from ondevice.training.resume import restore  # it is built on this module

            content, name = restore(self, path, warnings)
        else:
            self.store.clear()
            path.unlink(missing_ok=True)
        self.log = EventLog(path, sinks)
        if content.start is None:
            self.log.write(self.start)
        else:
            self.log.write(
                events.Resume(
                    step=self.done,
                    steps=self.steps,
                    backend=self.session.backend,
                    checkpoint=name,
                    changed=self.changed,
                )
            )
        for message in warnings:
            self.log.write(events.Warning(message=message, step=self.done))
        return self.done

    def train(self, batches: BatchSource, rate_at: Callable[[int], float], first: int) -> RunResult:
        """Run steps `first` to `self.steps - 1`, and return the result of the whole run."""
        if first and self._due():  # a stop skipped the evaluation that was due
            self._evaluate_and_save(save=False)
        for step in range(first, self.steps):
            if self.stop or self._hopeless():
                break
            prepared = self.session.before_step(step, batches.at, self.out)
            if prepared is not None:
                self.log.write(
                    events.Prepare(step=step, path=prepared.name, sha256=sha256_file(prepared))
                )
            self._step(step, batches.at(step), rate_at(step))
            self._collect_save(wait=False)
            last = self.done == self.steps
            self._evaluate_and_save(save=last or self.done % self.checkpoint_every == 0)
        self._collect_save()
        early = self.done < self.steps and self._hopeless()
        if self.stop:
            # Save where the run stands, unless the last checkpoint is of this very step.
            if self.done and (
                self.saved is None or not self.saved.name.endswith(f"-{self.done:08d}")
            ):
                self._save(None)
                self._collect_save()
            self.log.write(events.Interrupt(step=self.done, signal=self.stop.reason))
        else:
            why = (
                f"stopped early: {self.without_better} evaluations without a better one"
                if early
                else ""
            )
            self.log.write(events.Finish(steps=self.done, **self.history.figures(), reason=why))
        self.log.sync()
        best, history = self.store.best(), self.history
        return RunResult(
            steps=self.done,
            **history.figures(),
            peak_device_bytes=history.peak_device_bytes,
            overlap=history.overlap,
            evaluation=self.evaluation,
            best_evaluation=self.best_evaluation,
            best_score=best[0] if best else None,
            best_checkpoint=best[1] if best else None,
            checkpoint=self.saved,
            interrupted=bool(self.stop),
            signal=self.stop.reason,
            stopped_early=early and not self.stop,
            raised=None if self.callbacks is None else self.callbacks.raised,
        )

    def _hopeless(self) -> bool:
        """Return True if the last evaluations were no better than the best, as often as the run's patience allows."""
        return self.patience is not None and self.without_better >= self.patience

    def failed(self, error: Exception) -> None:
        """Write the error into the log, if the disk still takes it."""
        if isinstance(error, OndeviceError):
            values = error.to_dict()
        else:
            values = {"error": type(error).__name__, "message": str(error)}
        try:
            self.log.write(events.Error(step=self.done, error=values))
            self.log.sync()
        except StorageError:  # the error that is being raised is the one to report, not this one
            pass

    def _step(self, step: int, batch: Batch, learning_rate: float) -> None:
        began = time.perf_counter()
        if self.score is None and batch.position_ids is not None:
            result = self.session.packed_step(
                batch.ids, batch.labels, batch.position_ids, step, learning_rate
            )
        elif self.score is None:
            result = self.session.step(batch.ids, batch.labels, step, learning_rate)
        else:
            result = self.session.score_step(partial(self.score, step), step, learning_rate)
        seconds = time.perf_counter() - began
        self._check_finite(("loss", result.loss), step, learning_rate)
        for gradient in result.projected_gradients:
            self._check_finite(("projected gradient", gradient), step, learning_rate)
        tokens = int(batch.ids.size)
        event = events.Step(
            step=step,
            loss=float(result.loss),
            losses=tuple(float(loss) for loss in result.losses),
            projected_gradients=tuple(float(gradient) for gradient in result.projected_gradients),
            learning_rate=float(learning_rate),
            tokens=tokens,
            step_time_s=seconds,
            tokens_per_s=tokens / seconds,
            peak_memory_bytes=max(self.memory.resident_bytes(), self.history.peak_memory_bytes),
            peak_device_bytes=self.memory.device_bytes(),
            eta_s=self.history.eta_s(seconds, self.steps - step - 1),
            overlap=result.overlap,
        )
        self.log.write(event)
        self.history.add(event)
        self.done = step + 1
        if self.callbacks is not None:
            self.callbacks.call("on_step", event)

    def _check_finite(self, named: tuple[str, float], step: int, learning_rate: float) -> None:
        name, value = named
        if not math.isfinite(value):
            raise self._not_finite(
                f"the {name} of step {step} is {value}",
                "a finite number",
                f"{value} at learning rate {learning_rate:g}",
            )

    def _check_state(self, state: dict[str, np.ndarray]) -> None:
        """Refuse to save parameters that the last step made infinite or not a number.

        The loss is of the parameters before the step, so it does not show them; a checkpoint of them would replace
        the last good one.
        """
        for name, value in state.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise self._not_finite(
                    f"step {self.done - 1} left values in '{name}' that are no numbers",
                    "finite parameters",
                    "inf or nan",
                )

    def _not_finite(self, message: str, expected: str, received: str) -> TrainingError:
        kept = (
            f"the last checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"
        )
        hint = "a lower learning rate; for a zeroth-order method also a smaller perturbation scale"
        return TrainingError(f"{message}; {kept}", expected=expected, received=received, hint=hint)

    def _due(self) -> bool:
        """Return True if an evaluation is due after the last step and was not done before a resume."""
        if self.evaluate_fn is None or self.done in self.evaluated:
            return False
        return self.done == self.steps or (self.eval_every > 0 and self.done % self.eval_every == 0)

    def _evaluate_and_save(self, save: bool) -> None:
        """Evaluate if it is due, and save a checkpoint if `save` or if the evaluation is the best so far."""
        result, best = None, False
        if self.evaluate_fn is not None and self._due() and not self.stop:
            result = self.evaluate_fn(self.stop)
        if result is not None:
            before = self.store.best()
            best = before is None or result.score > before[0]
            figures = result.figures()
            figures.pop("tokens")
            event = events.Evaluate(step=self.done, best=best, **figures)
            self.log.write(event)
            self.evaluated.add(self.done)
            self.evaluation = result
            self.best_evaluation = result if best else self.best_evaluation
            self.without_better = 0 if best else self.without_better + 1
            if self.callbacks is not None:
                self.callbacks.call("on_evaluate", event)
        # The last state of a run that stops early is saved like that of any other end.
        if save or best or (result is not None and self._hopeless()):
            self._save(result)

    def _save(self, evaluation: EvalResult | None) -> None:
        """Save a checkpoint: in a thread beside the next steps, where the session holds unwritten arrays as they are.

        A session that does not (`saves_beside`) is saved at once.
        """
        self._collect_save()  # one at a time: two would compete for the disk, and for the arrays that are held
        self.log.sync()  # first the log: a checkpoint must not be of a step that the log has lost
        state = self.session.state()
        saving = Saving(self.done, time.perf_counter())
        beside = self.session.saves_beside
        if beside:
            self.session.hold()

        def save() -> None:
            try:
                self._check_state(state)
                saving.path = self.store.save(
                    saving.step,
                    state,
                    evaluation=None if evaluation is None else events.plain(evaluation.figures()),
                    score=None if evaluation is None else evaluation.score,
                    written=self.session.written if beside else None,
                    beside=self.session.save_beside,
                )
            except BaseException as error:  # raised by `_saved` in the thread that trains
                saving.error = error
            if beside:
                self.session.written(None)  # also after an error: the next step waits for it
            saving.end_s = time.perf_counter()

        if not beside:
            save()
            self._saved(saving)
            return
        thread = threading.Thread(target=save, name="ondevice-checkpoint")
        thread.start()
        self.saving = (thread, saving)

    def end_saving(self) -> None:
        """Wait for a checkpoint that is being written, whatever happened since."""
        if self.saving is not None:
            self.saving[0].join()

    def _collect_save(self, wait: bool = True) -> None:
        """Log the checkpoint that a thread has written, and raise its error; with `wait`, join a running thread."""
        if self.saving is None or not (wait or not self.saving[0].is_alive()):
            return
        (thread, saving), self.saving = self.saving, None
        thread.join()
        self._saved(saving)

    def _saved(self, saving: Saving) -> None:
        if saving.error is not None:
            raise saving.error
        self.saved = saving.path
        size = sum(file.stat().st_size for file in saving.path.rglob("*") if file.is_file())
        event = events.Checkpoint(
            step=saving.step,
            path=saving.path.name,
            size_bytes=size,
            seconds_s=saving.end_s - saving.began_s,
        )
        self.log.write(event)
        if self.callbacks is not None:
            self.callbacks.call("on_checkpoint", event)


def identity_of(start: events.Start) -> dict[str, Any]:
    """Return the settings that a resume must have in common with the run, as JSON values."""
    return events.plain({"model": start.model_sha256, "seed": start.seed, **start.identity})


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
    accept_changes: bool = False,
    checkpoint_every: int = 100,
    eval_every: int = 0,
    evaluate_fn: EvaluateFn | None = None,
    sinks: Iterable[Sink] = (),
    stop: StopRequest | None = None,
    patience: int | None = None,
    callbacks: Iterable[Callback] = (),
    score: Callable[[int], float] | None = None,
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
        accept_changes: go on although the rows, the chat template or the tokenizer changed.
        checkpoint_every: steps between two checkpoints; the end and a best evaluation save one too.
        eval_every: steps between two evaluations; 0 for only one, at the end. Nothing without `evaluate_fn`.
        sinks: called with every event.
        stop: lets another thread stop the run.
        patience: end after so many evaluations without a better one.
        callbacks: called as the run goes; one that raises ends it like a signal, and `RunResult.raised` has the error.
        score: of the session's weights as they are, on the rows of a step, in place of the loss.

    Raises:
        BusyError: another run holds `out`.
        CheckpointError: `out` has a run and neither `resume` nor `overwrite` is set; or the run is another
            one; or no checkpoint is whole.
        TrainingError: the loss or a projected gradient is not a finite number; checkpoints stay.
        StorageError: the disk is full; the last checkpoint is intact.
    """
    rate_at = learning_rate if callable(learning_rate) else constant(learning_rate)
    start = replace(start, backend=session.backend, steps=steps)
    # `is not None`: a StopRequest that nobody has used yet is false.
    stop = stop if stop is not None else StopRequest()
    with RunLock(out), stop:
        given = tuple(callbacks)
        called = Callbacks(given, stop) if given else None
        run = Run(
            session, start, out, steps, stop, evaluate_fn, eval_every, checkpoint_every, patience, called, score,
            accept_changes,
        )  # fmt: skip
        first = run.open(resume, overwrite, sinks)
        with run.log:
            try:
                return run.train(batches, rate_at, first)
            except Exception as error:
                run.failed(error)
                raise
            finally:
                run.end_saving()
