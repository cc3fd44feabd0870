"""A run in the terminal, on stderr: a bar if there is a terminal, a line now and then if there is none.

It reads events and nothing else, so it shows a live run and a log alike. Losing the terminal does not stop
a run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from ondevice.core.config import size_text
from ondevice.training import events

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINES = 20
"""About so many lines a run has without a terminal."""


REASONS = 5
"""Reasons of rows left out that are shown."""


class ProgressSink:
    """Shows events. A context manager and a callback.

    Args:
        silent: show nothing (`--json`, `--quiet`).
        every: steps between two lines if stderr is not a terminal; by default about 20 lines a run.
        summary: end with a line about the whole run.
        stream: stderr by default.
    """

    def __init__(
        self,
        *,
        silent: bool = False,
        every: int | None = None,
        stream: TextIO | None = None,
        summary: bool = True,
    ) -> None:
        self.stream = stream or sys.stderr
        self.silent = silent
        self.every = every
        self.summary = summary
        self.steps = 0
        self._overlap: dict[str, Any] | None = None
        self._experts: dict[str, float] | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressSink:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stop()

    def __call__(self, event: events.Event) -> None:
        if self.silent:
            return
        try:
            self._show(event)
        except (OSError, ValueError):  # the terminal is gone, or the stream is closed
            self.silent = True

    def _show(self, event: events.Event) -> None:
        match event:
            case events.Start() | events.Resume():
                self.steps = event.steps
                if isinstance(event, events.Resume):
                    changes = [
                        f"{key} {_short(old)} -> {_short(new)}"
                        for key, (old, new) in event.changed.items()
                    ]
                    told = ""
                    if changes:
                        told = f" ({', '.join(changes)})"
                    self._say(f"resumed at step {event.step} of {event.steps}{told}")
                else:
                    for sentence in event.said:
                        self._say(sentence)
                    for part, figures in event.data.items():
                        self._say("\n".join(describe_data(part, figures)))
                if self.stream.isatty():
                    self._begin(event.step if isinstance(event, events.Resume) else 0)
            case events.Step():
                self._step(event)
            case events.Evaluate():
                self._say(f"step {event.step}: evaluation {describe(event)}")
            case events.Warning():
                self._say(f"warning: {event.message}")
            case events.Interrupt():
                self._say(
                    f"stopped by {event.signal}; {event.step} steps are saved, `--resume` goes on"
                )
            case events.Finish():
                self._stop()
                if self._overlap:
                    self._say(describe_overlap(self._overlap))
                if self._experts:
                    self._say(describe_experts(self._experts))
                if event.reason:
                    self._say(event.reason)
                if not self.summary:
                    return
                self._say(
                    f"{event.steps} steps, loss {event.first_loss:.4f} -> {event.final_loss:.4f}, "
                    f"{event.step_time_s:.3g} s a step, {size_text(event.peak_memory_bytes)} peak"
                )

    def _step(self, event: events.Step) -> None:
        done = event.step + 1
        self._overlap = event.overlap or self._overlap
        self._experts = event.experts or self._experts
        figures = (
            f"loss {event.loss:.4f}  {event.tokens_per_s:,.0f} tokens/s  {size_text(_memory(event))}  "
            f"{duration(event.eta_s)} left"
        )
        if event.preferences:
            figures += describe_preferences(event.preferences)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, figures=figures)
            return
        every = self.every or max(1, self.steps // LINES)
        if done == 1 or done % every == 0 or done == self.steps:
            self._say(f"step {done}/{self.steps}  {figures}")

    def _begin(self, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._stop()
        console = Console(file=self.stream, highlight=False)
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=self.steps, completed=done, figures="")
        self._progress.start()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False)
        else:
            print(text, file=self.stream, flush=True)


class RowProgress:
    """Rows of an evaluation with the time that is left, on stderr. A context manager; called with (done, all)."""

    def __init__(self, *, silent: bool = False, stream: TextIO | None = None) -> None:
        self.silent = silent
        self.stream = stream or sys.stderr
        self._started = time.perf_counter()

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.silent and self.stream.isatty():
            with contextlib.suppress(OSError):
                print(file=self.stream)

    def __call__(self, done: int, rows: int) -> None:
        """One more row is done, of all `rows`; 0 rows are done when the first one begins."""
        if done == 0:
            self._started = time.perf_counter()
        terminal = not self.silent and self.stream.isatty()
        if (
            self.silent
            or not done
            or not (terminal or done in (1, rows) or done % max(1, rows // LINES) == 0)
        ):
            return
        left = (time.perf_counter() - self._started) / done * (rows - done)
        text = f"row {done}/{rows}  {duration(left)} left"
        try:
            text = f"\r{text}\x1b[K" if terminal else f"{text}\n"
            print(text, end="", file=self.stream, flush=True)
        except (OSError, ValueError):  # the terminal is gone, or the stream is closed
            self.silent = True


def describe_data(part: str, figures: dict[str, Any]) -> list[str]:
    """Describe the rows of a part in lines: how they were understood, what was left out and what was cut, and why."""
    lines = [f"{part} data: {note}" for note in figures["notes"]]
    left_out = sum(figures["left_out"].values())
    told = f"{part} data: {figures['sequences']:,} sequences, {left_out:,} rows left out, "
    lines.append(f"{told}{figures['cut']:,} cut to {figures['max_length_tokens']} tokens")
    if unread := figures.get("unread"):
        named = ", ".join(f"{name} ({count:,})" for name, count in unread.items())
        lines.append(f"{part} data: columns and keys that nothing reads: {named}")
    reasons = list(figures["left_out"].items())
    lines += [f"  {count:,} left out: {reason}" for reason, count in reasons[:REASONS]]
    if reasons[REASONS:]:
        lines.append(f"  {sum(count for _, count in reasons[REASONS:]):,} for other reasons")
    return lines


def describe(event: events.Evaluate) -> str:
    """Describe an evaluation's figures in one line."""
    parts = [f"loss {event.loss:.4f}"]
    for name in ("accuracy", "f1", "exact_match"):
        value = getattr(event, name)
        if value is not None:
            parts.append(f"{name.replace('_', ' ')} {value:.4f}")
    if event.metric is not None and event.metric_value is not None:
        parts.append(f"{event.metric.replace('_', ' ')} {event.metric_value:.4f}")
    if event.majority_share is not None:
        parts.append(f"(majority class {event.majority_share:.4f})")
    if event.preferences:
        parts.append(describe_preferences(event.preferences).strip())
    return ", ".join(parts) + " (best so far)" * event.best


def describe_preferences(figures: dict[str, float]) -> str:
    """Describe how a step or an evaluation tells preferred answers from others."""
    names = ("accuracy", "margin", "reward", "kl")
    return "".join(f"  {name} {figures[name]:.3g}" for name in names if name in figures)


def describe_overlap(overlap: dict[str, Any]) -> str:
    """Describe in one line what bounded a step of a method that offloads."""
    lanes = ("forward", "backward", "h2d", "d2h", "comm", "update", "disk")
    busy = ", ".join(
        f"{lane} {overlap[f'{lane}_s']:.3g}" for lane in lanes if overlap.get(f"{lane}_s")
    )
    factor = float(overlap["hiding_factor"])
    idle = overlap["idle_s"] / max(overlap["wall_s"], 1e-9)
    text = f"bound by {overlap['bound']} (s: {busy}); hiding factor {factor:.2f}, no computation {idle:.0%} of the time"
    limit = overlap.get("simulated_gb_per_s")  # logs of before have none
    if limit is None:
        return text
    return f"{text}; simulated bus of {limit:g} GB/s"


def describe_experts(experts: dict[str, float]) -> str:
    """Describe in one line what a step read of a mixture's experts."""
    each = size_text(round(experts["bytes_per_token"]))
    return (
        f"the last step read {experts['read']:g} of {experts['all']:g} experts, "
        f"{size_text(round(experts['bytes']))}: {each} a token"
    )


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _memory(event: events.Step) -> int:
    if event.peak_device_bytes is None:
        return event.peak_memory_bytes
    return event.peak_device_bytes


def in_notebook() -> bool:
    """Return True in a kernel of Jupyter, Colab or an editor; False in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
