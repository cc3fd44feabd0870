"""A run's figures for TensorBoard, Weights & Biases, MLflow or Trackio: one sink of the run's events feeds all of them.

Each is an optional package with three calls: `begin`, `log`, `end`. Nothing leaves this machine unless the tracker's
own environment variables say so: files are written below the run's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ondevice.core.errors import MissingPackageError
from ondevice.training import events
from ondevice.training.metrics import EVALUATED

log = logging.getLogger("ondevice.training")
PROJECT = "ondevice"
_STEP = (
    "loss",
    "learning_rate",
    "tokens_per_s",
    "step_time_s",
    "peak_memory_bytes",
    "peak_device_bytes",
)


class Tracker(ABC):
    """One run in a tracker; `folder` is the run's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @abstractmethod
    def begin(self, config: dict[str, Any], step: int) -> None:
        """Open the run, or go on with it after `step` steps; `config` is the run file."""

    @abstractmethod
    def log(self, figures: dict[str, float], step: int) -> None:
        """Take figures after `step` optimizer steps."""

    @abstractmethod
    def end(self, whole: bool) -> None:
        """Close the run; `whole` says if it came to its end."""

    @property
    def run_id(self) -> str:
        """A name of the run that a resume finds again."""
        return hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]


class TensorBoard(Tracker):
    """Event files in `tensorboard/`: `tensorboard --logdir RUN`."""

    def begin(self, config: dict[str, Any], step: int) -> None:
        """See `Tracker`; a resumed run writes another file, which TensorBoard joins."""
        from tensorboard.summary import Writer

        self.writer = Writer(str(self.folder / "tensorboard"))

    def log(self, figures: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def end(self, whole: bool) -> None:
        """See `Tracker`."""
        self.writer.close()


class WeightsAndBiases(Tracker):
    """An offline run in `wandb/`, for `wandb sync`; WANDB_MODE and WANDB_PROJECT have the last word."""

    def begin(self, config: dict[str, Any], step: int) -> None:
        """See `Tracker`."""
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.folder.name,
            id=self.run_id,
            resume="allow",
            dir=str(self.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, figures: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        self.run.log(figures, step=step)

    def end(self, whole: bool) -> None:
        """See `Tracker`."""
        self.run.finish(exit_code=int(not whole))


class MLflow(Tracker):
    """A run in `mlruns/`, or where MLFLOW_TRACKING_URI says."""

    def begin(self, config: dict[str, Any], step: int) -> None:
        """See `Tracker`; a run of the same folder is gone on with."""
        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # newer versions ask for a data base, which we do not
        from mlflow.tracking import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI", (self.folder / "mlruns").as_uri())
        self.client = MlflowClient(tracking_uri=place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        before = (
            self.client.search_runs([experiment], f"tags.ondevice_run = '{self.run_id}'")
            if step
            else []
        )
        if before:
            self.id = before[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        tags = {"ondevice_run": self.run_id}
        self.id = self.client.create_run(
            experiment, run_name=self.folder.name, tags=tags
        ).info.run_id
        for key, value in _flat(config).items():
            self.client.log_param(self.id, key, value)

    def log(self, figures: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in figures.items():
            self.client.log_metric(self.id, name, value, step=step)

    def end(self, whole: bool) -> None:
        """See `Tracker`."""
        self.client.set_terminated(self.id, "FINISHED" if whole else "KILLED")


class Trackio(Tracker):
    """A run in Trackio's local data base, in TRACKIO_DIR or `trackio/`: `trackio show`."""

    def begin(self, config: dict[str, Any], step: int) -> None:
        """See `Tracker`."""
        os.environ.setdefault(
            "TRACKIO_DIR", str(self.folder / "trackio")
        )  # read when the package is imported
        import trackio

        name = f"{self.folder.name}-{self.run_id[:6]}"
        self.close = trackio.finish
        self.run = trackio.init(
            project=PROJECT, name=name, config=_flat(config), resume="allow", embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip

    def log(self, figures: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        self.run.log(figures, step=step)

    def end(self, whole: bool) -> None:
        """See `Tracker`."""
        self.close()


TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "trackio": (Trackio, "trackio"),
}
"""Name in `train.report_to` to the tracker and its package."""


class Reports:
    """A sink of events that feeds trackers. One that fails is left out with a warning: it must not end a run."""

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self.trackers = trackers
        self.config: dict[str, Any] = {}

    def __call__(self, event: events.Event) -> None:
        """Pass an event on, as figures by name."""
        match event:
            case events.Start():
                self._all("begin", event.config, 0)
            case events.Resume():
                self._all("begin", self.config, event.step)
            case events.Step():
                self._all("log", _figures("train", event, _STEP), event.step + 1)
            case events.Evaluate():
                self._all("log", _figures("eval", event, EVALUATED), event.step)
            case events.Finish():
                self._all("end", True)
            case events.Interrupt() | events.Error():
                self._all("end", False)

    def _all(self, call: str, *arguments: Any) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                with contextlib.redirect_stdout(sys.stderr):  # standard output is the command's own
                    getattr(tracker, call)(*arguments)
            except Exception as error:  # a tracker's own kinds
                log.warning(
                    "%s gets nothing more of this run: %s: %s", name, type(error).__name__, error
                )
                del self.trackers[name]


def check_installed(names: Sequence[str]) -> None:
    """Raise MissingPackageError for a tracker whose package is not there."""
    for name in names:
        package = TRACKERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"train.report_to: {name} needs the package '{package}'",
                expected=f"the package {package}",
                hint=f"pip install {package}",
            )


def open_reports(names: Sequence[str], folder: Path, config: dict[str, Any]) -> Reports | None:
    """Build the sink of a run in `folder`; None if it reports to nobody. `config` is the run file."""
    check_installed(names)
    if not names:
        return None
    reports = Reports({name: TRACKERS[name][0](folder) for name in names})
    reports.config = config
    return reports


def _figures(part: str, event: events.Event, names: Sequence[str]) -> dict[str, float]:
    values = {name: getattr(event, name) for name in names}
    values |= getattr(event, "preferences", None) or {}
    return {f"{part}/{name}": float(value) for name, value in values.items() if value is not None}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat
