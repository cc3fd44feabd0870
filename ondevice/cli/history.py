"""`ondevice runs`: the runs on this disk."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ondevice.cli import common
from ondevice.cli.common import err, mebibytes, out, print_json, table
from ondevice.core.errors import ConfigError
from ondevice.core.table import Table

app = typer.Typer(
    help="List, show, compare, plot or remove the runs on this disk.", no_args_is_help=True
)
Run = Annotated[Path, typer.Argument(help="Folder of a run.")]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs.")]
Picture = Annotated[
    Path | None, typer.Option("--out", "-o", help="Picture to write: .png, .svg or .pdf.")
]


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Folder to search.")] = Path("runs"),
    json: common.Json = False,
) -> None:
    """List the runs in a folder and its subfolders, the newest last."""
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
        rows.append(
            [
                *(values[key] for key in ("run", "state", "model", "method")),
                f"{values['steps']}/{values['asked_steps']}",
                _number(values["final_loss"]),
                _number(values["best_accuracy"]),
                _when(run.started_s),
            ]
        )
    _grid(head, rows)


@app.command()
def show(run: Run, json: common.Json = False) -> None:
    """Show a run's settings, figures, evaluations, resumes and checkpoints."""
    from ondevice.training.runs import read_run

    summary = read_run(run)
    if json:
        values = summary.to_dict() | {
            "config": summary.config,
            "evaluations": [event.to_dict() for event in summary.evaluations],
            "resumes": [event.to_dict() for event in summary.resumes],
        }
        print_json(values)
        return
    values = summary.to_dict()
    del values["started_s"], values["checkpoints"]
    values["started"] = _when(summary.started_s)
    values["peak_memory_bytes"] = mebibytes(values["peak_memory_bytes"])
    values["checkpoints"] = ", ".join(summary.checkpoints)
    table(values)
    for event in summary.resumes:
        changes = ", ".join(
            f"{key} {str(old)[:20]} -> {str(new)[:20]}" for key, (old, new) in event.changed.items()
        )
        text = f"resumed at step {event.step}"
        out.print(f"{text}: {changes}" if changes else text, markup=False)
    for event in summary.evaluations:
        text = f"step {event.step}: loss {event.loss:.4f}"
        if event.accuracy is not None:
            text += f", accuracy {_number(event.accuracy)}"
        out.print(f"{text}  best so far" if event.best else text, markup=False)


@app.command()
def compare(runs: Runs, json: common.Json = False) -> None:
    """Compare runs side by side: figures, and the settings that differ."""
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
def plot(runs: Runs, target: Picture = None, json: common.Json = False) -> None:
    """Plot the losses and evaluations of runs in one picture (default: runs.png)."""
    from ondevice.training.runs import plot_runs

    picture = picture_file(target, "runs.png")
    plot_runs(runs, picture)
    common.show({"picture": str(picture)}, str(picture), json)


def picture_file(target: Path | None, default: str) -> Path:
    """Return the file of a plot, and refuse one that is not a picture."""
    picture = target or Path(default)
    if picture.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(
            "unknown kind of picture", expected=".png, .svg or .pdf", received=picture.name
        )
    return picture


@app.command()
def remove(
    runs: Runs,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only name what would be deleted.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Delete runs with their checkpoints and adapters."""
    from ondevice.training.runs import read_run, remove_run

    for path in runs:  # nothing is deleted unless all of them are runs
        read_run(path)
    folders = [str(path) for path in runs]
    if dry_run:
        values = {"removed": folders, "dry_run": True}
        common.show(values, f"would delete {', '.join(folders)}", json)
        return
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                "cannot ask without a terminal", expected="--yes", received="no terminal"
            )
        typer.confirm(f"delete {', '.join(folders)}?", abort=True, err=True)
    for path in runs:
        remove_run(path)
    if json:
        print_json({"removed": folders})


def _grid(head: tuple[str, ...], rows: list[list[Any]]) -> None:
    if not out.is_terminal:  # in a file or a pipe each run stays on one line
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
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
