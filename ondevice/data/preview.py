"""The preview of `ondevice data FILE`: decoded examples, lengths, labels, and every bad row."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ConfigDict

from ondevice.core.config import Documented
from ondevice.core.session import IGNORE
from ondevice.core.table import Table
from ondevice.data.batching import round_up
from ondevice.data.encode import Encoder
from ondevice.data.examples import Example, Item, Report, refuse_unread, unknown_token
from ondevice.data.lengths import length_of
from ondevice.data.pictures import as_marks
from ondevice.data.reading import Reading, about, each_row, open_reading
from ondevice.data.rows import AnswerTooLong, Row, RowProblem, Rows
from ondevice.data.thumbnails import Thumbnail, thumbnails

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

PERCENTILES = (50, 90, 95, 99)
_SHOWN_CHARACTERS = 700


class Segment(Documented):
    """A part of a decoded example."""

    model_config = ConfigDict(frozen=True)

    text: str
    trained: bool
    """True if its tokens are trained on."""


class Preview(Documented):
    """One data file at a glance.

    Lengths are in tokens of a row's longest candidate; they count truncated tokens, and rows that
    are too long.
    """

    model_config = ConfigDict(frozen=True)

    file: str
    format: str
    task: str | None
    template: str
    rows: int
    """Rows of the file, good and bad."""

    sequences: int
    """Sequences that are trained on: one for each good row; text is cut into windows."""

    max_length_tokens: int
    truncated: int
    too_long: int
    """Rows left out because their answer does not fit into `max_length_tokens`."""

    lengths_tokens: dict[str, int]
    """p50, p90, p95, p99 and max."""

    trained_tokens: int
    """Label tokens of all sequences together."""

    suggested_max_length_tokens: int | None
    """Smallest multiple of 8 that holds 99% of the rows uncut; None for running text."""

    labels: dict[str, int]
    examples: tuple[tuple[Segment, ...], ...]
    problems: tuple[RowProblem, ...]
    example_names: tuple[str, ...]
    """The role of each example of preferences: chosen, rejected, thumbs up, thumbs down."""

    notes: tuple[str, ...]
    """How the file was understood, if that is not obvious (separator, sheet, columns, length); how
    conversations became sequences; what ends an answer."""

    unread: dict[str, int]
    """Columns and keys of turns that nothing reads, with how many rows or turns have them."""

    example_unread: tuple[tuple[str, ...], ...]
    """The columns and keys of each example's row that nothing reads."""

    example_images: tuple[tuple[Thumbnail, ...], ...]
    """The pictures of each example."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as `--json` prints it."""
        return self.model_dump()

    def render(self) -> RenderableType:
        """Render for a rich console the figures, the examples with untrained tokens dimmed, and the problems."""
        from rich.console import Group

        parts: list[RenderableType] = [_facts(self)]
        names = self.example_names or ("",) * len(self.examples)
        each = zip(count(1), names, self.examples, self.example_unread, self.example_images)
        parts += [_panel(*one) for one in each]
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
    """Read, encode and summarise a data file; arguments and errors are those of `preview_rows`.

    Args:
        path, task, columns: as in `read_rows`.
    """
    return preview_rows(
        open_reading(path, task=task, columns=columns),
        tokenizer,
        max_length_tokens,
        train_on_prompt,
        rows,
        strict_columns=strict_columns,
        vocabulary=vocabulary,
    )


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
    """Encode and summarise rows, with one row of a file in memory at a time.

    A file without a usable row is not an error: its problems are part of the summary.

    Args:
        max_length_tokens: None takes it from the data, as a training run does.
        rows: examples to decode.
        most_problems: of the first bad rows, by their lines; None lists all.
        vocabulary: rows of a model's embedding; a row with a token beyond it becomes a problem.

    Raises:
        ConfigError, DataError, MissingPackageError: as `read_rows` and `encode`.
    """
    if max_length_tokens is None:
        length = length_of(read, tokenizer)
        max_length_tokens = length.tokens
        read.notes.append(length.note)
    shared = about(read)
    summary = _Summary(shared, rows, most_problems, vocabulary)
    encoder = None
    for row in each_row(read, summary.add_unreadable):
        encoder = encoder or Encoder(
            shared,
            row,
            tokenizer,
            max_length_tokens=max_length_tokens,
            train_on_prompt=train_on_prompt,
        )
        summary.add(row, encoder.encoded(row))
    encoder = encoder or Encoder(shared, Row(0), tokenizer, max_length_tokens=max_length_tokens)
    if strict_columns:
        refuse_unread(shared.file, encoder.report)
    notes = (*read.notes, *getattr(read, "late_notes", ()))
    return summary.preview(tokenizer, encoder, encoder.report, notes)


class _Summary:
    """Counts rows as they are encoded; of their contents only the first examples are stored."""

    def __init__(
        self, shared: Rows, rows: int, most_problems: int | None, vocabulary: int | None
    ) -> None:
        self.shared = shared
        self.rows = rows
        self.most_problems = most_problems
        self.vocabulary = vocabulary
        self.problems: list[RowProblem] = []
        self.usable = self.unreadable = self.sequences = self.truncated = self.trained = 0
        self.lengths, self.too_long = array("q"), array("q")
        self.labels = Counter[str]()
        self.shown: list[tuple[Item, Row]] = []
        self.shown_rows = 0

    def add_unreadable(self, problem: RowProblem) -> None:
        """Count a row that could not be read."""
        self.unreadable += 1
        self._note(problem)

    def _note(self, problem: RowProblem) -> None:
        self.problems.append(problem)
        if self.most_problems is not None and len(self.problems) > 2 * self.most_problems:
            self.problems.sort(key=lambda one: one.line)
            del self.problems[self.most_problems :]

    def add(self, row: Row, encoded: list[Any]) -> None:
        """Count a row by its sequences, and by the reasons for those that cannot be one."""
        self.usable += 1
        if row.label is not None:
            self.labels[row.label] += 1
        items: list[Item] = []
        for one in encoded:
            reason = self._add_sequence(one, items)
            if reason:
                key = getattr(one, "field", "")
                self._note(RowProblem(row.file or self.shared.file, row.line, key, reason))
        self.sequences += len(items)
        if not items or self.shown_rows >= self.rows:
            return
        # Every sequence of a conversation is shown; of the windows of a text, the first few.
        most = len(items)
        if self.shared.format == "text":
            most = max(0, self.rows - len(self.shown))
        self.shown += [(item, row) for item in items[:most]]
        self.shown_rows += 1

    def _add_sequence(self, one: Any, items: list[Item]) -> str:
        """Count an item, and add it to `items`; return the reason if it cannot be used."""
        if not isinstance(one, Item):
            if isinstance(one, AnswerTooLong):
                self.too_long.append(one.length_tokens)
            return one.reason
        if self.vocabulary is not None:
            token = unknown_token(one, self.vocabulary)
            if token is not None:
                return f"token {token} is not in the model's vocabulary of {self.vocabulary}"
        self.lengths.append(one.longest + one.dropped_tokens)
        self.truncated += one.dropped_tokens > 0
        self.trained += one.example.trained_tokens
        items.append(one)
        return ""

    def preview(
        self, tokenizer: Any, encoder: Encoder, report: Report, notes: tuple[str, ...]
    ) -> Preview:
        """Return the summary, with the first examples decoded."""
        shared = self.shared
        full = self.lengths + self.too_long
        lengths = {}
        suggested = None
        if full:
            # Lengths that some row has, so that the suggested maximum holds the 99% it promises.
            for p in PERCENTILES:
                lengths[f"p{p}"] = int(np.percentile(full, p, method="inverted_cdf"))
            if shared.format != "text":
                suggested = round_up(lengths["p99"])
        examples = [
            (*pair, item) for item, row in self.shown for pair in _examples(shared, item, row)
        ]
        names: tuple[str, ...] = ()
        if shared.format in ("preference", "thumbs"):
            names = tuple(name for name, _, _ in examples)
        problems = sorted(self.problems, key=lambda problem: problem.line)
        return Preview(
            file=shared.file,
            format=shared.format,
            task=shared.task,
            template=encoder.template,
            rows=self.usable + self.unreadable,
            sequences=self.sequences,
            max_length_tokens=encoder.max_length_tokens,
            truncated=self.truncated,
            too_long=len(self.too_long),
            lengths_tokens=lengths | {"max": max(full, default=0)},
            trained_tokens=self.trained,
            suggested_max_length_tokens=suggested,
            labels=dict(self.labels.most_common()),
            examples=tuple(segments(example, tokenizer) for _, example, _ in examples),
            problems=tuple(problems[: self.most_problems]),
            example_names=names,
            notes=(*notes, *report.sentences()),
            unread=report.unread_counts,
            example_unread=tuple(item.unread for _, _, item in examples),
            example_images=tuple(thumbnails(example.ids, tokenizer) for _, example, _ in examples),
        )


def _examples(shared: Rows, item: Item, row: Row) -> Iterator[tuple[str, Example]]:
    """Yield the examples of a row with their names; a preference pair has two."""
    if shared.format == "preference":
        yield from zip(("chosen", "rejected"), item.candidates, strict=True)
    else:
        yield f"thumbs {row.label}" * (shared.format == "thumbs"), item.example


def segments(example: Example, tokenizer: Any) -> tuple[Segment, ...]:
    """Decode an example, special tokens included, in parts of equally trained tokens."""
    parts: list[Segment] = []
    begin, shown = 0, ""
    flags = [label != IGNORE for label in example.labels]
    for end in range(1, len(flags) + 1):
        if end < len(flags) and flags[end] == flags[begin]:
            continue
        # Decoding from the start keeps the spaces that tokenizers drop at the front of a text.
        ids = as_marks(example.ids[:end], tokenizer)
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not text.startswith(shown):  # a character whose bytes lie on both sides
            shown = shown.rstrip("\ufffd")
        parts.append(Segment(text=text[len(shown) :], trained=flags[begin]))
        begin, shown = end, text
    return tuple(parts)


def _facts(view: Preview) -> RenderableType:
    from rich.text import Text

    length = view.max_length_tokens
    facts = {
        "file": view.file,
        "read as": "\n".join(view.notes),
        "format": view.format + f" (task {view.task})" * bool(view.task),
        "framed by": "" if view.template == view.task else view.template,
        "rows": f"{view.rows} in the file, {len(view.problems)} left out, "
        f"{view.sequences} sequences",
        "tokens": "  ".join(f"{name} {tokens}" for name, tokens in view.lengths_tokens.items()),
        "trained on": f"{view.trained_tokens} tokens",
        "truncated": f"none at {length} tokens",
        "labels": "  ".join(f"{label} {count}" for label, count in view.labels.items()),
    }
    if view.truncated:
        cut = "prompts cut at the front"
        if view.template == "chat template":
            cut = "conversations cut by complete turns"
        facts["truncated"] = f"{view.truncated} of {view.sequences} {cut} to {length} tokens"
    if view.too_long:
        facts["too long"] = f"rows left out because they do not fit: {view.too_long}"
    # Only of help if rows are cut: a run's own length holds the longest row.
    if length < (view.suggested_max_length_tokens or 0):
        suggested = f"max_length_tokens={view.suggested_max_length_tokens}"
        facts["suggested"] = f"{suggested} holds 99% of the rows"
    unread = ", ".join(f"{name} ({number:,})" for name, number in view.unread.items())
    facts["not read"] = unread
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(Text(name, style="bold"), Text(_printable(value)))
    return table


def _panel(
    number: int,
    name: str,
    example: tuple[Segment, ...],
    unread: tuple[str, ...],
    images: tuple[Thumbnail, ...],
) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    for segment in example:
        _append(text, segment)
    parts: list[RenderableType] = [*images, text]
    if unread:
        parts.append(Text(_printable(f"not read: {', '.join(unread)}"), style="yellow"))
    legend = "dim is context, green is trained on"
    if name:
        legend = f"{name}: dim is context, green is compared"
    return Panel(Group(*parts), title=f"example {number}: {legend}", title_align="left")


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
    from rich.text import Text

    table = Table(title=f"rows left out: {len(problems)}", title_justify="left")
    for name in ("file", "line", "field", "reason"):
        table.add_column(name, overflow="fold")
    for problem in problems:
        line = str(problem.line or "")
        cells = (problem.file, line, problem.field, problem.reason)
        table.add_row(*(Text(_printable(cell)) for cell in cells))
    return table
