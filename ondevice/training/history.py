"""The course of a run as lists: losses and learning rates by step, and its evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ondevice.training import events
from ondevice.training.events import FILE_NAME, read_log

FIGURES = ("loss", "accuracy", "f1", "exact_match", "metric_value")


@dataclass
class RunHistory:
    """The course of a run, the steps before a resume included.

    Attributes:
        steps: number of each step, from 1.
        losses: loss of each step, nats a token.
        learning_rates: learning rate of each step.
        evaluations: figures of each evaluation: `step`, `loss`, and `accuracy`, `f1` or others that
            the rows have.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: events.Event) -> None:
        """Take a step or an evaluation; other events are not part of it."""
        if isinstance(event, events.Step):
            self.steps.append(event.step + 1)
            self.losses.append(event.loss)
            self.learning_rates.append(event.learning_rate)
        elif isinstance(event, events.Evaluate):
            figures = {name: getattr(event, name) for name in FIGURES}
            figures |= event.preferences or {}
            known = {name: value for name, value in figures.items() if value is not None}
            self.evaluations.append({"step": event.step, **known})

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the lists by name."""
        return {
            "steps": self.steps,
            "losses": self.losses,
            "learning_rates": self.learning_rates,
            "evaluations": self.evaluations,
        }

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"RunHistory({len(self.steps)} steps, {len(self.evaluations)} evaluations)"


class Recorder:
    """Records a run's history as it goes; a sink. After a resume it begins with what the log has."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.history = RunHistory()

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Resume):
            self.history = RunHistory()
            for entry in read_log(self.out / FILE_NAME).entries:
                self.history.add(entry.event)
            return
        self.history.add(event)
