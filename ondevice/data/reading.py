"""Files as rows: encoded (`read_dataset`), all at once (`read_rows`), or one at a time (`Reading`).

Reading one at a time, for counts, lengths or the first rows, takes the same memory for any file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ondevice.core.errors import ConfigError, DataError
from ondevice.core.process import path_of
from ondevice.data.encode import encode
from ondevice.data.examples import Dataset, refuse_preferences
from ondevice.data.readers.files import read_records
from ondevice.data.readers.objects import NAME, PythonRows
from ondevice.data.readers.source import UNLIMITED, Limits, Record, Source, needs_memory
from ondevice.data.rows import BadRow, Fields, Format, Row, RowProblem, Rows
from ondevice.data.tasks.columns import advise_task, no_column, no_format, renaming
from ondevice.data.tasks.formats import converter, fits, infer, labels_of
from ondevice.data.tasks.task import Task
from ondevice.data.tasks.templates import find_task
from ondevice.data.token_rows import tokens

REPORT_RECORDS = 5000
"""Records between two calls of `alive` in a long pass."""


def read_rows(
    path: str | Path,
    *,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    allow_empty: bool = False,
) -> Rows:
    """Read every row of a file, a folder, or a Hugging Face data set named `name[:config][@split]`.

    The first record whose keys fit a format decides it for the whole file. Rows with other keys or
    wrong values are left out and listed in `Rows.problems`.

    Args:
        path: a file with a suffix in `files.SUFFIXES`, a folder of them, or a data set's name.
        task: a task of Table 7 (`templates.TASKS`), or the path of a custom template (`.yaml`); if
            None, the rows' own "task" decides.
        columns: {field: the file's column}, for columns of other names; dots step into objects.
        allow_empty: if no row is usable, return only the problems instead of raising.

    Raises:
        ConfigError: `task` is not a task, or `columns` names an unknown field.
        DataError: the file is missing, empty or unreadable, or has no usable row.
        MissingPackageError: the package that reads this kind of file is not installed.
    """
    path = path_of(path, "the data")
    chosen = named_task(task, path)
    return rows_of(read_records(path), str(path), chosen, columns=columns, allow_empty=allow_empty)


def as_rows(rows: PythonRows, task: str | None, columns: Mapping[str, str] | None) -> Rows:
    """Turn records of texts into rows; arguments and errors are those of `read_rows`."""
    chosen = find_task(task) if task else None
    return rows_of(rows.source(), NAME, chosen, columns=columns)


def rows_of(
    source: Source,
    name: str,
    chosen: Task | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    allow_empty: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Rows:
    """Turn records into rows, as `read_rows` does; `name` is the file's name in messages.

    Args:
        labels: the classes of classification rows, {label key: label text}; by default those that
            the rows have.
    """
    try:
        records = list(source.records)
    except MemoryError as error:
        raise needs_memory(name) from error.with_traceback(None)
    reading = Reading(
        lambda: Source(source.kind, iter(records), source.notes), name, chosen, columns, labels
    )
    return reading.read(allow_empty)


def named_task(task: str | None, path: str | Path) -> Task | None:
    """Find the task of a file; the ConfigError of an unknown one says what the rows are without."""
    if not task:
        return None
    try:
        return find_task(task)
    except ConfigError as unknown:
        unknown.hint = advise_task(path, unknown.hint)
        raise


def _no_rows(name: str, problems: list[RowProblem]) -> DataError:
    if not problems:
        message = f"no row in {name}"
        received = "none"
    else:
        message = f"no usable row in {name}: " + "; ".join(map(str, problems[:3]))
        if len(problems) > 3:
            message += f"; and {len(problems) - 3} more"
        received = f"{len(problems)} rows, all with problems"
    return DataError(
        message,
        expected="at least one row of a known format",
        received=received,
        hint=f"`ondevice data '{name}'` lists every bad row",
    )


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of `check_rows`."""

    format: Format
    rows: int
    """Usable rows."""

    bad_rows: int
    problems: list[RowProblem]
    """Of the first bad rows, in the order of their lines."""


def check_rows(
    path: str | Path,
    *,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    limits: Limits = UNLIMITED,
    most_problems: int = 100,
    alive: Callable[[], None] = lambda: None,
) -> Checked:
    """Check every row as `read_rows` does, with one row in memory at a time.

    Args:
        limits: on what one part of the file may take.
        most_problems: to return; a plain text has the problem of its own line 1 at its end.
        alive: called every few thousand records.

    Raises:
        ConfigError, DataError, MissingPackageError: as `read_rows`; a file without a usable row is
            not an error.
    """
    reading = open_reading(path, task=task, columns=columns, limits=limits, alive=alive)
    bad_rows = 0
    problems: list[RowProblem] = []

    def cut() -> None:
        problems.sort(key=lambda problem: (problem.file, problem.line))
        del problems[most_problems:]

    def note(problem: RowProblem) -> None:
        nonlocal bad_rows
        bad_rows += 1
        problems.append(problem)
        if len(problems) > 2 * most_problems:
            cut()

    rows = sum(1 for _ in reading.rows(note))
    cut()
    return Checked(reading.format, rows, bad_rows, problems)


def open_reading(
    path: str | Path,
    *,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    limits: Limits = UNLIMITED,
    most_records: int | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Reading:
    """Decide how a file is read, and read no more of it than that takes.

    Args:
        most_records: read at most so many, and note if there are more.

    Arguments and errors are otherwise those of `check_rows`.
    """
    path = path_of(path, "the data")
    chosen = named_task(task, path)
    late_notes: list[str] = []

    def again() -> Source:
        source = read_records(path, limits)
        return Source(source.kind, records(source.records), source.notes)

    def records(every: Iterator[Record]) -> Iterator[Record]:
        for number, record in enumerate(every, 1):
            if most_records is not None and number > most_records:
                late_notes[:] = [f"only the first {most_records:,} rows are read"]
                return
            if number % REPORT_RECORDS == 0:
                alive()
            yield record

    reading = Reading(again, str(path), chosen, columns)
    reading.late_notes = late_notes
    return reading


def each_row(
    read: Rows | Reading, problem: Callable[[RowProblem], None] = lambda problem: None
) -> Iterator[Row]:
    """Yield the rows of a file that was read or is read now; pass each bad one to `problem`."""
    if isinstance(read, Reading):
        yield from read.rows(problem)
        return
    for one in read.problems:
        problem(one)
    yield from read.items


def ensure_usable(read: Rows | Reading) -> None:
    """Raise DataError unless the file has a usable row, as `read_rows` does."""
    problems: list[RowProblem] = []
    if next(each_row(read, problems.append), None) is None:
        raise _no_rows(about(read).file, problems)


def about(read: Rows | Reading) -> Rows:
    """Return the properties that all rows share; rows that are not read yet are left out."""
    if isinstance(read, Reading):
        return read.with_items([], [])
    return read


GUESSED_FROM = 200
"""Records from which an error guesses the columns."""


class Reading:
    """How the records of a file become rows: the first that fits decides it for all.

    The file is read again for each pass, and a pass holds one record at a time. The first pass,
    here, ends with the record that decides; if rows have classes, it goes through the file.

    Args:
        again: opens the records, each time from the first.
        name, chosen, columns, labels: as in `rows_of`.

    Raises:
        ConfigError: `columns` names an unknown field.
        DataError: no record fits a format or has the named columns, or the file cannot be read.
    """

    def __init__(
        self,
        again: Callable[[], Source],
        name: str,
        chosen: Task | None,
        columns: Mapping[str, str] | None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        source = again()
        self.name = name
        self.task = chosen
        self.notes = list(source.notes)
        self.late_notes: list[str] = []
        """Notes that a pass adds."""
        self.labels: Mapping[str, str] = labels or {}
        self.format: Format = chosen.kind if chosen else "text"
        self._again = again
        self._convert: Callable[[int, dict[str, Any], str], Row] | None = None
        self._rename: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record
        usable = _usable(source)
        first = next(usable, None)
        named: frozenset[str] = frozenset()
        if columns or (first is not None and chosen is None and not fits(first)):
            self._rename, named = renaming(first, columns, chosen, self.notes)
        if first is None:
            return
        renamed = self._renamed(chain([first], usable))
        leader = next(renamed, None)
        if leader is None:
            raise no_column(first, columns or {}, name)

        def refuse(task: Any) -> DataError:
            records = islice(self._renamed(_usable(again())), GUESSED_FROM)
            return no_format(list(records), task, name)

        self.format, self.task = infer(chain([leader], renamed), chosen, named, refuse)
        if self.format == "classification" and self.task is None and not self.labels:
            self.labels = labels_of(self._renamed(_usable(again())))
        self._convert = converter(
            self.format,
            self.task,
            lambda: self._renamed(_usable(again())),
            source.kind,
            self.labels,
        )

    def rows(self, problem: Callable[[RowProblem], None]) -> Iterator[Row]:
        """Yield the usable rows in the order of the file; pass each bad one to `problem`."""
        for line, record, file in self._again().records:
            try:
                if isinstance(record, BadRow):
                    raise record
                assert self._convert is not None  # noqa: S101  the first pass saw this record
                fields = Fields(self._rename(record))
                row = self._convert(line, fields, file)
                rest = {**row.rest, **fields.unread()}
                if rest and not row.messages:
                    rest = dict.fromkeys(rest)
                if rest:
                    row = replace(row, rest=rest)
                yield row
            except BadRow as bad:
                problem(RowProblem(file or self.name, line, bad.field, bad.reason))

    def read(self, allow_empty: bool = False) -> Rows:
        """Return every row, as `read_rows` does."""
        problems: list[RowProblem] = []
        try:
            items = list(self.rows(problems.append))
        except MemoryError as error:
            raise needs_memory(self.name) from error.with_traceback(None)
        problems.sort(key=lambda problem: (problem.file, problem.line))
        if not items and not allow_empty:
            raise _no_rows(self.name, problems)
        return self.with_items(items, problems)

    def with_items(self, items: list[Row], problems: list[RowProblem]) -> Rows:
        """Return some rows of this file, with the properties that all of them share."""
        rows = Rows(
            self.name, self.format, items, problems, notes=self.notes, labels=dict(self.labels)
        )
        if self.task is not None:
            rows.task = self.task.name
            rows.metric = self.task.metric
            rows.values = self.task.values
        return rows

    def _renamed(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the records that have the columns."""
        for record in records:
            try:
                yield self._rename(record)
            except BadRow:
                continue


def _usable(source: Source) -> Iterator[dict[str, Any]]:
    return (record.fields for record in source.records if not isinstance(record.fields, BadRow))


def read_dataset(
    path: Path | str | PythonRows,
    tokenizer: Any,
    *,
    task: str | None,
    max_length_tokens: int,
    train_on_prompt: bool = False,
    columns: Mapping[str, str] | None = None,
    classes: int = 0,
    strict_columns: bool = False,
    preferences: bool = False,
) -> Dataset:
    """Read and encode the rows of a file, or those that Python holds; bad rows are in `.problems`.

    Args:
        preferences: take preference pairs and rated answers, too.

    Raises:
        DataError: if no row can be used, or the rows are preferences and these are not wanted.
    """
    if isinstance(path, PythonRows):
        if path.tokenized:
            return tokens(path, max_length_tokens, strict_columns)
        rows = as_rows(path, task, columns)
    else:
        rows = read_rows(path, task=task, columns=columns)
    if not preferences:
        refuse_preferences(rows)
    return encode(
        rows,
        tokenizer,
        max_length_tokens=max_length_tokens,
        train_on_prompt=train_on_prompt,
        classes=classes,
        strict_columns=strict_columns,
    )
