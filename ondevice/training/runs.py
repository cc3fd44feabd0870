"""Runs on this disk: what their logs say of them, side by side, and their removal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.core.errors import BusyError, CheckpointError, StorageError
from ondevice.training import checkpoint, events
from ondevice.training.checkpoint import RunLock
from ondevice.training.events import FILE_NAME, LogContent, read_log
from ondevice.training.metrics import RunHistory
from ondevice.training.picture import draw

DEPTH = 4
"""Folders below the one that is asked for in which runs are looked for."""
FIGURES = (
    "steps",
    "first_loss",
    "final_loss",
    "best_loss",
    "best_accuracy",
    "step_time_s",
    "peak_memory_bytes",
)


@dataclass(frozen=True)
class RunSummary:
    """The content of a run's log.

    Attributes:
        path: the run's folder.
        state: `finished`, `stopped early`, `interrupted`, `failed`, `running` (a process holds it), or `unfinished`.
        started_s: seconds since the epoch.
        config: the settings it was started with, changes of resumes on top, by dotted key.
        figures: `FIGURES`, None if there is none.
        evaluations: of the log, in order.
        resumes: of the log, in order.
        checkpoints: folders that are there.
        error: what ended a run that failed.
    """

    path: Path
    state: str
    started_s: float
    asked_steps: int
    config: dict[str, Any]
    figures: dict[str, Any]
    evaluations: tuple[events.Evaluate, ...]
    resumes: tuple[events.Resume, ...]
    checkpoints: tuple[str, ...]
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "run": str(self.path),
            "state": self.state,
            "started_s": self.started_s,
            "model": self.config.get("model.source"),
            "method": self.config.get("method.name"),
            "asked_steps": self.asked_steps,
            **self.figures,
            "checkpoints": list(self.checkpoints),
            "error": self.error or None,
        }


def find_runs(folder: Path) -> list[Path]:
    """List the folders at and below `folder` that hold a run, the newest last."""
    found = []
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        if FILE_NAME in files:
            found.append(Path(place))
            folders.clear()
        folders[:] = [
            name for name in folders if depth < DEPTH and not name.startswith((".", "checkpoint-"))
        ]
    return sorted(found, key=lambda path: (path / FILE_NAME).stat().st_mtime)


def read_run(folder: Path) -> RunSummary:
    """Read the log of a run.

    Raises:
        CheckpointError: the folder holds no run.
    """
    content = _content(folder)
    logged = [entry.event for entry in content.entries]
    start = content.start
    assert start is not None  # noqa: S101  `_content` refuses a log without a head
    config = _flat(start.config)
    asked = start.steps
    for event in logged:
        if isinstance(event, events.Resume):
            config |= {key: values[1] for key, values in event.changed.items()}
            asked = event.steps
    evaluations = tuple(event for event in logged if isinstance(event, events.Evaluate))
    best = next((event for event in reversed(evaluations) if event.best), None)
    history = RunHistory(logged)
    figures = {name: getattr(history, name, None) for name in FIGURES} | {
        "steps": len(history.losses),
        "best_loss": best and best.loss,
        "best_accuracy": best and best.accuracy,
    }
    state, error = _state(logged, folder)
    return RunSummary(
        path=folder,
        state=state,
        started_s=start.time_s,
        asked_steps=asked,
        config=config,
        figures=figures,
        evaluations=evaluations,
        resumes=tuple(event for event in logged if isinstance(event, events.Resume)),
        checkpoints=tuple(sorted(path.name for path in folder.glob("checkpoint-*"))),
        error=error,
    )


def differences(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all runs, by dotted key, in the order of the runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = {key: [run.config.get(key) for run in runs] for key in keys if key != "train.out"}
    return {
        key: values for key, values in rows.items() if any(value != values[0] for value in values)
    }


def remove_run(folder: Path) -> None:
    """Delete a run's folder.

    Raises:
        BusyError: a process holds it.
        CheckpointError: the folder holds no run: nothing else is ever deleted.
    """
    _content(folder)
    with RunLock(folder):
        pass
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be deleted: {error.strerror}") from None


def plot_runs(folders: Sequence[Path], out: Path) -> None:
    """Draw losses and evaluations of runs, one colour a run; the suffix of `out` says the format (.png, .svg, .pdf).

    Raises:
        CheckpointError: a folder holds no run.
        MissingPackageError: matplotlib is not installed.
    """
    histories: dict[str, RunHistory] = {}
    for folder in folders:
        history = RunHistory(entry.event for entry in _content(folder).entries)
        name = folder.name
        histories[str(folder) if name in histories else name] = history
    figure = draw(histories)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _content(folder: Path) -> LogContent:
    content = read_log(folder / FILE_NAME)
    if content.start is None:
        raise CheckpointError(
            f"{folder} holds no run",
            expected=f"a folder with {FILE_NAME}",
            hint="`ondevice runs list FOLDER` lists the runs below a folder",
        )
    return content


def _state(logged: list[events.Event], folder: Path) -> tuple[str, str]:
    if (folder / checkpoint.FILE_NAME).is_file():
        try:
            with RunLock(folder):
                pass
        except BusyError:
            return "running", ""
        except StorageError:  # a disk that is only read: nobody runs there
            pass
    last = logged[-1]
    if isinstance(last, events.Finish):
        return ("stopped early" if last.reason else "finished"), ""
    if isinstance(last, events.Interrupt):
        return "interrupted", ""
    if isinstance(last, events.Error):
        return ("failed", str(last.error.get("message", "")))
    return ("unfinished", "")


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    def walk(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(values, ""))
