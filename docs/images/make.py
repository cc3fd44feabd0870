"""The picture of a run: its loss, and its evaluations if it has some, from the events that it
wrote.

python docs/images/make.py RUN/events.jsonl docs/images/run.png --title "SmolLM2-135M in the
ExecuTorch runtime"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np

from ondevice.training import events
from ondevice.training.events import read_log

POINTS, LINE, ACCURACY = "#9ab8d8", "#1f5fa8", "#c4541a"


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values at most; as long as `values`."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw(log: Path, out: Path, title: str, window: int) -> None:
    """Draw the run that `log` holds to the PNG file `out`."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = read_log(log)
    steps, start = content.steps(), content.start
    if not steps or start is None:
        raise SystemExit(f"{log} holds no steps")
    loss = np.array([step.loss for step in steps])
    number = np.arange(1, len(loss) + 1)
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), dpi=150)
    axes.plot(number, loss, ".", color=POINTS, markersize=4, label="loss of a step")
    axes.plot(
        number,
        running_mean(loss, window),
        color=LINE,
        linewidth=2,
        label=f"mean of the last {window}",
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats a token)")
    axes.set_xlim(0, len(loss) + 1)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    seen = [entry.event for entry in content.entries if isinstance(entry.event, events.Evaluate)]
    judged = [event for event in seen if event.accuracy is not None]
    if judged:
        other = axes.twinx()
        other.plot([e.step for e in judged], [100 * (e.accuracy or 0) for e in judged], "s-", color=ACCURACY,
                   markersize=5, linewidth=1, label="accuracy, held-out rows")  # fmt: skip
        other.set_ylabel("accuracy (%)", color=ACCURACY)
        other.set_ylim(0, 100)
        other.spines["top"].set_visible(False)
        more = other.get_legend_handles_labels()
        handles, names = handles + more[0], names + more[1]
    axes.legend(handles, names, frameon=False, fontsize=8, loc="center right")
    axes.set_title(title or f"{start.model_source}, {start.backend}", loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--title", default="")
    parser.add_argument("--window", type=int, default=10, help="steps of the running mean")
    arguments = parser.parse_args()
    draw(arguments.log, arguments.out, arguments.title, arguments.window)


if __name__ == "__main__":
    main()
