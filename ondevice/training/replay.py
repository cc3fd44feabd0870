"""A zeroth-order run again from its log: no data, no forward pass, only its seed and its scalars.

The log is `events.jsonl`; the session must be opened as the log's head says (model, method, seed). With the
same backend and generator the adapter has the same bits as the run's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.artifact.files import sha256_file
from ondevice.core.capabilities import Replays
from ondevice.core.errors import CheckpointError, ConfigError
from ondevice.core.registry import methods
from ondevice.core.session import Preparing, Replaying, require
from ondevice.training import events
from ondevice.training.events import FILE_NAME, read_log

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
    from ondevice.core.session import Session


@dataclass(frozen=True)
class LoggedStep:
    """The numbers of a logged step that apply its update again."""

    step: int
    learning_rate: float
    projected_gradients: tuple[float, ...]


@dataclass(frozen=True)
class RunLog:
    """A log that can be replayed.

    Attributes:
        header: the head: configuration, seed, backend, model.
        steps: every step from 0 on, without a gap.
        backends: all backends that ran some of the steps, in order.
        unfinished: the last line was cut off; its step is not in `steps`.
        prepared: step to the SHA-256 of the file that the run wrote before it (`Preparing.before_step`), in `folder`.
    """

    header: events.Start
    steps: tuple[LoggedStep, ...]
    backends: tuple[str, ...]
    unfinished: bool
    folder: Path = Path()
    prepared: dict[int, tuple[str, str]] = field(default_factory=dict)


def read_run(path: Path) -> RunLog:
    """Read the log of a run.

    Args:
        path: an `events.jsonl`, or the folder that holds one.

    Raises:
        CheckpointError: if the log is missing or damaged or lacks a step.
        ConfigError: if the run was of a first-order method.
    """
    if path.is_dir():
        path = path / FILE_NAME
    content = read_log(path)
    if not content.entries and not content.unfinished:
        raise CheckpointError(
            f"{path}: there is no log", expected=f"a run's folder or its {FILE_NAME}"
        )
    # A partial last line is a run that was killed while it wrote, and replays up to there; one in between is damage.
    if content.damaged:
        raise CheckpointError(
            f"{path}: line {content.damaged[0]} is damaged",
            expected="one JSON event a line",
            received=f"{len(content.damaged)} unreadable lines among readable ones",
            hint="take the adapter from the run's newest checkpoint instead",
        )
    header = content.start
    if header is None:
        raise CheckpointError(f"{path}: the log has no head", expected="a `start` event in line 1")
    if header.schema > events.SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: the log is of a newer version",
            expected=f"schema {events.SCHEMA_VERSION}",
            received=f"schema {header.schema}",
            hint="replay with the version of ondevice that wrote it",
        )
    steps = []
    for entry in content.entries:
        step = entry.event
        position = len(steps)
        if not isinstance(step, events.Step):
            continue
        if step.step != position:
            raise CheckpointError(
                f"{path}: line {entry.line}: the log has a gap",
                expected=f"step {position}",
                received=f"step {step.step}",
                hint="a replay needs every step; take the adapter from the run's newest checkpoint instead",
            )
        if not step.projected_gradients:
            replayable = [spec.name for spec in methods() if spec.capability(Replays)]
            raise ConfigError(
                f"{path}: line {entry.line}: step {step.step} has no projected gradients",
                expected=f"the log of a zeroth-order method ({', '.join(replayable)})",
                received="the log of a first-order method",
                hint="take the adapter from the run's newest checkpoint",
            )
        steps.append(LoggedStep(step.step, step.learning_rate, step.projected_gradients))
    later = [
        entry.event.backend for entry in content.entries if isinstance(entry.event, events.Resume)
    ]
    prepared = {
        entry.event.step: (entry.event.path, entry.event.sha256)
        for entry in content.entries
        if isinstance(entry.event, events.Prepare)
    }
    backends = tuple(dict.fromkeys([header.backend, *later]))
    return RunLog(header, tuple(steps), backends, content.unfinished, path.parent, prepared)


def replay(
    log: RunLog,
    session: Session,
    *,
    steps: int | None = None,
    warn: Callable[[str], None] = lambda message: None,
    on_step: Callable[[int], None] = lambda step: None,
) -> Adapter | None:
    """Apply the logged steps to a session that was just opened, and return its adapter.

    Args:
        steps: only the first so many; None for all.
        warn: called with each reason why the bits may differ from the run's.
        on_step: called with the number of every step that is applied.

    Raises:
        ConfigError: if more steps are asked for than the log has.
    """
    count = len(log.steps) if steps is None else steps
    if not 0 <= count <= len(log.steps):
        raise ConfigError(
            f"the log has no {count} steps", expected=f"0 to {len(log.steps)}", received=count
        )
    if log.unfinished:
        warn(
            f"the last line of the log is cut off; the replay ends after step {len(log.steps) - 1}"
        )
    if set(log.backends) != {session.backend}:
        warn(
            f"the run was on {' and '.join(log.backends)}, this is {session.backend}: "
            "the adapter may differ from the run's in the last bits"
        )
    replaying = require(session, Replaying)
    for logged in log.steps[:count]:
        if logged.step in log.prepared:
            _check_prepared(log, logged.step)
        if isinstance(session, Preparing):
            session.before_replay(logged.step, log.folder)
        replaying.apply_update(logged.projected_gradients, logged.step, logged.learning_rate)
        on_step(logged.step)
    return session.adapter()


def _check_prepared(log: RunLog, step: int) -> None:
    """Refuse to go on without the file that the run wrote before this step."""
    name, digest = log.prepared[step]
    path = log.folder / name
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there: the run wrote it before step {step}",
            expected="the files that the log names, next to the log",
            hint="copy them with the log, or take the adapter from the run's newest checkpoint",
        )
    if (received := sha256_file(path)) != digest:
        raise CheckpointError(
            f"{path} is not the file that the run wrote before step {step}",
            expected=digest,
            received=received,
            hint="take the adapter from the run's newest checkpoint instead",
        )
