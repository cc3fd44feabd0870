"""What `ondevice eval` does once its flags are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ondevice.api.benchmark import benchmark
from ondevice.api.evaluate import evaluate
from ondevice.cli.common import err, print_json, table
from ondevice.core.errors import INTERRUPTED_EXIT_CODE
from ondevice.data.readers.files import check_source
from ondevice.data.reading import named_task
from ondevice.data.tasks.benchmarks import BENCHMARKS, find_benchmark
from ondevice.models.load import check_model
from ondevice.training.progress import RowProgress

__all__ = ["BENCHMARKS", "check", "evaluate_rows", "run_benchmark"]


def check(source: str, data: str, task: str | None, revision: str | None) -> str | None:
    """Report mistakes before the frameworks are imported, and return the benchmark's name, if any.

    Raises:
        ConfigError, DataError, ModelError: the rows, the task or the model cannot be used.
    """
    named = find_benchmark(task)
    if named is None:
        check_source(data)
        if task is not None:
            named_task(task, data)
    if not Path(source).is_dir():  # a folder may be an artifact, or a network of a method
        check_model(source, revision)
    return named


def evaluate_rows(source: str, data: Path, json: bool, **options: Any) -> None:
    """Evaluate rows, and print loss and accuracy."""
    result = evaluate(source, data, most_rows=options.pop("rows"), **options)
    figures = result.figures()
    if json:
        interval = {"accuracy_interval": result.accuracy_interval}
        print_json(figures | {"correct": result.correct} | interval)
    else:
        accuracy = _accuracy(figures, result.accuracy_interval)
        table({"correct": result.correct} | figures | {"accuracy": accuracy})


def run_benchmark(
    source: str, task: str, data: Path, json: bool, quiet: bool, **options: Any
) -> None:
    """Run a benchmark, and print its figures."""
    with RowProgress(silent=json or quiet) as progress:
        result = benchmark(source, task, data, on_row=progress, **options)
    figures = result.figures()
    if json:
        print_json(figures)
    else:
        groups = {}
        for name, group in result.groups.items():
            groups[name] = _accuracy(group, group.get("accuracy_interval")) or group["rows"]
        table(groups)
        hidden = ("groups", "accuracy_interval", "interrupted")
        shown = {name: value for name, value in figures.items() if name not in hidden}
        table(shown | {"accuracy": _accuracy(figures, result.accuracy_interval)})
        if task == "mt_bench":
            err.print("not judged: the answers are in FastChat's format, for a judge", markup=False)
    if result.interrupted:
        err.print(
            f"stopped after {result.rows} rows; their answers are in {result.answers}", markup=False
        )
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _accuracy(figures: dict[str, Any], interval: tuple[float, float] | None) -> str | None:
    """Format an accuracy with its interval and its rows; return None without one."""
    if figures.get("accuracy") is None or interval is None:
        return None
    low, high = interval
    return f"{figures['accuracy']:.4f} ({low:.4f} to {high:.4f}, 95%) of {figures['rows']}"
