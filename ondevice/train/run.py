"""One run: its folder, its log, its checkpoints, and what happens at a step and after it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ondevice.errors import CheckpointError, OndeviceError, StorageError, TrainingError
from ondevice.train import events
from ondevice.train.checkpoint import CheckpointStore, check_identity
from ondevice.train.history import History, RunResult
from ondevice.train.log import FILE_NAME, EventLog, LogContent, Sink, cut_log, read_log
from ondevice.train.memory import PeakMemory
from ondevice.train.stop import StopRequest

if TYPE_CHECKING:
    from ondevice.data import Batch
    from ondevice.methods.session import Session
    from ondevice.train.evaluate import EvalResult

EvaluateFn = Callable[[Callable[[], bool]], "EvalResult | None"]
"""Takes `should_stop`, gives the figures, or None if it was told to stop."""


class BatchSource(Protocol):
    """Data by step number (`ondevice.data.Batches`); a pure function, so it has no state to save."""

    def at(self, step: int) -> Batch:
        """The batch of step `step`: `ids` and `labels`, int64 [batch_size, length_tokens]."""
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
    """One call of `run_loop`, with what its parts share."""

    session: Session
    start: events.Start
    out: Path
    steps: int
    stop: StopRequest
    evaluate_fn: EvaluateFn | None
    eval_every: int
    checkpoint_every: int

    def __post_init__(self) -> None:
        self.identity = _identity(self.start)
        self.store = CheckpointStore(self.out, self.identity, seed=self.start.seed, backend=self.start.backend)
        self.memory = PeakMemory()
        self.history = History()
        self.done = 0
        self.saved: Path | None = None
        self.saving: tuple[threading.Thread, Saving] | None = None
        self.evaluation: EvalResult | None = None
        self.evaluated: set[int] = set()
        self.log: EventLog

    def open(self, resume: bool, overwrite: bool, sinks: Iterable[Sink]) -> int:
        """Make or read the folder; gives the first step to run."""
        path, found = self.out / FILE_NAME, self.store.paths()
        if not resume and not overwrite and (found or read_log(path).intact_bytes):
            raise CheckpointError(
                f"{self.out} already holds a run",
                hint="`--resume` goes on with it, `--overwrite` deletes it, `train.out` names another folder",
            )
        warnings: list[str] = []
        content, name = LogContent(), ""
        if resume and not overwrite:
            content, name = self._restore(path, warnings)
        else:
            self.store.clear()
            path.unlink(missing_ok=True)
        self.log = EventLog(path, sinks)
        if content.start is None:
            self.log.write(self.start)
        else:
            self.log.write(
                events.Resume(step=self.done, steps=self.steps, backend=self.session.backend, checkpoint=name)
            )
        for message in warnings:
            self.log.write(events.Warning(message=message, step=self.done))
        return self.done

    def _restore(self, path: Path, warnings: list[str]) -> tuple[LogContent, str]:
        """Take the newest checkpoint into the session and cut the log back to it."""
        self.store.remove_leftovers()
        head = read_log(path).start
        if head is not None:
            check_identity(_identity(head), self.identity, f"{path}: the log")
        loaded = self.store.newest(warnings.append)
        if loaded is not None:
            self.session.load_state(loaded.state)
            self.done, self.saved = loaded.meta.step, loaded.path
            if loaded.meta.backend != self.session.backend:
                warnings.append(
                    f"the checkpoint is of {loaded.meta.backend}, this is {self.session.backend}: "
                    "the run goes on, but not with the same bits"
                )
        content = cut_log(path, self.done)
        logged = content.steps()
        if content.torn or [step.step for step in logged] != list(range(self.done)):
            warnings.append(f"{path.name} lacks steps before step {self.done}: it cannot be replayed")
        self.history = History(logged)
        kept = [entry.event for entry in content.entries]
        self.evaluated = {event.step for event in kept if isinstance(event, events.Evaluate)}
        return content, loaded.path.name if loaded else ""

    def train(self, batches: BatchSource, rate_at: Callable[[int], float], first: int) -> RunResult:
        """Run steps `first` to `self.steps - 1`."""
        if first and self._due():
            self._evaluate_and_save(save=False)
        for step in range(first, self.steps):
            if self.stop:
                break
            self._step(step, batches.at(step), rate_at(step))
            self._settle(wait=False)
            last = self.done == self.steps
            self._evaluate_and_save(save=last or self.done % self.checkpoint_every == 0)
        self._settle()
        if self.stop:
            if self.done and (self.saved is None or not self.saved.name.endswith(f"-{self.done:08d}")):
                self._save(None)
                self._settle()
            self.log.write(events.Interrupt(step=self.done, signal=self.stop.reason))
        else:
            self._finish()
        self.log.sync()
        best, history = self.store.best(), self.history
        return RunResult(
            steps=self.done,
            first_loss=history.first_loss,
            final_loss=history.final_loss,
            step_time_s=history.step_time_s,
            tokens_per_s=history.tokens_per_s,
            peak_memory_bytes=history.peak_memory_bytes,
            peak_device_bytes=history.peak_device_bytes,
            overlap=history.overlap,
            evaluation=self.evaluation,
            best_score=best[0] if best else None,
            best_checkpoint=best[1] if best else None,
            checkpoint=self.saved,
            interrupted=bool(self.stop),
            signal=self.stop.reason,
        )

    def failed(self, error: Exception) -> None:
        """Note the error in the log, if the disk still takes it."""
        if isinstance(error, OndeviceError):
            values = error.to_dict()
        else:
            values = {"error": type(error).__name__, "message": str(error)}
        try:
            self.log.write(events.Error(step=self.done, error=values))
            self.log.sync()
        except StorageError:
            pass

    def _step(self, step: int, batch: Batch, learning_rate: float) -> None:
        began = time.perf_counter()
        result = self.session.step(batch.ids, batch.labels, step, learning_rate)
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

    def _check_finite(self, named: tuple[str, float], step: int, learning_rate: float) -> None:
        name, value = named
        if not math.isfinite(value):
            kept = f"the last checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"
            raise TrainingError(
                f"the {name} of step {step} is {value}; {kept}",
                expected="a finite number",
                received=f"{value} at learning rate {learning_rate:g}",
                hint="a lower learning rate; for a zeroth-order method also a smaller perturbation scale",
            )

    def _check_state(self, state: dict[str, np.ndarray]) -> None:
        """What the last step made of the parameters must be worth keeping."""
        for name, value in state.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                kept = f"the last checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"
                raise TrainingError(
                    f"step {self.done - 1} left values in '{name}' that are no numbers; {kept}",
                    expected="finite parameters",
                    received="inf or nan",
                    hint="a lower learning rate; for a zeroth-order method also a smaller perturbation scale",
                )

    def _due(self) -> bool:
        """Whether this is a step to evaluate after, and that was not done yet."""
        if self.evaluate_fn is None or self.done in self.evaluated:
            return False
        return self.done == self.steps or (self.eval_every > 0 and self.done % self.eval_every == 0)

    def _evaluate_and_save(self, save: bool) -> None:
        """After a step: an evaluation if one is due, a checkpoint if one is due or this is the best."""
        result, best = None, False
        if self.evaluate_fn is not None and self._due() and not self.stop:
            result = self.evaluate_fn(self.stop)
        if result is not None:
            before = self.store.best()
            best = before is None or result.score > before[0]
            figures = result.figures()
            figures.pop("tokens")
            self.log.write(events.Evaluate(step=self.done, best=best, **figures))
            self.evaluated.add(self.done)
            self.evaluation = result
        if save or best:
            self._save(result)

    def _save(self, evaluation: EvalResult | None) -> None:
        """Save a checkpoint: beside the next steps, where the session keeps what is not written yet as it is."""
        self._settle()
        self.log.sync()
        state = self.session.state()
        saving = Saving(self.done, time.perf_counter())
        written, hold = (getattr(self.session, name, None) for name in ("written", "hold"))
        if hold is not None:
            hold()

        def save() -> None:
            try:
                self._check_state(state)
                saving.path = self.store.save(
                    saving.step,
                    state,
                    evaluation=None if evaluation is None else events.plain(evaluation.figures()),
                    score=None if evaluation is None else evaluation.score,
                    written=written,
                    beside=getattr(self.session, "save_beside", None),
                )
            except BaseException as error:
                saving.error = error
            if written is not None:
                written(None)
            saving.end_s = time.perf_counter()

        if written is None:
            save()
            self._saved(saving)
            return
        thread = threading.Thread(target=save, name="ondevice-checkpoint")
        thread.start()
        self.saving = (thread, saving)

    def end_saving(self) -> None:
        """Let a checkpoint that is being written become whole, whatever happened since."""
        if self.saving is not None:
            self.saving[0].join()

    def _settle(self, wait: bool = True) -> None:
        """Take note of a checkpoint that was written beside; `wait` for it to be whole."""
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
        self.log.write(
            events.Checkpoint(
                step=saving.step, path=saving.path.name, size_bytes=size, seconds_s=saving.end_s - saving.began_s
            )
        )

    def _finish(self) -> None:
        history = self.history
        self.log.write(
            events.Finish(
                steps=self.done,
                first_loss=history.first_loss,
                final_loss=history.final_loss,
                step_time_s=history.step_time_s,
                tokens_per_s=history.tokens_per_s,
                peak_memory_bytes=history.peak_memory_bytes,
            )
        )


def _identity(start: events.Start) -> dict[str, Any]:
    """What a resume must have in common with the run."""
    return events.plain({"model": start.model_sha256, "seed": start.seed, **start.identity})
