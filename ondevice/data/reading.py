"""Files as rows: all of them at once (`read_rows`), or one at a time (`open_reading`) where only counts, lengths or the
first of them are wanted, which takes the same memory whatever the file's size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ondevice.core.config import path_of
from ondevice.core.errors import ConfigError, DataError
from ondevice.data.readers.objects import NAME, Given
from ondevice.data.readers.records import read_records
from ondevice.data.readers.source import UNLIMITED, Limits, Record, Source
from ondevice.data.rows import BadRow, Fields, Format, Row, RowProblem, Rows
from ondevice.data.tasks.columns import advise_task, infer, no_column, renaming
from ondevice.data.tasks.formats import converter, fits
from ondevice.data.tasks.task import Task
from ondevice.data.tasks.templates import find_task

REPORT_RECORDS = 5000
"""Records between two signs of life of a long pass."""


def read_rows(
    path: str | Path,
    *,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    allow_empty: bool = False,
) -> Rows:
    """Read every row of a file, a folder, or a Hugging Face data set named `name[:config][@split]`.

    The first record whose keys fit a format decides it for the whole file; rows of other keys, and rows
    with wrong values, are left out and listed in `Rows.problems`.

    Args:
        path: a file of a suffix in `files.SUFFIXES`, a folder of them, or a data set's name.
        task: a task of Table 7 (`templates.TASKS`), or the path of a template of one's own (`.yaml`); None takes it
            from the rows' own "task", if any.
        columns: {field: the file's column}, for columns of other names; dots step into objects.
        allow_empty: return the problems alone where no row is usable, instead of raising.

    Raises:
        ConfigError: `task` is not a task, or `columns` names no field.
        DataError: the file is missing, empty or unreadable, or not one row is usable.
        MissingPackageError: the package that reads this kind of file is not installed.
    """
    path = path_of(path, "the data")
    chosen = named_task(task, path) if task else None
    return rows_of(read_records(path), str(path), chosen, columns=columns, allow_empty=allow_empty)


def rows_of(
    source: Source,
    name: str,
    chosen: Task | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    allow_empty: bool = False,
) -> Rows:
    """Turn records into rows, as `read_rows` does with those of a file; `name` is what messages call them."""
    records = list(source.records)

    def again() -> Source:
        return Source(source.kind, iter(records), source.notes)

    reading = Reading(again, name, chosen, columns)
    problems: list[RowProblem] = []
    items = list(reading.rows(problems.append))
    problems.sort(key=lambda problem: (problem.file, problem.line))
    if not items and not allow_empty:
        raise _no_rows(name, problems)
    return reading.with_items(items, problems)


def named_task(task: str, path: str | Path) -> Task:
    """Find the task of a file; the ConfigError where there is none says what the file is without a task."""
    try:
        return find_task(task)
    except ConfigError as unknown:
        unknown.hint = advise_task(path, unknown.hint)
        raise


def _no_rows(name: str, problems: list[RowProblem]) -> DataError:
    first = "; ".join(str(problem) for problem in problems[:3])
    rest = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return DataError(
        f"no usable row in {name}: {first}{rest}" if problems else f"no row in {name}",
        expected="at least one row of a known format",
        received=f"{len(problems)} rows, all with problems" if problems else "none",
        hint=f"`ondevice data '{name}'` lists every bad row",
    )


@dataclass(frozen=True, slots=True)
class Checked:
    """What a pass over a file found."""

    format: Format
    rows: int
    """Rows that can be used."""

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
    """Check every row as `read_rows` does, and keep none of them: memory does not grow with the file.

    Args:
        limits: of what a piece of the file may take.
        alive: called every few thousand records.

    Raises:
        ConfigError, DataError, MissingPackageError: as `read_rows`; a file without one usable row is not an error.
    """
    reading = open_reading(path, task=task, columns=columns, limits=limits, alive=alive)
    bad_rows, problems = 0, []

    def note(problem: RowProblem) -> None:
        nonlocal bad_rows
        bad_rows += 1
        problems.append(problem)
        if len(problems) > 2 * most_problems:
            _first(problems, most_problems)

    rows = sum(1 for _ in reading.rows(note))
    _first(problems, most_problems)
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
    """Find out how a file is read, and read no more of it than that takes; arguments and errors as `check_rows`.

    Args:
        most_records: read so many at most, and note that there are more.
    """
    path = path_of(path, "the data")
    chosen = named_task(task, path) if task else None
    later: list[str] = []

    def more() -> None:
        later[:] = [f"the first {most_records:,} rows are read, of more"]

    def again() -> Source:
        source = read_records(path, limits)
        records = _reported(source.records, alive)
        if most_records is not None:
            records = _cut(records, most_records, more)
        return Source(source.kind, records, source.notes)

    reading = Reading(again, str(path), chosen, columns)
    reading.later = later
    return reading


def _cut(records: Iterator[Record], most: int, more: Callable[[], None]) -> Iterator[Record]:
    """Yield the first records; call `more` where others follow."""
    yield from islice(records, most)
    if next(records, None) is not None:
        more()


def each_row(
    read: Rows | Reading, problem: Callable[[RowProblem], None] = lambda problem: None
) -> Iterator[Row]:
    """Yield the rows of a file that was read, or reads them; `problem` is called with each of the others."""
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
    """Return what is known of all rows; the rows of a file that is being read are left out."""
    return read.with_items([], []) if isinstance(read, Reading) else read


def _first(problems: list[RowProblem], most: int) -> None:
    """Keep the first problems by their line: a plain text has its own line 1 at its end."""
    problems.sort(key=lambda problem: (problem.file, problem.line))
    del problems[most:]


def _reported(records: Iterator[Record], alive: Callable[[], None]) -> Iterator[Record]:
    for number, record in enumerate(records, 1):
        if number % REPORT_RECORDS == 0:
            alive()
        yield record


class Reading:
    """How the records of a file become rows: decided by the first that fits, then the same for each.

    The file is read anew for each pass, and a pass holds one record at a time. The first pass, here, ends with the
    record that decides; where rows have classes it goes through the file.

    Args:
        again: opens the records, each time from the first.
        name, chosen, columns: as in `rows_of`.

    Raises:
        ConfigError: `columns` names no field.
        DataError: no record fits a format or has the named columns, or the file cannot be read.
    """

    def __init__(
        self,
        again: Callable[[], Source],
        name: str,
        chosen: Task | None,
        columns: Mapping[str, str] | None,
    ) -> None:
        source = again()
        self.name, self.task, self.notes = name, chosen, list(source.notes)
        self.later: list[str] = []
        """Notes that a pass adds."""
        self.format: Format = chosen.kind if chosen else "text"
        self._again = again
        self._convert: Callable[[int, dict[str, Any], str], Row] | None = None
        usable = _usable(source)
        first = next(usable, None)
        self._rename: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record
        named: frozenset[str] = frozenset()
        if columns or (first is not None and chosen is None and not fits(first)):
            self._rename, named = renaming(first, columns, chosen, self.notes)
        if first is None:
            return
        renamed = self._renamed(chain([first], usable))
        leader = next(renamed, None)
        if leader is None:
            raise no_column(first, columns or {}, name)
        self.format, self.task = infer(chain([leader], renamed), leader, chosen, named, name)
        self._convert = converter(
            self.format, self.task, lambda: self._renamed(_usable(again())), source.kind
        )

    def rows(self, problem: Callable[[RowProblem], None]) -> Iterator[Row]:
        """Yield the usable rows in the order of the file; `problem` is called with each of the others."""
        for line, record, file in self._again().records:
            try:
                if isinstance(record, BadRow):
                    raise record
                assert self._convert is not None  # noqa: S101  the first pass saw this record
                fields = Fields(self._rename(record))
                row = self._convert(line, fields, file)
                rest = {**row.rest, **fields.unread()}
                yield (
                    replace(row, rest=rest if row.messages else dict.fromkeys(rest))
                    if rest
                    else row
                )
            except BadRow as bad:
                problem(RowProblem(file or self.name, line, bad.field, bad.reason))

    def with_items(self, items: list[Row], problems: list[RowProblem]) -> Rows:
        """Return some rows of this file, with what is known of all of them."""
        task = self.task
        if task is None:
            return Rows(self.name, self.format, items, problems, None, self.notes)
        return Rows(
            self.name, self.format, items, problems, task.name, self.notes, task.metric, task.values
        )

    def _renamed(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the records that have the columns."""
        for record in records:
            try:
                yield self._rename(record)
            except BadRow:
                continue


def _usable(source: Source) -> Iterator[dict[str, Any]]:
    return (record.fields for record in source.records if not isinstance(record.fields, BadRow))


def as_rows(given: Given, task: str | None, columns: Mapping[str, str] | None) -> Rows:
    """Turn records of texts into rows, as `read_rows` does with a file's; arguments and errors are its."""
    rows = rows_of(given.source(), NAME, find_task(task) if task else None, columns=columns)
    rows.notes += given.notes
    return rows
