"""The training loop: steps, evaluations, checkpoints and events; the same for every session."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ondevice.artifact.files import not_finite, sha256_file
from ondevice.core.errors import CheckpointError, OndeviceError, StorageError, TrainingError
from ondevice.core.session import AddsToCheckpoint, HoldsState, Packing, Preparing, Scoring, require
from ondevice.training import events
from ondevice.training.checkpoint import CheckpointStore, RunLock
from ondevice.training.events import FILE_NAME, EventLog, read_log
from ondevice.training.identity import identity_of
from ondevice.training.metrics import PeakMemory, RunHistory, RunResult
from ondevice.training.options import Callbacks, Options
from ondevice.training.resume import restore

if TYPE_CHECKING:
    from ondevice.core.config import TrainConfig
    from ondevice.core.session import Session
    from ondevice.data import Batch
    from ondevice.training.evaluate import EvalResult
    from ondevice.training.policy import Policy
    from ondevice.training.preferences import Preferences

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


FIRST_SHARE = 0.2
"""The first checkpoint of a run by time comes after this share of `checkpoint_minutes`."""

SAVING_SHARE = 0.05
"""Most of a run's time that checkpoints by time take."""


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


def check_no_run(out: Path, store: CheckpointStore) -> None:
    """Refuse a folder that holds a run with CheckpointError."""
    if store.paths() or read_log(out / FILE_NAME).intact_bytes:
        raise CheckpointError(
            f"{out} already holds a run",
            hint="`--resume` goes on with it, `--overwrite` deletes it, `--out` names another folder",
        )


@dataclass
class Run:
    """A run on its way from its first step, or from its newest checkpoint, to its last.

    Attributes:
        start: the head of the log. Its `identity`, seed and model hash must be those of a run that is resumed.
        settings: of the loop; `steps`, not `epochs`, says how long.
        rate_at: the learning rate of a step, a pure function (`schedule.py`).
        evaluate_fn: evaluates the held-out rows; None if there are none.
        score: of the session's weights as they are, on the rows of a step, instead of the loss.
        preferences: what the run learns from, if its rows are preferences or its answers have rewards.
        stop: lets another thread stop the run.
        clock: seconds, for checkpoints by time.
    """

    session: Session
    settings: TrainConfig
    start: events.Start
    rate_at: Callable[[int], float]
    options: Options = field(default_factory=Options)
    evaluate_fn: EvaluateFn | None = None
    score: Callable[[int], float] | None = None
    preferences: Preferences | Policy | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.start = replace(self.start, backend=self.session.backend, steps=self.settings.steps)
        self.identity = identity_of(self.start)
        self.store = CheckpointStore(
            self.settings.out, self.identity, seed=self.start.seed, backend=self.start.backend
        )
        self.callbacks: Callbacks | None = None
        self.memory = PeakMemory()
        self.history = RunHistory()
        self.done = 0
        self.saved: Path | None = None
        self.saving: tuple[threading.Thread, Saving] | None = None
        self.saved_at_s = 0.0  # when the last checkpoint began, by `clock`
        self.save_time_s = 0.0  # how long it took
        self.evaluation: EvalResult | None = None
        self.best_evaluation: EvalResult | None = None
        self.evaluated: set[int] = set()
        self.without_better = 0  # evaluations since the best one
        self.log: EventLog

    def train(self, batches: BatchSource) -> RunResult:
        """Train, or go on training, until the run's steps are done.

        A resumed run gives the bits of one that was never stopped. On SIGINT, SIGTERM or SIGHUP the running step
        ends, a checkpoint is saved, and the result says `interrupted`; a second signal raises KeyboardInterrupt.

        Raises:
            BusyError: another run holds the folder.
            CheckpointError: the folder has a run and neither `resume` nor `overwrite` is set; or the run is another
                one; or no checkpoint is intact.
            TrainingError: the loss or a projected gradient is not a finite number; checkpoints stay.
            StorageError: the disk is full; the last checkpoint is intact.
        """
        with RunLock(self.settings.out), self.stop:
            if self.options.callbacks:
                self.callbacks = Callbacks(self.options.callbacks, self.stop.request)
            self._open()
            with self.log:
                try:
                    return self._steps(batches)
                except Exception as error:
                    self._failed(error)
                    raise
                finally:  # wait for a checkpoint that is being written, whatever happened
                    if self.saving is not None:
                        self.saving[0].join()

    def _open(self) -> None:
        """Begin in an empty folder, or restore the run that is in it."""
        path = self.settings.out / FILE_NAME
        options = self.options
        settings = self.settings
        if not options.resume and not options.overwrite:
            check_no_run(settings.out, self.store)
        warnings: list[str] = []
        first: events.Event = self.start
        if self.preferences is not None:
            resumes = options.resume and not options.overwrite
            self.preferences.begin(self.session, settings.out, resumes, self.stop)
        if options.resume and not options.overwrite:
            found = restore(self.store, self.session, self.start, settings, warnings)
            self.done, self.saved, self.history = found.done, found.saved, found.history
            self.evaluated, self.without_better = found.evaluated, found.without_better
            if found.has_start:
                first = events.Resume(
                    step=self.done,
                    steps=settings.steps,
                    backend=self.session.backend,
                    checkpoint=found.saved.name if found.saved else "",
                    changed=found.changed,
                )
        else:
            self.store.clear()
            path.unlink(missing_ok=True)
        self.log = EventLog(path, (self.history.add, *options.sinks))
        self.log.write(first)
        for message in warnings:
            self.log.write(events.Warning(message=message, step=self.done))

    def _steps(self, batches: BatchSource) -> RunResult:
        """Run the steps that are left, and return the result of the whole run."""
        steps = self.settings.steps
        self.saved_at_s = self.clock()
        if self.done and self._due():  # a stop skipped the evaluation that was due
            self._evaluate_and_save(save=False)
        for step in range(self.done, steps):
            if self.stop or self._hopeless():
                break
            self._prepare(step, batches)
            self._step(step, batches.at(step), self.rate_at(step))
            self._collect_save(wait=False)
            by_steps = self.done == steps or self.done % self.settings.checkpoint_every == 0
            self._evaluate_and_save(save=by_steps or self._save_is_due())
        self._collect_save()
        early = self.done < steps and self._hopeless()
        if self.stop:
            # Save where the run stands, unless the last checkpoint is of this very step.
            if self.done and (
                self.saved is None or not self.saved.name.endswith(f"-{self.done:08d}")
            ):
                self._save(None)
                self._collect_save()
            self.log.write(events.Interrupt(step=self.done, signal=self.stop.reason))
        else:
            why = ""
            if early:
                why = f"stopped early: {self.without_better} evaluations without a better one"
            self.log.write(events.Finish(steps=self.done, **self.history.figures(), reason=why))
        self.log.sync()
        best_score, best_checkpoint = self.store.best() or (None, None)
        return RunResult(
            steps=self.done,
            **self.history.figures(),
            peak_device_bytes=self.history.peak_device_bytes,
            overlap=self.history.overlap,
            experts=self.history.experts,
            evaluation=self.evaluation,
            best_evaluation=self.best_evaluation,
            best_score=best_score,
            best_checkpoint=best_checkpoint,
            checkpoint=self.saved,
            interrupted=bool(self.stop),
            signal=self.stop.reason,
            stopped_early=early and not self.stop,
            raised=None if self.callbacks is None else self.callbacks.raised,
        )

    def _hopeless(self) -> bool:
        """Return True if the last evaluations were no better than the best, as often as the run's patience allows."""
        patience = self.settings.patience
        return patience is not None and self.without_better >= patience

    def _failed(self, error: Exception) -> None:
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

    def _prepare(self, step: int, batches: BatchSource) -> None:
        """Let a session prepare the step, and log the file that a replay needs."""
        if not isinstance(self.session, Preparing):
            return
        path = self.session.before_step(step, batches.at, self.settings.out)
        if path is not None:
            self.log.write(events.Prepare(step=step, path=path.name, sha256=sha256_file(path)))

    def _step(self, step: int, batch: Batch, learning_rate: float) -> None:
        began = time.perf_counter()
        ids, labels, position_ids = batch.ids, batch.labels, batch.position_ids
        figures = None
        if self.score is not None:
            session = require(self.session, Scoring)
            result = session.score_step(partial(self.score, step), step, learning_rate)
        elif self.preferences is not None:
            result, figures = self.preferences.step(self.session, batch, step, learning_rate)
        elif position_ids is not None:
            session = require(self.session, Packing)
            result = session.packed_step(ids, labels, position_ids, step, learning_rate)
        else:
            result = self.session.step(ids, labels, step, learning_rate)
        seconds = time.perf_counter() - began
        self._check_finite(("loss", result.loss), step, learning_rate)
        for gradient in result.projected_gradients:
            self._check_finite(("projected gradient", gradient), step, learning_rate)
        tokens = int(batch.ids.size)
        if figures is not None and "tokens" in figures:  # of texts that the step wrote
            tokens = int(figures.pop("tokens"))
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
            eta_s=self.history.eta_s(seconds, self.settings.steps - step - 1),
            overlap=result.overlap,
            experts=result.experts,
            preferences=figures,
        )
        self.log.write(event)
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
        name = not_finite(state)
        if name is not None:
            raise self._not_finite(
                f"step {self.done - 1} left NaN or infinity in '{name}'",
                "finite parameters",
                "inf or nan",
            )

    def _not_finite(self, message: str, expected: str, received: str) -> TrainingError:
        kept = "there is no checkpoint yet"
        if self.saved:
            kept = f"the last checkpoint is {self.saved}"
        hint = "a lower learning rate; for a zeroth-order method also a smaller perturbation scale"
        return TrainingError(f"{message}; {kept}", expected=expected, received=received, hint=hint)

    def _save_is_due(self) -> bool:
        """Return True if the last checkpoint, or the beginning, is too long ago."""
        if not self.settings.checkpoint_minutes or self.saving is not None:
            return False
        interval = self.settings.checkpoint_minutes * 60
        if self.saved is None:
            interval *= FIRST_SHARE
        interval = max(interval, self.save_time_s / SAVING_SHARE)
        return self.clock() - self.saved_at_s >= interval

    def _due(self) -> bool:
        """Return True if an evaluation is due after the last step and was not done before a resume."""
        if self.evaluate_fn is None or self.done in self.evaluated:
            return False
        every = self.settings.eval_every
        return self.done == self.settings.steps or (every > 0 and self.done % every == 0)

    def _evaluate_and_save(self, save: bool) -> None:
        """Evaluate if it is due, and save a checkpoint if `save` or if the evaluation is the best so far."""
        result = None
        best = False
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
            self.without_better += 1
            if best:
                self.best_evaluation, self.without_better = result, 0
            if self.callbacks is not None:
                self.callbacks.call("on_evaluate", event)
        # The last state of a run that stops early is saved like that of any other end.
        if save or best or (result is not None and self._hopeless()):
            self._save(result)

    def _save(self, evaluation: EvalResult | None) -> None:
        """Save a checkpoint: in a thread during the next steps if the session holds its state, otherwise at once."""
        self._collect_save()  # one at a time: two would compete for the disk, and for the arrays that are held
        self.saved_at_s = self.clock()
        self.log.sync()  # first the log: a checkpoint must not be of a step that the log has lost
        state = self.session.state()
        saving = Saving(self.done, time.perf_counter())
        holds = self.session if isinstance(self.session, HoldsState) else None
        adds = self.session if isinstance(self.session, AddsToCheckpoint) else None
        values: dict[str, Any] = {}
        if evaluation is not None:
            values = {"evaluation": events.plain(evaluation.figures()), "score": evaluation.score}
        if adds:
            values["beside"] = adds.save_beside
        if holds:
            values["written"] = holds.written
            holds.hold()

        def save() -> None:
            try:
                self._check_state(state)
                saving.path = self.store.save(saving.step, state, **values)
            except BaseException as error:  # raised by `_saved` in the thread that trains
                saving.error = error
            if holds:
                holds.written(None)  # also after an error: the next step waits for it
            saving.end_s = time.perf_counter()

        if holds is None:
            save()
            self._saved(saving)
            return
        thread = threading.Thread(target=save, name="ondevice-checkpoint")
        thread.start()
        self.saving = (thread, saving)

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
        self.save_time_s = saving.end_s - saving.began_s
        size = sum(file.stat().st_size for file in saving.path.rglob("*") if file.is_file())
        event = events.Checkpoint(
            step=saving.step,
            path=saving.path.name,
            size_bytes=size,
            seconds_s=self.save_time_s,
        )
        self.log.write(event)
        if self.callbacks is not None:
            self.callbacks.call("on_checkpoint", event)
