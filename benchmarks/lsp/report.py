"""Report the runs of `benchmarks.lsp.quality`: rows of the result, the best rate of every method,
and the plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = [
    {"key": "task", "title": "Task"},
    {"key": "method", "title": "Method"},
    {"key": "learning_rate", "title": "Learning rate"},
    {"key": "best_rate", "title": "Best rate"},
    {"key": "steps", "title": "Steps"},
    {"key": "mean_best_loss", "title": "Best validation loss, mean", "digits": 4},
    {"key": "deviation", "title": "Deviation", "digits": 4},
    {"key": "mean_last_loss", "title": "Last", "digits": 4},
    {"key": "last_deviation", "title": "Deviation", "digits": 4},
    {"key": "mean_accuracy", "title": "Best accuracy, mean", "digits": 3},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "look_s", "title": "Step with a look or decomposition (s)"},
    {"key": "memory_bytes", "title": "Optimizer and gradients (MB)", "digits": 1, "scale": 1e-6},
    {"key": "bias_before", "title": "Bias before"},
    {"key": "bias_after", "title": "after"},
    {"key": "held_out_bias", "title": "on another batch"},
]
TIMED = ("step_s", "look_s", "seconds_curves")
"""Of a row: None or empty if runs were next to each other."""
BASE = "before training"
COLORS = {
    "full": "#222222", "lsp": "#1f5fa8", "lsp-random": "#7fb2e5", "galore": "#c4541a",
    "galore-4": "#e8a45c", "lora": "#3a8f4d",
}  # fmt: skip


def rows_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a task, method and rate; `best_rate` marks a method's lowest mean best loss on a
    task.

    Args:
        runs: as `runs.train` returns them, and for every task its evaluation under the method BASE.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["method"], run["learning_rate"]), []).append(run)
    rows = [_row(group) for group in groups.values()]
    order = {task: i for i, task in enumerate(dict.fromkeys(row["task"] for row in rows))}
    rows.sort(key=lambda row: (order[row["task"]], row["method"] != BASE))
    return mark(rows)


def mark(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Set `best_rate` of every row; the first of equals wins, and a run that diverged never does.
    Where rates have different numbers of seeds, those with the most are compared."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["task"], row["method"])
        diverged = any(step is not None for step in row["diverged_at"])
        if row["mean_best_loss"] is not None and row["method"] != BASE and not diverged:
            if key not in best or _standing(row) < _standing(best[key]):
                best[key] = row
    for row in rows:
        row["best_rate"] = (
            row is best.get((row["task"], row["method"])) if row["method"] != BASE else None
        )
    return rows


def _standing(row: dict[str, Any]) -> tuple[int, float]:
    return -len(row["seeds"]), row["mean_best_loss"]


def _row(group: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and every seed's figures; curves are lists by seed of lists by evaluation, the first
    before training."""
    first = max(group, key=lambda run: len(run["evaluated_at"]))
    trained = [run["losses"][1:] if first["method"] != BASE else run["losses"] for run in group]
    best = [min(filter(_finite, losses), default=None) for losses in trained]
    last = [losses[-1] if losses and _finite(losses[-1]) else None for losses in trained]
    accuracies = [run["accuracies"][1:] or run["accuracies"] for run in group]
    row = {
        "task": first["task"], "method": first["method"], "learning_rate": first["learning_rate"], "best_rate": None,
        "steps": first["evaluated_at"][-1], "seeds": [run["seed"] for run in group],
        "diverged_at": [run["diverged_at"] for run in group],
        "best_loss": best, "mean_best_loss": _mean(best), "deviation": _deviation(best),
        "last_loss": last, "mean_last_loss": _mean(last), "last_deviation": _deviation(last),
    }  # fmt: skip
    judged = [values for values in accuracies if values and values[0] is not None]
    top, final = [max(values) for values in judged], [values[-1] for values in judged]
    row |= {"mean_accuracy": _mean(top), "accuracy_deviation": _deviation(top), "accuracy": top}
    row |= {"final_accuracy": final, "mean_final_accuracy": _mean(final)}
    timed = [run["step_s"] for run in group if run["step_s"] is not None]
    row |= {
        "step_s": timed or None,
        "look_s": [s for run in group for s in run["look_s"] or ()] or None,
    }
    row |= {key: first[key] for key in ("memory_bytes", "state_bytes", "gradient_bytes")}
    looks = [run["looks"] for run in group if run["looks"]]
    for key, name in (
        ("before", "bias_before"),
        ("after", "bias_after"),
        ("held_out", "held_out_bias"),
    ):
        row[name] = [_mean([look[key] for look in at]) for at in zip(*looks, strict=False)] or None
    row |= {"looks": looks or None, "evaluated_at": first["evaluated_at"]}
    row |= {"loss_curves": [[_number(x) for x in run["losses"]] for run in group]}
    row |= {"train_loss_curves": [[_number(x) for x in run["train_losses"]] for run in group]}
    row |= {"seconds_curves": [run["seconds"] for run in group if run["seconds"] is not None]}
    row |= {"accuracy_curves": [run["accuracies"] for run in group] if judged else None}
    return row


def ranking(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For every task a sentence with the methods at their best rate, lowest loss first."""
    notes = []
    for task in dict.fromkeys(row["task"] for row in rows):
        chosen = [row for row in rows if row["task"] == task and row["best_rate"]]
        words = []
        for row in sorted(chosen, key=lambda row: row["mean_best_loss"]):
            spread = "" if row["deviation"] is None else f" ± {row['deviation']:.4f}"
            words.append(
                f"{row['method']} {row['mean_best_loss']:.4f}{spread} at {row['learning_rate']:g}"
            )
        if words:
            notes.append(f"{task}: best validation loss, nats a token: {', '.join(words)}.")
    return notes


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Result files as one document: of rows of one task, method and rate, that of more seeds or of
    the later file, with the other's seconds if it has none, or those of another rate: they do not
    depend on it."""
    documents = [json.loads(path.read_text()) for path in paths]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for document in documents for row in document["rows"]):
        key = (row["task"], row["method"], row["learning_rate"])
        pair: list[dict[str, Any]] = [rows.get(key) or row, row]
        fewer, more = sorted(pair, key=lambda one: len(one["seeds"]))
        rows[key] = more if more["step_s"] else {**more, **_times(fewer)}
    timed = {(row["task"], row["method"]): row for row in rows.values() if row["step_s"]}
    for row in rows.values():
        other = timed.get((row["task"], row["method"]), row)
        if not row["step_s"] and other["evaluated_at"] == row["evaluated_at"]:
            row |= _times(other)
    names = list(dict.fromkeys(task for task, _, _ in rows))
    ordered = sorted(
        rows.values(), key=lambda row: (names.index(row["task"]), row["method"] != BASE)
    )
    document = documents[0] | {"rows": mark(ordered)}
    if len(documents) > 1:
        kept = list(
            dict.fromkeys(
                note
                for d in documents
                for note in d.get("notes", [])
                if "best validation" not in note
            )
        )
        more = [f"Also run: `{other['command']}`." for other in documents[1:]]
        document["notes"] = [*kept, *more, *ranking(ordered)]
    return document


def _times(row: dict[str, Any]) -> dict[str, Any]:
    """Those of TIMED that the row has: one that was committed has no curves."""
    return {name: row[name] for name in TIMED if name in row}


def plot(document: dict[str, Any], path: Path) -> None:
    """Validation loss against steps and, where runs were timed, against seconds: mean and deviation
    over seeds at each method's best rate. The loss before training may lie above the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row["task"] for row in document["rows"] if row["best_rate"]))
    if not tasks:
        raise SystemExit("--plot: no run has a loss")
    if any("loss_curves" not in row for row in document["rows"]):
        raise SystemExit(
            "--plot: expected files that --out wrote, received a committed result, which has no curves"
        )
    figure, grid = pyplot.subplots(
        len(tasks), 2, figsize=(10, 3.3 * len(tasks)), dpi=150, squeeze=False, sharey="row"
    )
    for task, panels in zip(tasks, grid, strict=True):
        trained: list[float] = []
        for row in document["rows"]:
            if row["task"] != task or not row["best_rate"]:
                continue
            means, low, high = _band(row["loss_curves"])
            trained += means[1:]
            at = {
                "steps": row["evaluated_at"],
                "seconds": [_mean(column) for column in _columns(row["seconds_curves"])],
            }
            if not at["seconds"]:
                del at["seconds"]
            color = COLORS.get(row["method"], "#888888")
            label = f"{row['method']} ({row['learning_rate']:g})"
            for axes, values in zip(panels, at.values(), strict=False):
                axes.plot(values[: len(means)], means, "-", color=color, linewidth=1.6, label=label)
                axes.fill_between(
                    values[: len(means)], low, high, color=color, alpha=0.18, linewidth=0
                )
        for axes, unit in zip(panels, ("steps", "seconds of training"), strict=True):
            axes.set_xlabel(unit)
            axes.set_axis_on() if axes.lines else axes.set_axis_off()
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("validation loss (nats a token)")
        if trained:
            margin = 0.2 * (max(trained) - min(trained))
            panels[0].set_ylim(min(trained) - margin, max(trained) + 2 * margin)
        panels[0].set_title(task, loc="left", fontsize=10)
        panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _band(curves: list[list[float | None]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, and mean minus and plus the deviation, of every evaluation that all seeds reached."""
    means, low, high = [], [], []
    for values in zip(*curves, strict=False):
        reached = [value for value in values if value is not None]
        if len(reached) < len(values):
            break
        mean, spread = statistics.fmean(reached), _deviation(reached) or 0.0
        means.append(mean)
        low.append(mean - spread)
        high.append(mean + spread)
    return means, low, high


def _columns(curves: list[list[Any]]) -> list[list[Any]]:
    """The seeds' values of every evaluation that one of them reached."""
    return [
        [curve[i] for curve in curves if i < len(curve)]
        for i in range(max(map(len, curves), default=0))
    ]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _mean(values: Sequence[Any]) -> float | None:
    """None if a value is missing or there is none."""
    return statistics.fmean(values) if values and None not in values else None


def _deviation(values: Sequence[Any]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 and None not in values else None
