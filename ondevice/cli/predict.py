"""`ondevice predict`: the rows of a file, with a prediction for each."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common, flags
from ondevice.cli.common import err, one_of, print_json, table
from ondevice.core.errors import INTERRUPTED_EXIT_CODE, ConfigError
from ondevice.data.readers.files import check_source
from ondevice.data.writing import check_suffix
from ondevice.training.progress import RowProgress
from ondevice.training.trained import find_trained

SHOWN = 5
"""Rows that could not be predicted and are shown with their reason; `--json` lists all."""


def predict(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TRAINED", help="What was trained: a run, an adapter, a model or an artifact."
        ),
    ],
    first: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Rows to predict: the same as --data.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help=f"Rows to predict: {common.ROWS}.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write: .csv, .tsv, .jsonl or .xlsx."),
    ] = None,
    model: flags.Model = None,
    revision: flags.Revision = None,
    dtype: flags.Dtype = None,
    adapter: common.AdapterPath = None,
    task: flags.Task = None,
    columns: flags.Columns = None,
    rows: Annotated[
        int | None, typer.Option("--rows", "--limit", min=1, help="Predict only this many rows.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            help="Most tokens per generated answer (default: twice the longest trained one).",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file, and begin again.")
    ] = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Predict the rows of a file with what was trained. The rows need no labels.

    Writes the file's columns and `prediction`; for labels also `probability`, and that of each label. After a
    kill or Ctrl-C the same command goes on."""
    file = one_of(first, data, "data")
    if file is None:
        raise ConfigError("no rows are given", expected="FILE, or --data FILE")
    if target is None:
        raise ConfigError("no output is given", expected="--out FILE, such as predictions.csv")
    # Mistakes are reported before the frameworks are imported, which takes seconds.
    check_suffix(target)
    check_source(file)
    find_trained(source, model)
    from ondevice.api.predict_file import predict_file

    options: dict[str, Any] = {"model": model, "revision": revision, "adapter": adapter}
    if dtype is not None:
        options["dtype"] = dtype
    with RowProgress(silent=json or quiet) as progress:
        result = predict_file(
            source,
            file,
            target,
            rows=rows,
            overwrite=overwrite,
            on_row=progress,
            task=task,
            columns=flags.columns_of(columns),
            max_new_tokens=max_new_tokens,
            **options,
        )
    summary = result.summary()
    if json:
        print_json(summary)
    else:
        _show(summary)
    if result.is_interrupted:
        words = [word for word in common.command_line if word != "--overwrite"]
        command = shlex.join(["ondevice", *words])
        done = len(result.predictions)
        err.print(
            f"stopped after {done} of {result.rows} rows, which are kept. To go on: {command}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _show(summary: dict[str, Any]) -> None:
    """Print the summary, and warn of rows without a prediction or with a cut one."""
    failed = summary["not_predicted"]
    shown = {name: summary[name] for name in ("out", "rows", "predicted", "accuracy", "seconds_s")}
    shown["not_predicted"] = len(failed) or None
    shown["resumed"] = summary["resumed"] or None
    if summary["interrupted"]:
        del shown["out"]
    if summary["accuracy"] is not None:
        of_rows = f"{summary['correct']} of {summary['compared']} rows whose answer is known"
        shown["accuracy"] = f"{summary['accuracy']:.4f} ({of_rows})"
    table(shown)
    for row in failed[:SHOWN]:
        err.print(f"row {row['row']}: {row['reason']}", markup=False, soft_wrap=True)
    if failed[SHOWN:]:
        err.print(f"and {len(failed) - SHOWN} more; --json lists all", markup=False)
    if unseen := summary["unseen_labels"]:
        count = sum(unseen.values())
        rows = "1 row has a label that was" if count == 1 else f"{count} rows have labels that were"
        listed = ", ".join(f"{label!r} {number}" for label, number in [*unseen.items()][:SHOWN])
        more = f", and {len(unseen) - SHOWN} more" if len(unseen) > SHOWN else ""
        err.print(
            f"warning: {rows} not trained ({listed}{more}); the accuracy leaves them out",
            markup=False,
            soft_wrap=True,
        )
    if summary["shortened"]:
        rows = "1 row is" if summary["shortened"] == 1 else f"{summary['shortened']} rows are"
        err.print(
            f"warning: {rows} longer than was trained or exported; a part was left out",
            markup=False,
            soft_wrap=True,
        )
    if summary["cut"]:
        err.print(
            f"warning: {summary['cut']} answers reached the most tokens and may go on; "
            "--max-new-tokens allows more",
            markup=False,
        )
