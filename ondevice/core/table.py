"""Tables for terminals: rich's, or row by row where the terminal is too narrow for whole words."""

from __future__ import annotations

from rich import table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

READABLE = 24
"""Least width of a column that may break its words (`overflow="fold"`), if it has words that long."""


class Table(table.Table):
    """A table that cuts and breaks no word: below the width for that it writes row by row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least_width(console) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text.assemble((_text(console, self.title).plain, "italic"))
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        if self.show_footer:
            rows.append(tuple(column.footer for column in self.columns))
        for row in rows:
            yield from self._block(console, [_text(console, cell) for cell in row])

    def _block(self, console: Console, row: list[Text]) -> RenderResult:
        """Write the first named cell, with the unnamed ones before it, and the others below it."""
        names = [_text(console, column.header).plain for column in self.columns]
        last = next((i for i, name in enumerate(names) if name), len(names) - 1)
        yield Text(" ").join(cell for cell in row[: last + 1] if cell.plain)
        for name, cell in zip(names[last + 1 :], row[last + 1 :], strict=True):
            if cell.plain:
                yield Padding(Text.assemble((f"{name}: ", "dim"), cell), (0, 0, 0, 2), expand=False)

    def _least_width(self, console: Console) -> int:
        """Return the width in which each word has a line of its own."""
        edges = 0
        if self.box is not None:
            edges = len(self.columns) + 1
        padding = sum(self.padding[index] for index in (1, 3)) * len(self.columns)
        return edges + padding + sum(_least(console, column) for column in self.columns)


def _least(console: Console, column: Column) -> int:
    texts = [_text(console, cell) for cell in (column.header, *column.cells)]
    longest = max((word.cell_len for text in texts for word in text.split()), default=0)
    if column.overflow == "fold":
        return min(longest, READABLE)
    return longest


def _text(console: Console, cell: object) -> Text:
    if isinstance(cell, Text):
        return cell
    return console.render_str(str(cell))
