"""Tables: whole words at every width that the longest word has."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from ondevice.core.table import Table
from ondevice.planning.doctor import Check
from ondevice.planning.render import render_checks

PATH = "/home/somebody/.cache/ondevice"


def printed(renderable: object, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, legacy_windows=False).print(renderable)
    return stream.getvalue()


@pytest.mark.parametrize("width", [34, 40, 60, 80, 120])
def test_doctor_breaks_lines_between_words(width: int) -> None:
    found = f"bitsandbytes 0.50.2, torch 2.13.0 installed at {PATH}"
    text = printed(render_checks([Check("transformers", True, found, "", False, 0.1)]), width)
    words = text.split()
    assert all(word in words for word in ["transformers", *found.split()]), text
    assert max(map(len, text.splitlines())) <= width and "…" not in text


def test_a_wide_enough_terminal_gets_rich_s_own_table() -> None:
    ours, own = Table(title="t"), __import__("rich.table").table.Table(title="t")
    for table in (ours, own):
        table.add_column("name")
        table.add_column("value", footer="sum", justify="right")
        table.add_row(Text("a"), "1,024 MiB")
    assert printed(ours, 40) == printed(own, 40)


def test_a_narrow_one_gets_names_footers_and_titles_row_by_row() -> None:
    table = Table(title="memory", show_footer=True)
    table.add_column("")
    table.add_column("part", footer="total")
    table.add_column("contents", footer="of 12 GiB usable")
    table.add_row("*", "optimizer", "moments of AdamW")
    lines = [line.rstrip() for line in printed(table, 18).splitlines()]
    first, last = (
        "memory\n* optimizer\n  contents:\n  moments of AdamW\n",
        "total\n  contents: of 12\n  GiB usable",
    )
    assert lines == (first + last).splitlines()
