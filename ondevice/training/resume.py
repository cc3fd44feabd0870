"""Go on with the run that is in a folder: from its newest checkpoint, with its log cut back to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import CheckpointError
from ondevice.training import events
from ondevice.training.checkpoint import check_identity, flatten
from ondevice.training.events import FILE_NAME, LogContent, cut_log, read_log
from ondevice.training.identity import ENCODED, NAMES, changes, identity_of
from ondevice.training.metrics import RunHistory

if TYPE_CHECKING:
    from ondevice.core.config import TrainConfig
    from ondevice.core.session import Session
    from ondevice.training.checkpoint import CheckpointStore

ENVIRONMENT = "environment"
CHANGEABLE = (
    "method.learning_rate", "train.steps", "train.epochs", "train.schedule", "train.warmup_steps",
)  # fmt: skip
"""Settings that a resumed run may have other values of than the run that it goes on with."""


@dataclass(frozen=True)
class Restored:
    """Where a run goes on.

    Attributes:
        done: steps that are done.
        saved: the checkpoint; None before the first one.
        history: of the events that are left in the log.
        has_start: the log has its head.
        changed: [before, now] of each setting that differs from the log's, by dotted key.
        evaluated: steps after which the run was evaluated.
        without_better: evaluations since the best one.
    """

    done: int
    saved: Path | None
    history: RunHistory
    has_start: bool
    changed: dict[str, Any]
    evaluated: set[int]
    without_better: int


def restore(
    store: CheckpointStore,
    session: Session,
    start: events.Start,
    settings: TrainConfig,
    warnings: list[str],
) -> Restored:
    """Load the newest checkpoint of a run into the session, and cut its log back to it.

    Args:
        start: the head that the log of this run would have.
        warnings: messages for the user are added to them.
    """
    path = settings.out / FILE_NAME
    identity = identity_of(start)
    accept = settings.accept_changes
    store.remove_leftovers()
    before = read_log(path)
    tolerated: dict[str, list[Any]] = {}
    if before.start is not None:
        stored = logged_identity(before)
        tolerated = check_identity(stored, identity, f"{path}: the log", accept=accept)
    # The log knows which changes were accepted since a checkpoint; without a log the checkpoint is compared itself.
    loaded = store.newest(warnings.append, accept=accept or before.start is not None)
    if before.start is None and loaded is not None:
        where = f"{loaded.path}: the checkpoint"
        tolerated = check_identity(loaded.meta.identity, identity, where, accept=accept)
    warnings += _said(tolerated)
    if loaded is not None:
        _check_steps(loaded.meta.step, settings)
    done = 0
    if loaded is not None:
        session.load_state(loaded.state)
        done = loaded.meta.step
        if loaded.meta.backend != session.backend:
            warnings.append(
                f"the checkpoint is of {loaded.meta.backend}, this is {session.backend}: "
                "the run goes on, but not with the same bits"
            )
    # The steps after the checkpoint are run again: their lines go, so that the log has each step once.
    content = cut_log(path, done)
    logged = content.steps()
    if content.damaged or [step.step for step in logged] != list(range(done)):
        warnings.append(f"{path.name} lacks steps before step {done}: it cannot be replayed")
    kept = [entry.event for entry in content.entries]
    changed = _changed(kept, start)
    differing = [
        f"{key.removeprefix(ENVIRONMENT + '.')} {before} -> {now}"
        for key, (before, now) in changed.items()
        if key.startswith(ENVIRONMENT) and before is not None
    ]
    if differing:
        warnings.append(
            f"the run goes on, but maybe not with the same bits: {', '.join(differing)}"
        )
    evaluations = [event for event in kept if isinstance(event, events.Evaluate)]
    without_better = 0
    for event in evaluations:
        without_better += 1
        if event.best:
            without_better = 0
    return Restored(
        done=done,
        saved=loaded and loaded.path,
        history=RunHistory(kept),
        has_start=content.start is not None,
        changed=changed,
        evaluated={event.step for event in evaluations},
        without_better=without_better,
    )


def _check_steps(done: int, settings: TrainConfig) -> None:
    if done > settings.steps:
        raise CheckpointError(
            f"the run in {settings.out} is beyond the steps that are asked for",
            expected=f"--steps {done} or more",
            received=f"--steps {settings.steps}",
            hint="`--steps` counts from the run's beginning; nothing was changed",
        )


def check_resume(store: CheckpointStore, start: events.Start, settings: TrainConfig) -> None:
    """Refuse a resume that `restore` would refuse, without reading a checkpoint's state.

    Raises:
        CheckpointError: the run in the folder is another one, or has more steps.
    """
    path = settings.out / FILE_NAME
    before = read_log(path)
    if before.start is not None:
        stored = logged_identity(before)
        where = f"{path}: the log"
        check_identity(stored, identity_of(start), where, accept=settings.accept_changes)
    steps = store.steps()
    if steps:
        _check_steps(steps[-1], settings)


def logged_identity(content: LogContent) -> dict[str, Any]:
    """Return the identity that a log ends with, by dotted key: the head's with the changes accepted since."""
    assert content.start is not None  # noqa: S101  checked by the caller
    changed = _latest([entry.event for entry in content.entries])
    return flatten(identity_of(content.start)) | {
        key: value for key, value in changed.items() if key in NAMES
    }


def _latest(logged: list[events.Event]) -> dict[str, Any]:
    """Return the last value of each setting that the log's resumes changed, by dotted key."""
    values: dict[str, Any] = {}
    for event in logged:
        if isinstance(event, events.Resume):
            values |= {key: pair[1] for key, pair in event.changed.items()}
    return values


def _changed(logged: list[events.Event], now: events.Start) -> dict[str, Any]:
    """Return the settings, digests and parts of the environment that differ from those the log ends with.

    Each is [before, now] by its dotted key.
    """
    head = next((event for event in logged if isinstance(event, events.Start)), None)
    if head is None:
        return {}

    def values(start: events.Start) -> dict[str, Any]:
        config = flatten(start.config)
        chosen = {key: config.get(key) for key in CHANGEABLE}
        digests = {key: value for key, value in flatten(identity_of(start)).items() if key in NAMES}
        return chosen | digests | flatten({ENVIRONMENT: events.plain(start.environment)})

    return changes(values(head) | _latest(logged), values(now))


def _said(tolerated: dict[str, list[Any]]) -> list[str]:
    """Return notes on the differences that a resume accepts."""
    said = []
    unknown = []
    for key, (before, now) in tolerated.items():
        name = NAMES[key]
        if key == f"{ENCODED}.evaluation_rows" and (before is None or now is None):
            said.append(f"{name}: {'added' if before is None else 'left out'} since the run began")
        elif before is None:
            unknown.append(name)
        else:
            said.append(f"{name} changed since the run began, which train.accept_changes takes")
    if unknown:
        said.append(
            f"the log is of an older version: whether these changed since the run began is not known: "
            f"{', '.join(unknown)}"
        )
    return said
