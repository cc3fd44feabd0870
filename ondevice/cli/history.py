"""`ondevice runs`: the runs on this disk."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import err, mebibytes, out, print_json, table
from ondevice.core.errors import ConfigError

app = typer.Typer(
    help="The runs on this disk: list, show, compare, plot, remove.", no_args_is_help=True
)
Run = Annotated[Path, typer.Argument(help="A run's folder.")]
Runs = Annotated[list[Path], typer.Argument(help="Runs' folders.")]


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs"),
    json: common.Json = False,
) -> None:
    """List the runs at and below a folder, the newest last."""
    from ondevice.training.runs import find_runs, read_run

    runs = [read_run(path) for path in find_runs(folder)]
    if json:
        print_json({"runs": [run.to_dict() for run in runs]})
        return
    if not runs:
        err.print(f"no runs below {folder}", markup=False)
        return
    head = ("run", "state", "model", "method", "steps", "loss", "best accuracy", "started")
    rows = []
    for run in runs:
        values = run.to_dict()
        rows.append([values["run"], values["state"], values["model"], values["method"],
                     f"{values['steps']}/{values['asked_steps']}", _number(values["final_loss"]),
                     _number(values["best_accuracy"]), _when(run.started_s)])  # fmt: skip
    _grid(head, rows)


@app.command()
def show(run: Run, json: common.Json = False) -> None:
    """Show a run: its settings, figures, evaluations, resumes and checkpoints."""
    from ondevice.training.runs import read_run

    summary = read_run(run)
    if json:
        seen = [event.to_dict() for event in summary.evaluations]
        resumes = [event.to_dict() for event in summary.resumes]
        print_json(
            summary.to_dict() | {"config": summary.config, "evaluations": seen, "resumes": resumes}
        )
        return
    values = {
        key: value
        for key, value in summary.to_dict().items()
        if key not in ("checkpoints", "started_s")
    }
    values |= {
        "started": _when(summary.started_s),
        "peak_memory_bytes": mebibytes(values["peak_memory_bytes"]),
    }
    table(values | {"checkpoints": ", ".join(summary.checkpoints)})
    for event in summary.resumes:
        changes = ", ".join(
            f"{key} {str(old)[:20]} -> {str(new)[:20]}" for key, (old, new) in event.changed.items()
        )
        out.print(
            f"resumed at step {event.step}" + (f": {changes}" if changes else ""), markup=False
        )
    for event in summary.evaluations:
        mark = "  best so far" if event.best else ""
        out.print(
            f"step {event.step}: loss {event.loss:.4f}, accuracy {_number(event.accuracy)}{mark}",
            markup=False,
        )


@app.command()
def compare(runs: Runs, json: common.Json = False) -> None:
    """Put runs side by side: their figures, and the settings in which they differ."""
    from ondevice.training.runs import FIGURES, differences, read_run

    summaries = [read_run(path) for path in runs]
    settings = differences(summaries)
    if json:
        print_json({"runs": [summary.to_dict() for summary in summaries], "settings": settings})
        return
    rows = [
        [name.replace("_", " "), *(_number(summary.figures[name]) for summary in summaries)]
        for name in FIGURES
    ]
    rows += [[key, *(_number(value) for value in values)] for key, values in settings.items()]
    _grid(("", *(str(summary.path) for summary in summaries)), rows)


@app.command()
def plot(runs: Runs, target: common.Out = None, json: common.Json = False) -> None:
    """Draw losses and evaluations of runs into one picture: --out runs.png, .svg or .pdf."""
    from ondevice.training.runs import plot_runs

    target = target or Path("runs.png")
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(
            "pictures of another kind", expected=".png, .svg or .pdf", received=target.name
        )
    plot_runs(runs, target)
    print_json({"picture": str(target)}) if json else out.print(str(target), markup=False)


@app.command()
def remove(
    runs: Runs,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted.")] = False,
    json: common.Json = False,
) -> None:
    """Delete runs with their checkpoints and adapters."""
    from ondevice.training.runs import read_run, remove_run

    for path in runs:  # all of them are runs before the first one goes
        read_run(path)
    if dry_run:
        folders = [str(path) for path in runs]
        values = {"removed": folders, "dry_run": True}
        print_json(values) if json else out.print(
            f"would delete {', '.join(folders)}", markup=False
        )
        return
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("nobody can be asked here", expected="--yes", received="no terminal")
        typer.confirm(f"delete {', '.join(map(str, runs))}?", abort=True, err=True)
    for path in runs:
        remove_run(path)
    print_json({"removed": [str(path) for path in runs]}) if json else None


def _grid(head: tuple[str, ...], rows: list[list[Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if (
        not out.is_terminal
    ):  # into a file or a pipe each run stays on one line, however long its path
        cells = [[str(cell) for cell in row] for row in (head, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        for row in cells:
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        return
    grid = Table(box=None, pad_edge=False)
    for name in head:
        grid.add_column(escape(name), overflow="fold")
    for row in rows:
        grid.add_row(*(escape(str(cell)) for cell in row))
    out.print(grid)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
