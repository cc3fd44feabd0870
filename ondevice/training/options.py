"""What a run gets from the program that starts it, in addition to its run file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError

if TYPE_CHECKING:
    from ondevice.models import LoadedModel
    from ondevice.training import events
    from ondevice.training.events import Sink
    from ondevice.training.rows import OpenedRows


class Callback:
    """Follow a run, in the thread that trains; override the methods you need.

    `self.stop("why")` ends the run after the step that is running, like Ctrl-C: its checkpoint and its adapter are
    written. An exception does the same, and is raised again when they are.
    """

    _stop: Callable[[str], None] | None = None

    def stop(self, reason: str = "callback") -> None:
        """Ask the run to stop; does nothing if none is running."""
        if self._stop is not None:
            self._stop(reason)

    def on_step(self, event: events.Step) -> None:
        """React to a step: its loss, learning rate, times and memory."""

    def on_evaluate(self, event: events.Evaluate) -> None:
        """React to an evaluation of the held-out rows; `event.best` says if no earlier result was better."""

    def on_checkpoint(self, event: events.Checkpoint) -> None:
        """React to a checkpoint that was written; `event.path` is its folder inside the run's."""


class Callbacks:
    """The callbacks of a run, and what one of them raised.

    Raises:
        ConfigError: one is not a `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback], stop: Callable[[str], None]) -> None:
        self.callbacks = callbacks
        self.stop = stop
        self.raised: Exception | None = None
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    "a callback is of the wrong type",
                    expected="objects of a class that inherits from ondevice.Callback",
                    received=type(callback).__name__,
                    hint="class Mine(ondevice.Callback): def on_step(self, event): ...",
                )
            callback._stop = stop

    def call(self, hook: str, event: events.Event) -> None:
        """Call a method of every callback; after an exception the run is asked to stop, and none is called again."""
        for callback in self.callbacks:
            if self.raised is not None:
                return
            try:
                getattr(callback, hook)(event)
            except Exception as error:  # whatever the user's code raises
                self.raised = error
                self.stop(f"{type(callback).__name__}.{hook}: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Options:
    """What a run gets from the program that starts it, in addition to its run file.

    Attributes:
        resume: go on from the newest intact checkpoint in the run's folder, or begin if there is none.
        overwrite: replace the run that is in the folder.
        adapter: start from this adapter.
        sinks: called with every event.
        callbacks: called as the run goes, and may stop it. One that raises ends the run like a signal, and
            `RunResult.raised` has the error.
        said: what was chosen for the run, in sentences.
        notes: about the rows, in addition to what reading them reports.
        rows: the rows; None takes those that the run file names.
        loaded: a model that is already loaded, instead of `model.source`'s.
        resolved: the method's settings with what was left to this machine decided, only for the session; None: those
            of the run.
        kernels: of `method.kernels` if that is `auto`, only for the session.
        decided: the run's own choices by dotted key, for the log.
    """

    resume: bool = False
    overwrite: bool = False
    adapter: Path | None = None
    sinks: Sequence[Sink] = ()
    callbacks: Sequence[Callback] = ()
    notes: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    rows: OpenedRows | None = None
    loaded: LoadedModel | None = None
    resolved: Any = None
    kernels: str | None = None
    decided: dict[str, Any] = field(default_factory=dict)
