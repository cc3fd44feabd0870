"""The figures of a run: memory that the process takes, losses, times, and what they come to.

On Linux the kernel keeps the high-water mark of memory (`VmHWM`) and lets a process reset its own through
`/proc/self/clear_refs`. Elsewhere the mark cannot be reset: it counts once it rises above the old mark.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ondevice.training import events

if TYPE_CHECKING:
    from ondevice.training.evaluate import EvalResult

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def resident_bytes() -> int:
    """Return the resident memory of this process now, files it has mapped included."""
    if size := status_bytes("VmRSS"):
        return size
    import psutil

    return psutil.Process().memory_info().rss


def anonymous_bytes() -> int:
    """Return the memory that the system cannot drop and read again: RssAnon + VmSwap on Linux (what phones and
    macOS count as the footprint), resident memory elsewhere."""
    anonymous = status_bytes("RssAnon")
    if anonymous:
        return anonymous + status_bytes("VmSwap")
    return resident_bytes()


def cuda_peak_bytes() -> int | None:
    """Return highest memory of CUDA tensors since the last reset; None unless torch is loaded and has used CUDA."""
    cuda = _cuda()
    if cuda is None:
        return None
    return int(cuda.max_memory_allocated())


class PeakMemory:
    """The highest memory since this object was made.

    `resident_bytes` is exact on Linux. Where the kernel's mark cannot be reset and has not risen, it is the
    highest value at the calls of `resident_bytes`.
    """

    def __init__(self) -> None:
        self._exact = reset_peak()
        self._mark = _high_water_bytes()
        self._sampled = resident_bytes()
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()

    def resident_bytes(self) -> int:
        """Return highest resident memory so far."""
        mark = _high_water_bytes()
        if self._exact or mark > self._mark:
            return mark
        self._sampled = max(self._sampled, resident_bytes())
        return self._sampled

    def device_bytes(self) -> int | None:
        """Return highest memory of CUDA tensors so far, or None without CUDA."""
        return cuda_peak_bytes()


class AnonymousPeak:
    """Samples `anonymous_bytes` in a thread while open, for benchmarks; the kernel keeps no mark for it.

    Args:
        interval_s: seconds between two samples; a shorter peak may be missed.
    """

    def __init__(self, interval_s: float = 0.005) -> None:
        self.interval_s = interval_s
        self.start_bytes = self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> AnonymousPeak:
        self.start_bytes = self.peak_bytes = anonymous_bytes()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def reset_peak() -> bool:
    """Set the kernel's high-water mark to the memory that is resident now; False if that is not possible."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return status_bytes("VmHWM") > 0


def _high_water_bytes() -> int:
    mark = status_bytes("VmHWM")
    if mark:
        return mark
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def status_bytes(field: str) -> int:
    """Read a field of /proc/self/status, in bytes; 0 if there is none."""
    try:
        text = _STATUS.read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _cuda() -> Any | None:
    """torch.cuda, if something else has loaded and initialised it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda


_RECENT = 20


EVALUATED = ("loss", "accuracy", "f1", "exact_match", "metric_value")


class RunHistory:
    """The course of a run, the steps before a resume included; a sink of its log.

    Attributes:
        steps: number of each step, from 1.
        losses: loss of each step, nats a token.
        learning_rates: learning rate of each step.
        evaluations: figures of each evaluation: `step`, `loss`, and `accuracy`, `f1` or others that
            the rows have.
        preferences: figures of each step of a run on preferences, such as `rewards_chosen` and
            `margin`; else empty.
    """

    def __init__(self, logged: Iterable[events.Event] = ()) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.learning_rates: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self.preferences: list[dict[str, float]] = []
        self.times_s: list[float] = []
        self.tokens = 0
        self.peak_memory_bytes = 0
        self.peak_device_bytes: int | None = None
        self.overlap: dict[str, Any] | None = None
        self.experts: dict[str, float] | None = None
        for event in logged:
            self.add(event)

    def add(self, event: events.Event) -> None:
        """Take a step or an evaluation; other events are not part of it."""
        if isinstance(event, events.Evaluate):
            figures = {name: getattr(event, name) for name in EVALUATED}
            figures |= event.preferences or {}
            known = {name: value for name, value in figures.items() if value is not None}
            self.evaluations.append({"step": event.step, **known})
        if not isinstance(event, events.Step):
            return
        self.steps.append(event.step + 1)
        self.losses.append(event.loss)
        self.learning_rates.append(event.learning_rate)
        if event.preferences:
            self.preferences.append(event.preferences)
        self.times_s.append(event.step_time_s)
        self.tokens += event.tokens
        self.overlap = event.overlap or self.overlap
        self.experts = event.experts or self.experts
        self.peak_memory_bytes = max(self.peak_memory_bytes, event.peak_memory_bytes)
        if event.peak_device_bytes is not None:
            self.peak_device_bytes = max(self.peak_device_bytes or 0, event.peak_device_bytes)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the lists by name."""
        names = ("steps", "losses", "learning_rates", "evaluations", "preferences")
        return {name: getattr(self, name) for name in names}

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"RunHistory({len(self.steps)} steps, {len(self.evaluations)} evaluations)"

    @property
    def first_loss(self) -> float:
        """Loss of the first step; not a number before it."""
        return next(iter(self.losses), math.nan)

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps (at least one): single zeroth-order losses are noisy."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return math.fsum(last) / len(last) if last else math.nan

    @property
    def step_time_s(self) -> float:
        """Median time of a step."""
        return median(self.times_s or [0.0])

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all batches over the time of all steps."""
        total = math.fsum(self.times_s)
        return self.tokens / total if total else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the figures that a run's result and its `finish` event share."""
        names = ("first_loss", "final_loss", "step_time_s", "tokens_per_s", "peak_memory_bytes")
        return {name: getattr(self, name) for name in names}

    def eta_s(self, step_time_s: float, left: int) -> float:
        """Time for `left` more steps, from the median of the last steps and the one that just ran."""
        return median([*self.times_s[-_RECENT:], step_time_s]) * left


@dataclass(frozen=True)
class RunResult:
    """The result of a run. Figures are over the whole run, the steps before a resume included.

    Attributes:
        steps: optimizer steps that are done.
        first_loss: loss of the first step.
        final_loss: mean loss of the last tenth of the steps, nats a token.
        step_time_s: median time of a step.
        tokens_per_s: tokens of all batches (padding included) over the time of all steps.
        peak_memory_bytes: highest resident memory of the process.
        peak_device_bytes: highest memory of CUDA tensors, None without CUDA.
        evaluation: the last evaluation since the run was started or resumed.
        best_evaluation: the best evaluation since the run was started or resumed; None if an earlier one was better.
        best_score, best_checkpoint: of the best evaluation of the whole run.
        checkpoint: the newest checkpoint.
        interrupted: the run was asked to stop before its end; its state is saved.
        overlap: of the last step but one, for methods that offload.
        experts: what the last step read of a mixture's experts (`events.Step`), if it reads what tokens need.
        signal: why: `SIGINT`, `SIGTERM`, ... or the reason of `StopRequest.request`.
        stopped_early: the run ended before its last step, because evaluations did not improve (`train.patience`).
        raised: what a callback raised, which ended the run.
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
    experts: dict[str, float] | None = None
    stopped_early: bool = False
    raised: Exception | None = None
    best_evaluation: EvalResult | None = None
