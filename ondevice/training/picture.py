"""Pictures of runs: losses and evaluations, with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ondevice.training.metrics import RunHistory

SMOOTHED = 10
"""The bold line is the mean over about a tenth of the steps; shorter runs have only their losses."""


def draw(runs: Mapping[str, RunHistory]) -> Figure:
    """Draw the losses and the evaluations of runs by name, one colour a run, and the rewards of
    preferences.

    The figure is no part of pyplot, so a notebook shows it once, and its backend stays as it is.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    evaluated = any(history.evaluations for history in runs.values())
    judged = any("margin" in one for run in runs.values() for one in run.preferences)
    titles = ["training loss", *["evaluation"] * evaluated]
    titles += ["rewards: chosen, and dashed rejected"] * judged
    panels = len(titles)
    figure = _figure_class()(figsize=(5 * panels, 3.6), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for number, (name, history) in enumerate(runs.items()):
        _draw_losses(axes[0], history, f"C{number}", name)
        if evaluated:
            _draw_evaluations(axes[1], history, f"C{number}", name)
        if judged:
            _draw_rewards(axes[-1], history, f"C{number}", name)
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title)
        one.set_xlabel("step")
        one.grid(alpha=0.25)
        one.xaxis.get_major_locator().set_params(integer=True)
        if one.lines:
            one.legend()
    axes[0].set_ylabel("loss" if judged else "nats a token")
    return figure


def _figure_class() -> type[Figure]:
    """Return matplotlib's figure with the PNG by which a notebook shows it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError(
            "plots need the package matplotlib", hint="pip install matplotlib"
        ) from None

    class Picture(Figure):
        """A figure that notebooks show without pyplot."""

        def _repr_png_(self) -> bytes:
            FigureCanvasAgg(self)
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
            return buffer.getvalue()

    return Picture


def _draw_losses(axes: Axes, history: RunHistory, colour: str, name: str) -> None:
    window = len(history) // SMOOTHED
    if window < 2:
        axes.plot(history.steps, history.losses, color=colour, label=name)
        return
    axes.plot(history.steps, history.losses, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(
        history.steps[window - 1 :],
        _means(history.losses, window),
        color=colour,
        linewidth=1.8,
        label=f"{name}: mean of {window} steps",
    )


def _means(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and those before it, from the first complete window on."""
    ends = range(window, len(values) + 1)
    return [sum(values[end - window : end]) / window for end in ends]


def _draw_rewards(axes: Axes, history: RunHistory, colour: str, name: str) -> None:
    for figure, style in (("rewards_chosen", "-"), ("rewards_rejected", "--")):
        pairs = zip(history.steps, history.preferences, strict=False)
        points = [(step, one[figure]) for step, one in pairs if figure in one]
        window = max(1, len(points) // SMOOTHED)
        if not points:
            continue
        steps = [step for step, _ in points][window - 1 :]
        values = _means([value for _, value in points], window)
        label = name if style == "-" else None
        axes.plot(steps, values, style, color=colour, label=label)


def _draw_evaluations(axes: Axes, history: RunHistory, colour: str, name: str) -> None:
    figure = "loss"
    if any("accuracy" in one for one in history.evaluations):
        figure = "accuracy"
        axes.set_ylim(-0.02, 1.02)
    points: list[tuple[Any, Any]] = [
        (one["step"], one[figure]) for one in history.evaluations if figure in one
    ]
    if points:
        axes.plot(*zip(*points), color=colour, marker="o", label=f"{name}: {figure}")
