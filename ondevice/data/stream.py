"""Rows of a file that is larger than memory, a window of records at a time.

A window is so many records in the order of the file. Its rows are read, encoded and shuffled together; windows follow
one another as in the file, in every epoch. So memory holds two windows, and the row at a place of the run is a function
of the file, the seed and the place: a run that resumes has the same rows. How many sequences each window has is counted
as windows are read, and kept beside the run, so that a resume goes to its window without encoding those before it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.core.untrusted import read_json
from ondevice.data.batching import Batch, collate
from ondevice.data.digest import rows_sha256
from ondevice.data.examples import Dataset, Example, Report, refuse_preferences
from ondevice.data.readers.files import read_file
from ondevice.data.readers.json_lines import json_lines
from ondevice.data.readers.records import check_source
from ondevice.data.readers.source import Record, Source
from ondevice.data.readers.text import read_begin, read_lines
from ondevice.data.reading import named_task, rows_of
from ondevice.data.rows import RowProblem, Rows, count_reasons

TRIES = 16
"""Windows that are read for the first row that can be used: a mistake is told before all of a large file is read."""
WINDOWS = 2
"""Kept in memory: a batch may have rows of two."""


def check_stream(path: Path) -> str:
    """Return the kind of a file that can be read a window at a time.

    Raises:
        DataError: another kind, or one that `check_source` refuses too.
    """
    kind = check_source(path)
    if kind not in ("json", "table", "columnar"):
        raise _no_stream(
            path, f"a {kind} is read whole" if kind != "hub" else "a data set's name is no file"
        )
    return kind


def open_records(path: Path, skip: int = 0) -> Source:
    """Open a file; its records behind the first `skip` are read as they are asked for.

    Raises:
        DataError: as `check_stream`; or the file is empty, or no text in UTF-8.
    """
    kind = check_stream(path)
    if kind == "json":
        if read_begin(path)[:1] == b"[":
            raise _no_stream(path, "a JSON list is read whole")
        return Source(kind, json_lines(read_lines(path), skip))
    source = read_file(path)
    return Source(kind, islice(source.records, skip, None), source.notes)


def first_rows(
    path: Path, records: int, *, task: str | None, columns: Mapping[str, str] | None
) -> Rows:
    """Read the rows of the first so many records, as `read_rows` reads a file's; of the next, where none can be used.

    Raises:
        DataError: as `open_records`, or no row of `TRIES` such windows can be used.
    """
    source, chosen = open_records(Path(path)), named_task(task, path) if task else None
    failed: DataError | None = None
    for _ in range(TRIES):
        window = list(islice(source.records, records))
        if not window and failed is not None:
            break
        try:
            return rows_of(
                Source(source.kind, iter(window), source.notes), str(path), chosen, columns=columns
            )
        except DataError as error:
            failed = failed or error
    assert failed is not None  # noqa: S101  the first window was returned, or has failed
    raise failed


def _no_stream(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} cannot be streamed: {why}",
        expected="JSON lines, CSV, Parquet or Arrow",
        received=path.name,
        hint="write it as JSON lines, or leave data.streaming out",
    )


class Stream:
    """The rows of a file, window by window.

    Args:
        path: of JSON lines, CSV, Parquet or Arrow.
        encoded: `encode` with the run's tokenizer, length and labels, and `allow_empty`.
        task, columns: as in `read_rows`.
        window_records: records of a window, which are shuffled together.
        seed: of the order, 0 or above.

    Raises:
        DataError: no row of the first `TRIES` windows can be used.
    """

    def __init__(
        self,
        path: Path,
        encoded: Callable[[Rows], Dataset],
        *,
        task: str | None,
        columns: Mapping[str, str] | None,
        window_records: int,
        seed: int,
    ) -> None:
        self.path, self.encoded, self.columns = Path(path), encoded, columns
        self.task = named_task(task, path) if task else None
        self.window_records, self.seed = window_records, seed
        self.ends: list[int] = []
        """Sequences up to the end of each window that was read; all of the file's once it has `ended`."""
        self.digests: list[str] = []
        """Digest of the sequences of each window in `ends`; an older run has none of its first windows."""
        self.ended = False
        self.answers: frozenset[int] = frozenset()
        """Tokens that the rows are answered with, where a loss is over them: rows with others are left out."""
        self.left_out: Counter[str] = Counter()
        self.cut = self.cut_tokens = 0
        self.report = Report()
        self._windows: dict[int, list[Example]] = {}
        self._orders: dict[tuple[int, ...], np.ndarray] = {}
        self._leaders: list[Record] = []
        self._records: Iterator[Record] = iter(())
        self._next = -1
        self._kept: tuple[Path, dict[str, Any]] | None = None
        self._failed: DataError | None = None
        self.first = self._read(0)
        """The rows of the first window that has any."""
        while not self._leaders:
            if self._failed and (self.ended or len(self.ends) >= TRIES):
                raise self._failed
            self.first = self._read(len(self.ends))

    def figures(self) -> dict[str, Any]:
        """Return what `Dataset.figures` does, of the windows that were read so far."""
        whole = "all of the file" if self.ended else "so far"
        note = f"streamed: {len(self.ends):,} windows of {self.window_records:,} records, {whole}"
        return {
            "sequences": self.ends[-1],
            "left_out": dict(self.left_out.most_common()),
            "cut": self.cut,
            "cut_tokens": self.cut_tokens,
            "max_length_tokens": self.first.max_length_tokens,
            "notes": [*self.first.notes, *self.report.sentences(), note],
            "unread": self.report.unread_counts,
            "streamed": True,
        }

    def keep(self, path: Path, identity: dict[str, Any], recall: bool) -> None:
        """Keep counts and digests of the windows in a file; with `recall`, go on with those of the same rows.

        Raises:
            DataError: a window that was read is not what it was.
        """
        identity = {
            **identity,
            "window_records": self.window_records,
            "length": self.first.max_length_tokens,
        }
        self._kept = path, identity
        try:
            values = read_json(path) if recall else {}
        except (OSError, ValueError):  # lost or damaged: the windows are counted again
            values = {}
        if values.get("identity") == identity:
            digests = values.get("digests", [])
            for window, (before, now) in enumerate(zip(digests, self.digests)):
                if before != now:
                    raise self._changed(window)
            self.digests = max(digests, self.digests, key=len)
            self.ends, self.ended = values["ends"], values["ended"]
            self.left_out, self.cut, self.cut_tokens = (
                Counter(values["left_out"]),
                values["cut"],
                values["cut_tokens"],
            )
            self.report = Report(
                **{name: Counter(counts) for name, counts in values.get("report", {}).items()}
            )

    def example(self, place: int) -> Example:
        """Return the sequence at `place` of the run, counted from 0 over all epochs.

        Raises:
            DataError: the file is damaged there, or has changed.
        """
        while not self.ended and place >= self.ends[-1]:
            self._read(len(self.ends))
        epoch, place = divmod(place, self.ends[-1]) if self.ended else (0, place)
        window = bisect_right(self.ends, place)
        if window not in self._windows:
            self._read(window)
        examples = self._windows[window]
        return examples[
            int(
                self._order(epoch, window, len(examples))[place - self.ends[window] + len(examples)]
            )
        ]

    def _order(self, epoch: int, window: int, count: int) -> np.ndarray:
        # A file of one window has the order of rows that are not streamed.
        numbers = (self.seed, epoch, window) if window else (self.seed, epoch)
        if numbers not in self._orders:
            while len(self._orders) >= WINDOWS:
                del self._orders[next(iter(self._orders))]
            words = np.random.PCG64(np.random.SeedSequence(numbers)).random_raw(count)
            self._orders[numbers] = np.argsort(words, kind="stable")
        return self._orders[numbers]

    def _read(self, window: int) -> Dataset:
        """Read a window and keep its sequences; count it, if it was not counted before."""
        source = None
        if self._next != window:
            source = open_records(self.path, window * self.window_records)
            self._records = source.records
        records = list(islice(self._records, self.window_records))
        self._next = window + 1
        known = window < len(self.ends)
        self.ended = self.ended or len(records) < self.window_records
        if window and not records and not known:
            self._save()
            return Dataset()
        begun = bool(self._leaders)
        kind, notes = (source.kind, source.notes) if source and not begun else ("stream", [])
        found = Source(kind, iter([*self._leaders, *records]), notes)
        try:
            rows = rows_of(found, str(self.path), self.task, columns=self.columns)
        except DataError as error:
            if begun:
                raise
            self._failed = self._failed or error
            bad = [
                RowProblem(str(self.path), record.line, "", "fits no format") for record in records
            ]
            rows = Rows(str(self.path), "text", [], bad)
        if begun:
            rows.items = [row for row in rows.items if row.line]
            rows.problems = [problem for problem in rows.problems if problem.line]
        elif rows.items:
            refuse_preferences(rows)
            # The records that decided the format decide it for every window, as they do where a file is read whole.
            self._leaders = [
                record._replace(line=0) for record in records if record.line <= rows.items[0].line
            ]
        dataset = self._answered(self.encoded(rows))
        while len(self._windows) >= WINDOWS:
            del self._windows[next(iter(self._windows))]
        self._windows[window] = [item.example for item in dataset.items]
        before, digest = self.ends[window - 1] if window else 0, rows_sha256(dataset.items)
        if known:
            has_digest = window < len(self.digests)
            if self.ends[window] - before != len(dataset.items) or (
                has_digest and self.digests[window] != digest
            ):
                raise self._changed(window)
            return dataset
        if len(self.digests) == window:
            self.digests.append(digest)
        self.ends.append(before + len(dataset.items))
        self.left_out.update(count_reasons(dataset.problems))
        self.report.add(dataset.report)
        self.cut += dataset.truncated
        self.cut_tokens += sum(item.dropped_tokens for item in dataset.items)
        self._save()
        return dataset

    def _changed(self, window: int) -> DataError:
        return DataError(
            f"{self.path} has changed since the run began",
            expected="the same token ids and labels",
            received=f"others in records {window * self.window_records:,} on",
            hint="put the file back, or begin another run",
        )

    def _answered(self, dataset: Dataset) -> Dataset:
        """Leave out rows with other answers than the first window's, which a loss over the answers does not know."""
        if not self.answers:
            return dataset
        allowed = self.answers | {IGNORE}
        items = [item for item in dataset.items if allowed.issuperset(item.example.labels)]
        others = [item for item in dataset.items if not allowed.issuperset(item.example.labels)]
        why = "is not among the labels of the first window; name all of them in a template, --task FILE.yaml"
        problems = [RowProblem(str(self.path), item.line, "label", why) for item in others]
        return replace(dataset, items=items, problems=[*dataset.problems, *problems])

    def _save(self) -> None:
        if self._kept is None:
            return
        path, identity = self._kept
        values = {"identity": identity, "ends": self.ends, "digests": self.digests, "ended": self.ended,
                  "left_out": dict(self.left_out), "cut": self.cut, "cut_tokens": self.cut_tokens,
                  "report": self.report.to_dict()}  # fmt: skip
        atomic_write(path, json.dumps(values))


class StreamBatches:
    """Endless batches of constant size of a stream; see `ondevice.data.Batches`."""

    steps_per_epoch = float("inf")

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        lengths_tokens: Sequence[int] | None,
        pad_id: int,
        packing: bool = False,
    ) -> None:
        self.stream, self.batch_size, self.pad_id, self.packing = (
            stream,
            batch_size,
            pad_id,
            packing,
        )
        self.lengths_tokens = tuple(sorted(lengths_tokens)) if lengths_tokens is not None else None

    def at(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0: int64 [batch_size, length]."""
        first = step * self.batch_size
        examples = [self.stream.example(place) for place in range(first, first + self.batch_size)]
        room = self.stream.first.max_length_tokens if self.packing else None
        return collate(examples, self.lengths_tokens, self.pad_id, room)
