"""A run's checkpoints as they are written: at once, or in a thread beside the next steps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice.core.errors import TrainingError
from ondevice.training import events

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.training.callbacks import Callbacks
    from ondevice.training.checkpoint import CheckpointStore
    from ondevice.training.evaluate import EvalResult
    from ondevice.training.events import EventLog


@dataclass
class Saving:
    """A checkpoint that is being written; seconds of `time.perf_counter`."""

    step: int
    began_s: float
    end_s: float = 0.0
    path: Path = Path()
    error: BaseException | None = None


class Saver:
    """Saves a session's state and logs each checkpoint that is whole.

    Attributes:
        saved: the newest checkpoint; None before the first one.
    """

    def __init__(
        self, session: Session, store: CheckpointStore, log: EventLog, callbacks: Callbacks | None, saved: Path | None
    ) -> None:
        self.session, self.store, self.log, self.callbacks = session, store, log, callbacks
        self.saved = saved
        self._saving: tuple[threading.Thread, Saving] | None = None

    def save(self, step: int, evaluation: EvalResult | None) -> None:
        """Save a checkpoint after `step` steps: in a thread beside the next ones, where the session holds arrays that
        are not yet written as they are (`saves_beside`), else at once."""
        self.collect()  # one at a time: two would compete for the disk, and for the arrays that are held
        self.log.sync()  # first the log: a checkpoint must not be of a step that the log has lost
        state = self.session.state()
        saving = Saving(step, time.perf_counter())
        beside = self.session.saves_beside
        if beside:
            self.session.hold()

        def save() -> None:
            try:
                self._check_state(step, state)
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
        self._saving = (thread, saving)

    def collect(self, wait: bool = True) -> None:
        """Log the checkpoint that a thread has written, and raise its error; with `wait`, join a running thread."""
        if self._saving is None or not (wait or not self._saving[0].is_alive()):
            return
        (thread, saving), self._saving = self._saving, None
        thread.join()
        self._saved(saving)

    def end(self) -> None:
        """Wait for a checkpoint that is being written, whatever happened since."""
        if self._saving is not None:
            self._saving[0].join()

    def _saved(self, saving: Saving) -> None:
        if saving.error is not None:
            raise saving.error
        self.saved = saving.path
        size = sum(file.stat().st_size for file in saving.path.rglob("*") if file.is_file())
        event = events.Checkpoint(
            step=saving.step, path=saving.path.name, size_bytes=size, seconds_s=saving.end_s - saving.began_s
        )
        self.log.write(event)
        if self.callbacks is not None:
            self.callbacks.call("on_checkpoint", event)

    def _check_state(self, step: int, state: dict[str, np.ndarray]) -> None:
        """Refuse to save parameters that the last step made infinite or not a number.

        The loss is of the parameters before the step, so it does not show them; a checkpoint of them would replace
        the last good one.
        """
        for name, value in state.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise not_finite(
                    f"step {step - 1} left values in '{name}' that are no numbers",
                    "finite parameters",
                    "inf or nan",
                    self.saved,
                )


def not_finite(message: str, expected: str, received: str, saved: Path | None) -> TrainingError:
    """Build the error of a number that is infinite or none; `saved` is the last checkpoint."""
    kept = f"the last checkpoint is {saved}" if saved else "there is no checkpoint yet"
    hint = "a lower learning rate; for a zeroth-order method also a smaller perturbation scale"
    return TrainingError(f"{message}; {kept}", expected=expected, received=received, hint=hint)
