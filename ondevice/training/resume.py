"""Go on with the run that is in a folder: from its newest checkpoint, with its log cut back to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import CheckpointError
from ondevice.training import events
from ondevice.training.checkpoint import check_identity
from ondevice.training.events import LogContent, cut_log, read_log
from ondevice.training.loop import identity_of
from ondevice.training.metrics import History

if TYPE_CHECKING:
    from ondevice.training.loop import Run

CHANGEABLE = (
    "method.learning_rate", "train.steps", "train.epochs", "train.schedule", "train.warmup_steps",
)  # fmt: skip
"""Settings that a resumed run may have other values of than the run that it goes on with."""


def restore(run: Run, path: Path, warnings: list[str]) -> tuple[LogContent, str]:
    """Take the newest checkpoint into the run's session and cut its log back to it.

    Args:
        path: the log.
        warnings: what is to be said of it is added to them.

    Returns:
        What is left of the log, and the checkpoint's name; the name is empty before the first one.
    """
    run.store.remove_leftovers()
    head = read_log(path).start
    if head is not None:
        check_identity(identity_of(head), run.identity, f"{path}: the log")
    loaded = run.store.newest(warnings.append)
    if loaded is not None and loaded.meta.step > run.steps:
        raise CheckpointError(
            f"the run in {run.out} is beyond the steps that are asked for",
            expected=f"--steps {loaded.meta.step} or more",
            received=f"--steps {run.steps}",
            hint="`--steps` counts from the run's beginning; nothing was changed",
        )
    if loaded is not None:
        run.session.load_state(loaded.state)
        run.done, run.saved = loaded.meta.step, loaded.path
        if loaded.meta.backend != run.session.backend:
            warnings.append(
                f"the checkpoint is of {loaded.meta.backend}, this is {run.session.backend}: "
                "the run goes on, but not with the same bits"
            )
    # The steps after the checkpoint are run again: their lines go, so that the log has each step once.
    content = cut_log(path, run.done)
    logged = content.steps()
    if content.damaged or [step.step for step in logged] != list(range(run.done)):
        warnings.append(f"{path.name} lacks steps before step {run.done}: it cannot be replayed")
    run.history = History(logged)
    kept = [entry.event for entry in content.entries]
    run.changed = _changed(kept, run.start)
    for event in kept:
        if isinstance(event, events.Evaluate):
            run.evaluated.add(event.step)
            run.without_better = 0 if event.best else run.without_better + 1
    return content, loaded.path.name if loaded else ""


def _changed(logged: list[events.Event], start: events.Start) -> dict[str, Any]:
    """Return the changeable settings that differ from those the log ends with: {dotted key: [before, now]}."""
    head = next((event for event in logged if isinstance(event, events.Start)), None)
    if head is None:
        return {}

    def settings(config: dict[str, Any]) -> dict[str, Any]:
        sections = (key.split(".") for key in CHANGEABLE)
        return {f"{section}.{name}": config.get(section, {}).get(name) for section, name in sections}

    before = settings(head.config)
    for event in logged:
        if isinstance(event, events.Resume):
            before |= {key: values[1] for key, values in event.changed.items()}
    now = settings(start.config)
    return {key: [before[key], now[key]] for key in CHANGEABLE if before[key] != now[key]}
