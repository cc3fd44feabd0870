"""Learning-rate schedules: pure functions of the step, so that a resume needs no state of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ondevice.core.errors import ConfigError

Schedule = Callable[[int], float]
"""Step number (from 0) to learning rate."""

Kind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class WarmupDecay:
    """Linear warmup to `peak`, then constant, linear or cosine decay to `peak * final_fraction`.

    The decay ends at the last step: with `final_fraction` 0 that step has rate 0, computes a loss and moves nothing.
    The schedules of transformers and torch would reach 0 one step after the last, so N steps here have the rates of
    N - 1 steps there, and then one of 0. It stays so, as runs of earlier versions go on with the rates they began with.

    Args:
        kind: the shape after the warmup.
        peak: highest learning rate.
        steps: steps of the whole run; the last step is `steps - 1` and has the final rate.
        warmup_steps: steps until `peak`; step s < warmup_steps has peak * (s + 1) / (warmup_steps + 1).
        final_fraction: the final rate as a part of `peak`.

    Raises:
        ConfigError: if the warmup does not end before the run does, or a number is out of range.
    """

    kind: Kind
    peak: float
    steps: int
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ConfigError(
                f"unknown schedule '{self.kind}'",
                expected="constant, linear or cosine",
                received=self.kind,
            )
        if not 0 <= self.warmup_steps < self.steps:
            raise ConfigError(
                "the warmup must end before the run does",
                expected=f"0 <= warmup_steps < {self.steps} (steps)",
                received=self.warmup_steps,
                hint="fewer warmup steps, or more steps",
            )
        if not (math.isfinite(self.peak) and self.peak > 0 and 0 <= self.final_fraction <= 1):
            raise ConfigError(
                "a learning rate must be positive and its final fraction between 0 and 1",
                received=f"learning_rate {self.peak}, final_fraction {self.final_fraction}",
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        span = max(1, self.steps - 1 - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        if self.kind == "constant":
            return self.peak
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.final_fraction + (1.0 - self.final_fraction) * left)
