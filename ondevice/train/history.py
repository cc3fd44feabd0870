"""The figures of a run over all its parts: from the log before a resume, and from new steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ondevice.train import events

if TYPE_CHECKING:
    from ondevice.train.evaluate import EvalResult

_RECENT = 20


class History:
    """Losses, times and memory of every step; what `RunResult` and the remaining time are made of."""

    def __init__(self, steps: Iterable[events.Step] = ()) -> None:
        self.losses: list[float] = []
        self.times_s: list[float] = []
        self.tokens = 0
        self.peak_memory_bytes = 0
        self.peak_device_bytes: int | None = None
        self.overlap: dict[str, Any] | None = None
        for step in steps:
            self.add(step)

    def add(self, step: events.Step) -> None:
        """Take in one step."""
        self.losses.append(step.loss)
        self.times_s.append(step.step_time_s)
        self.tokens += step.tokens
        self.overlap = step.overlap or self.overlap
        self.peak_memory_bytes = max(self.peak_memory_bytes, step.peak_memory_bytes)
        if step.peak_device_bytes is not None:
            self.peak_device_bytes = max(self.peak_device_bytes or 0, step.peak_device_bytes)

    @property
    def first_loss(self) -> float:
        """Loss of the first step; not a number before it."""
        return self.losses[0] if self.losses else math.nan

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps (at least one): single zeroth-order losses are noisy."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return math.fsum(last) / len(last) if last else math.nan

    @property
    def step_time_s(self) -> float:
        """Median time of a step."""
        return median(self.times_s) if self.times_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all batches over the time of all steps."""
        total = math.fsum(self.times_s)
        return self.tokens / total if total else 0.0

    def eta_s(self, step_time_s: float, left: int) -> float:
        """Time for `left` more steps, from the median of the last steps and the one that just ran."""
        return median([*self.times_s[-_RECENT:], step_time_s]) * left


@dataclass(frozen=True)
class RunResult:
    """What a run came to. Figures are over the whole run, the parts before a resume included.

    Attributes:
        steps: optimizer steps that are done.
        first_loss: loss of the first step.
        final_loss: mean loss of the last tenth of the steps, nats a token.
        step_time_s: median time of a step.
        tokens_per_s: tokens of all batches (padding included) over the time of all steps.
        peak_memory_bytes: highest resident memory of the process.
        peak_device_bytes: highest memory of CUDA tensors, None without CUDA.
        evaluation: the last evaluation of this part of the run.
        best_score, best_checkpoint: of the best evaluation of the whole run.
        checkpoint: the newest checkpoint.
        interrupted: the run was asked to stop before its end; its state is saved.
        overlap: of the last step but one, for methods that offload.
        signal: why: `SIGINT`, `SIGTERM`, ... or what `StopRequest.request` was given.
    """

    steps: int
    first_loss: float
    final_loss: float
    step_time_s: float
    tokens_per_s: float
    peak_memory_bytes: int
    peak_device_bytes: int | None
    evaluation: EvalResult | None
    best_score: tuple[float, ...] | None
    best_checkpoint: Path | None
    checkpoint: Path | None
    interrupted: bool
    signal: str = ""
    overlap: dict[str, Any] | None = None
