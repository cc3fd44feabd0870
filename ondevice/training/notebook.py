"""A run in a notebook: one output that is drawn again as the run goes.

It needs IPython's `display` and no widgets. Front ends that show HTML get a bar; others get the
same lines as text. A notebook that is saved keeps the last state.
"""

from __future__ import annotations

import html
import time
from dataclasses import dataclass, field
from typing import Any

from ondevice.core.config import size_text
from ondevice.core.registry import method
from ondevice.training import events
from ondevice.training.progress import describe, describe_data, duration

INTERVAL_S = 0.2
"""Seconds between two drawings."""
BAR_LETTERS = 30
MOST_WARNINGS = 5


@dataclass
class View:
    """What the output shows; IPython takes `_repr_html_` or the text."""

    head: list[str] = field(default_factory=list)
    """How the run was decided, and its rows."""
    steps: int = 0
    done: int = 0
    figures: str = ""
    evaluation: str = ""
    warnings: list[str] = field(default_factory=list)
    end: str = ""

    def lines(self) -> list[str]:
        """Return the text below the bar."""
        left_out = len(self.warnings) - MOST_WARNINGS
        lines = [self.evaluation, *(f"warning: {one}" for one in self.warnings[:MOST_WARNINGS])]
        if left_out > 0:
            lines.append(f"and {left_out} more warnings, in events.jsonl")
        return [line for line in [*lines, self.end] if line]

    def __repr__(self) -> str:
        filled = BAR_LETTERS * self.done // max(1, self.steps)
        bar = f"[{'#' * filled}{'.' * (BAR_LETTERS - filled)}] {self.done}/{self.steps}"
        shown = [f"{bar}  {self.figures}".rstrip()] if self.steps else []
        return "\n".join([*self.head, *shown, *self.lines()])

    def _repr_html_(self) -> str:
        def paragraph(lines: list[str]) -> str:
            return "<br>".join(html.escape(line, quote=False) for line in lines)

        bar = ""
        if self.steps:
            bar = (
                f'<progress value="{self.done}" max="{self.steps}" style="width:20em"></progress> '
                f"{self.done}/{self.steps} &nbsp;{html.escape(self.figures)}"
            )
        parts = [paragraph(self.head), bar, paragraph(self.lines())]
        return "<div>" + "<br>".join(part for part in parts if part) + "</div>"


class NotebookSink:
    """Shows events in the output of the cell that is running. A context manager."""

    def __init__(self) -> None:
        self.view = View(head=["reading the rows and the model ..."])
        self._handle: Any = None
        self._drawn_s = 0.0
        self._draw()

    def __enter__(self) -> NotebookSink:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not self.view.end:
            if not self.view.steps:
                self.view.head = []
            self.view.end = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            self._draw()

    def __call__(self, event: events.Event) -> None:
        view = self.view
        match event:
            case events.Start():
                view.head = describe_start(event)
                view.steps = event.steps
            case events.Resume():
                view.head = [f"resumed at step {event.step} of {event.steps}"]
                view.steps, view.done = event.steps, event.step
            case events.Step():
                view.done = event.step + 1
                view.figures = (
                    f"loss {event.loss:.4f}  {event.tokens_per_s:,.0f} tokens/s  "
                    f"{duration(event.eta_s)} left"
                )
            case events.Evaluate():
                view.evaluation = f"step {event.step}: evaluation {describe(event)}"
            case events.Warning():
                view.warnings.append(event.message)
            case events.Interrupt():
                view.end = (
                    f"stopped by {event.signal}; {event.step} steps are saved, "
                    "`resume=True` with the same `out` goes on"
                )
            case events.Error():
                view.end = f"error: {event.error.get('message', '')}"
            case events.Finish():
                view.figures = ""
                view.end = (
                    f"loss {event.first_loss:.4f} -> {event.final_loss:.4f}, "
                    f"{event.step_time_s:.3g} s a step, {size_text(event.peak_memory_bytes)} peak"
                )
                if event.reason:
                    view.end = f"{event.reason}; {view.end}"
        seldom = not isinstance(event, events.Step)
        if seldom or time.monotonic() - self._drawn_s >= INTERVAL_S:
            self._draw()

    def end(self, where: str) -> None:
        """Show where the result is."""
        self.view.end = f"{self.view.end}; {where}".removeprefix("; ")
        self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        self._drawn_s = time.monotonic()
        if self._handle is None:
            self._handle = display(self.view, display_id=True)
        else:
            self._handle.update(self.view)


def describe_start(start: events.Start) -> list[str]:
    """Describe in lines which method runs and why, the other choices, and the rows with those left out."""
    name = str((start.config.get("method") or {}).get("name", ""))
    lines = [sentence.replace("`--method`", "`method=`") for sentence in start.said]
    if name and not any(line.startswith(f"method {name}") for line in lines):
        lines.insert(0, f"method {name}, as you named it: {method(name).summary}")
    for part, figures in start.data.items():
        lines += describe_data(part, figures)
    return lines
