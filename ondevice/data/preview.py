"""The preview of `ondevice data FILE`: decoded examples, lengths, labels, and every bad row."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.session import IGNORE
from ondevice.data.batching import round_up
from ondevice.data.encode import Encoder
from ondevice.data.examples import Example, Item, refuse_unread
from ondevice.data.lengths import length_of
from ondevice.data.reading import Reading, about, each_row, open_reading
from ondevice.data.rows import AnswerTooLong, Row, RowProblem, Rows
from ondevice.data.vocabulary import unknown_token

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
    vocabulary: int | None = None,
) -> Preview:
    """Read, encode and summarise a data file; `rows` is the number of examples to decode.

    With `vocabulary`, the rows of a model's embedding, a row with a token beyond it is a problem.

    A file without one usable row is no error here: its problems are what the user wants to see.
    `max_length_tokens` is taken from the data unless given, as by a training run.

    Raises:
        ConfigError, DataError, MissingPackageError: as `read_rows` and `encode`.
    """
    read = open_reading(path, task=task, columns=columns)
    return preview_rows(
        read, tokenizer, max_length_tokens, train_on_prompt, rows,
        strict_columns=strict_columns, vocabulary=vocabulary,
    )  # fmt: skip


def preview_rows(
    read: Rows | Reading,
    tokenizer: Any,
    max_length_tokens: int | None = None,
    train_on_prompt: bool = False,
    rows: int = 3,
    most_problems: int | None = None,
    strict_columns: bool = False,
    vocabulary: int | None = None,
) -> Preview:
    """Encode and summarise rows; see `preview`. Of a file that is being read, one row is in memory at a time.

    Args:
        most_problems: of the first bad rows, by their lines; None lists all.
    """
    if max_length_tokens is None:
        length = length_of(read, tokenizer)
        max_length_tokens = length.tokens
        read.notes.append(length.said)
    unread: list[RowProblem] = []
    unfit: list[RowProblem] = []
    usable = bad = truncated = trained = sequences = 0
    full, too_long, labels = array("q"), array("q"), Counter[str]()
    shown: list[tuple[Item, Row]] = []
    shown_rows = 0

    def note(problem: RowProblem, problems: list[RowProblem]) -> None:
        problems.append(problem)
        if most_problems is not None and len(problems) > 2 * most_problems:
            problems.sort(key=lambda one: one.line)
            del problems[most_problems:]

    def note_unread(problem: RowProblem) -> None:
        nonlocal bad
        bad += 1
        note(problem, unread)

    about_rows, encoder = about(read), None
    for row in each_row(read, note_unread):
        encoder = encoder or Encoder(about_rows, row, tokenizer, max_length_tokens=max_length_tokens,
                                     train_on_prompt=train_on_prompt)  # fmt: skip
        usable += 1
        if row.label is not None:
            labels[row.label] += 1
        items = []
        for one in encoder.encoded(row):
            if isinstance(one, Item):
                token = None if vocabulary is None else unknown_token(one, vocabulary)
                if token is None:
                    items.append(one)
                else:
                    reason = f"token {token} is not in the model's vocabulary of {vocabulary}"
                    note(RowProblem(row.file or about_rows.file, row.line, "", reason), unfit)
                continue
            note(RowProblem(row.file or about_rows.file, row.line, one.field, one.reason), unfit)
            if isinstance(one, AnswerTooLong):
                too_long.append(one.length_tokens)
        sequences += len(items)
        for item in items:
            full.append(
                max(len(example) for example in (item.example, *item.candidates))
                + item.dropped_tokens
            )
            truncated += item.dropped_tokens > 0
            trained += item.example.trained_tokens
        # A conversation may be several sequences, and each is shown; of the windows of a text the first few.
        most = len(items) if about_rows.format != "text" else max(0, rows - len(shown))
        if items and shown_rows < rows:
            shown += [(item, row) for item in items[:most]]
            shown_rows += 1
    encoder = encoder or Encoder(about_rows, Row(0), tokenizer, max_length_tokens=max_length_tokens)
    full += too_long
    report = encoder.report
    if strict_columns:
        refuse_unread(about_rows.file, report)
    # Lengths that some row has, so that the suggested maximum holds the 99% that it promises.
    lengths = (
        {f"p{p}": int(np.percentile(full, p, method="inverted_cdf")) for p in PERCENTILES}
        if full
        else {}
    )
    examples = [
        (*pair, item) for item, row in shown for pair in _examples(about_rows.format, item, row)
    ]
    return Preview(
        file=about_rows.file,
        format=about_rows.format,
        task=about_rows.task,
        template=encoder.template,
        rows=usable + bad,
        sequences=sequences,
        max_length_tokens=max_length_tokens,
        truncated=truncated,
        too_long=len(too_long),
        lengths_tokens=lengths | {"max": max(full, default=0)},
        trained_tokens=trained,
        suggested_max_length_tokens=None
        if about_rows.format == "text" or not full
        else round_up(lengths["p99"]),
        labels=dict(labels.most_common()),
        examples=tuple(segments(example, tokenizer) for _, example, _ in examples),
        problems=tuple(sorted(unread + unfit, key=lambda problem: problem.line)[:most_problems]),
        example_names=tuple(name for name, _, _ in examples)
        if about_rows.format in ("preference", "thumbs")
        else (),
        notes=(*read.notes, *(read.later if isinstance(read, Reading) else ()), *report.said()),
        unread=report.left,
        example_unread=tuple(item.unread for _, _, item in examples),
    )


def _examples(format_: str, item: Item, row: Row) -> list[tuple[str, Example]]:
    """List the examples of a row with what they are; a preference pair has two."""
    if format_ == "preference":
        return list(zip(("chosen", "rejected"), item.candidates, strict=True))
    return [(f"thumbs {row.label}" if format_ == "thumbs" else "", item.example)]


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
        cut = f"{view.truncated} of {view.sequences} conversations "
        cut += f"cut by whole turns to {view.max_length_tokens} tokens"
    facts = {
        "file": view.file,
        "read as": "\n".join(view.notes),
        "format": " ".join(filter(None, (view.format, view.task and f"(task {view.task})"))),
        "framed by": view.template if view.template not in ("", view.task) else "",
        "rows": f"{view.rows} in the file, {len(view.problems)} left out, {view.sequences} sequences",
        "tokens": lengths,
        "trained on": f"{view.trained_tokens} tokens",
        "truncated": cut if view.truncated else f"none at {view.max_length_tokens} tokens",
        "too long": f"rows left out because they do not fit: {view.too_long}"
        if view.too_long
        else "",
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


def _panel(
    number: int, name: str, example: tuple[Segment, ...], unread: tuple[str, ...]
) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    for segment in example:
        _append(text, segment)
    trained = f"{name}, not trained on yet" if name else "dim is context, green is trained on"
    parts = (
        [text, Text(_printable(f"not read: {', '.join(unread)}"), style="yellow")]
        if unread
        else [text]
    )
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
