"""What a run gets from the program that starts it, in addition to its run file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.models import LoadedModel
    from ondevice.training.callbacks import Callback
    from ondevice.training.events import Sink
    from ondevice.training.rows import OpenedRows


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
