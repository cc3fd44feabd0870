"""The preview of `ondevice data FILE`: decoded examples, lengths, labels, and every bad row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.data.batching import round_up
from ondevice.data.encode import IGNORE, Dataset, Example, Item, encode
from ondevice.data.formats import read_rows
from ondevice.data.lengths import length_of
from ondevice.data.rows import RowProblem, Rows

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

PERCENTILES = (50, 90, 95, 99)
_SHOWN_CHARACTERS = 700


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a decoded example; `trained` is True if its tokens are labelled."""

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """One data file at a glance. Lengths are in tokens, of a row's longest candidate; they count what truncation
    dropped and the rows that are too long.

    `render()` is for a rich console, `to_dict()` is what `--json` prints.
    """

    file: str
    format: str
    task: str | None
    template: str
    rows: int
    """Rows of the file, good and bad."""

    sequences: int
    """Sequences that are trained on: one a good row, except that plain text is cut into windows."""

    max_length_tokens: int
    truncated: int
    too_long: int
    """Rows left out because their answer does not fit into `max_length_tokens`."""

    lengths_tokens: dict[str, int]
    """p50, p90, p95, p99 and max."""

    trained_tokens: int
    """Labelled targets in all sequences together."""

    suggested_max_length_tokens: int | None
    """Smallest multiple of 8 that holds 99% of the rows uncut; None for running text."""

    labels: dict[str, int]
    examples: tuple[tuple[Segment, ...], ...]
    problems: tuple[RowProblem, ...]
    example_names: tuple[str, ...] = ()
    """The role of each example, where rows are preferences: chosen, rejected, thumbs up, thumbs down."""

    notes: tuple[str, ...] = ()
    """How the file was understood, where that is not plain: a separator, a sheet, columns, the length; how its
    conversations became sequences, and what ends an answer."""

    unread: dict[str, int] = field(default_factory=dict)
    """Columns of the file and keys of turns that nothing reads, with how many rows or turns have them."""

    example_unread: tuple[tuple[str, ...], ...] = ()
    """Of each example, what of its row nothing reads."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return asdict(self)

    def render(self) -> RenderableType:
        """Render the figures, the examples with untrained tokens dimmed, and the table of problems."""
        from rich.console import Group

        parts: list[RenderableType] = [_facts(self)]
        names = self.example_names or ("",) * len(self.examples)
        unread = self.example_unread or ((),) * len(self.examples)
        parts += [_panel(*one) for one in zip(count(1), names, self.examples, unread)]
        if self.problems:
            parts.append(_problems(self.problems))
        return Group(*parts)


def preview(
    path: str | Path,
    tokenizer: Any,
    *,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    max_length_tokens: int | None = None,
    train_on_prompt: bool = False,
    rows: int = 3,
    strict_columns: bool = False,
) -> Preview:
    """Read, encode and summarise a data file; `rows` is the number of examples to decode.

    A file without one usable row is no error here: its problems are what the user wants to see.
    `max_length_tokens` is taken from the data unless given, as by a training run.

    Raises:
        ConfigError, DataError, MissingPackageError: as `read_rows` and `encode`.
    """
    read = read_rows(path, task=task, columns=columns, allow_empty=True)
    return preview_rows(read, tokenizer, max_length_tokens, train_on_prompt, rows, strict_columns)


def preview_rows(
    read: Rows,
    tokenizer: Any,
    max_length_tokens: int | None = None,
    train_on_prompt: bool = False,
    rows: int = 3,
    strict_columns: bool = False,
) -> Preview:
    """Encode and summarise rows that have been read; see `preview`."""
    if max_length_tokens is None:
        length = length_of(read, tokenizer)
        max_length_tokens = length.tokens
        read.notes.append(length.said)
    dataset = encode(read, tokenizer, max_length_tokens=max_length_tokens, train_on_prompt=train_on_prompt,
                     allow_empty=True, strict_columns=strict_columns)  # fmt: skip
    return summarise(read, dataset, tokenizer, examples=rows)


def summarise(rows: Rows, dataset: Dataset, tokenizer: Any, *, examples: int = 3) -> Preview:
    """Summarise a file that `read_rows` and `encode` have been through, with its first rows decoded."""
    full = [max(len(example) for example in (item.example, *item.candidates)) + item.dropped_tokens
            for item in dataset.items] + dataset.too_long_tokens  # fmt: skip
    # Lengths that some row has, so that the suggested maximum holds the 99% that it promises.
    lengths = {f"p{p}": int(np.percentile(full, p, method="inverted_cdf")) for p in PERCENTILES} if full else {}
    labels = Counter(row.label for row in rows.items if row.label is not None)
    chosen = _of_first_rows(dataset.items, examples)
    shown = _examples(rows, chosen)
    return Preview(
        file=rows.file,
        format=rows.format,
        task=rows.task,
        template=dataset.template,
        rows=len(rows.items) + len(rows.problems),
        sequences=len(dataset.items),
        max_length_tokens=dataset.max_length_tokens,
        truncated=dataset.truncated,
        too_long=len(dataset.too_long_tokens),
        lengths_tokens=lengths | {"max": max(full, default=0)},
        trained_tokens=sum(item.example.trained_tokens for item in dataset.items),
        suggested_max_length_tokens=None if rows.format == "text" or not full else round_up(lengths["p99"]),
        labels=dict(labels.most_common()),
        examples=tuple(segments(example, tokenizer) for _, example in shown),
        problems=tuple(dataset.problems),
        example_names=tuple(name for name, _ in shown) if rows.format in ("preference", "thumbs") else (),
        notes=(*dataset.notes, *dataset.report.said()),
        unread=dataset.report.left,
        example_unread=tuple(item.unread for item in chosen for _ in range(len(shown) // len(chosen))),
    )


def _of_first_rows(items: list[Item], rows: int) -> list[Item]:
    """Return the items of the first so many rows: a conversation may be several, of which each is shown."""
    chosen: list[Item] = []
    places: set[tuple[str, int]] = set()
    for item in items:
        places.add((item.file, item.line))
        if len(places) > rows:
            break
        chosen.append(item)
    return chosen


def _examples(rows: Rows, items: list[Item]) -> list[tuple[str, Example]]:
    """List the examples of the rows with what they are; a preference pair has two."""
    if rows.format == "preference":
        names = ("chosen", "rejected")
        return [pair for item in items for pair in zip(names, item.candidates, strict=True)]
    thumbs = {(row.file, row.line): f"thumbs {row.label}" for row in rows.items} if rows.format == "thumbs" else {}
    return [(thumbs.get((item.file, item.line), ""), item.example) for item in items]


def segments(example: Example, tokenizer: Any) -> tuple[Segment, ...]:
    """Decode an example, special tokens included, in stretches of equally trained tokens."""
    stretches, begin, shown = [], 0, ""
    flags = [label != IGNORE for label in example.labels]
    for end in range(1, len(flags) + 1):
        if end == len(flags) or flags[end] != flags[begin]:
            # Decoding from the start keeps the spaces that tokenizers drop at the front of a text.
            text = tokenizer.decode(list(example.ids[:end]), skip_special_tokens=False,
                                    clean_up_tokenization_spaces=False)  # fmt: skip
            if not text.startswith(shown):  # a character whose bytes lie on both sides
                shown = shown.rstrip("\ufffd")
            stretches.append(Segment(text[len(shown) :], flags[begin]))
            begin, shown = end, text
    return tuple(stretches)


def _facts(view: Preview) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    lengths = "  ".join(f"{name} {tokens}" for name, tokens in view.lengths_tokens.items())
    cut = f"{view.truncated} of {view.sequences} prompts cut at the front to {view.max_length_tokens} tokens"
    if view.template == "chat template":
        cut = (
            f"{view.truncated} of {view.sequences} conversations cut by whole turns to {view.max_length_tokens} tokens"
        )
    facts = {
        "file": view.file,
        "read as": "\n".join(view.notes),
        "format": " ".join(filter(None, (view.format, view.task and f"(task {view.task})"))),
        "framed by": view.template if view.template not in ("", view.task) else "",
        "rows": f"{view.rows} in the file, {len(view.problems)} left out, {view.sequences} sequences",
        "tokens": lengths,
        "trained on": f"{view.trained_tokens} tokens",
        "truncated": cut if view.truncated else f"none at {view.max_length_tokens} tokens",
        "too long": f"rows left out because they do not fit: {view.too_long}" if view.too_long else "",
        "suggested": f"max_length_tokens={view.suggested_max_length_tokens} holds 99% of the rows"
        if view.suggested_max_length_tokens not in (None, view.max_length_tokens)
        else "",
        "not read": ", ".join(f"{name} ({number:,})" for name, number in view.unread.items()),
        "labels": "  ".join(f"{label} {count}" for label, count in view.labels.items()),
    }
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(Text(name, style="bold"), Text(_printable(value)))
    return table


def _panel(number: int, name: str, example: tuple[Segment, ...], unread: tuple[str, ...]) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    for segment in example:
        _append(text, segment)
    trained = f"{name}, not trained on yet" if name else "dim is context, green is trained on"
    parts = [text, Text(_printable(f"not read: {', '.join(unread)}"), style="yellow")] if unread else [text]
    return Panel(Group(*parts), title=f"example {number}: {trained}", title_align="left")


def _append(text: Text, segment: Segment) -> None:
    shown = _printable(segment.text)
    if len(shown) > _SHOWN_CHARACTERS and not segment.trained:
        half = _SHOWN_CHARACTERS // 2
        shown = f"{shown[:half]} [...] {shown[-half:]}"
    text.append(shown, style="green" if segment.trained else "dim")


def _printable(text: str) -> str:
    """Replace control characters, which could drive the terminal; line breaks and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() or c == "\u200d" else "\ufffd" for c in text)


def _problems(problems: tuple[RowProblem, ...]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"rows left out: {len(problems)}", title_justify="left")
    for name in ("file", "line", "field", "reason"):
        table.add_column(name, overflow="fold")
    for problem in problems:
        line = str(problem.line) if problem.line else ""
        cells = (problem.file, line, problem.field, problem.reason)
        table.add_row(*(Text(_printable(cell)) for cell in cells))
    return table
