"""Rows of a file that is larger than memory, one window of records at a time.

A window is a number of consecutive records. Its rows are read, encoded and shuffled together, and
windows follow one another as in the file, in every epoch. Memory holds two windows. The row at an
index of the run is a function of the file, the seed and the index, so a resumed run has the same
rows. The number of sequences in each window is counted as windows are read, and saved with the run,
so that a resume goes to its window without encoding the earlier ones.
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
from ondevice.data.examples import Dataset, Example, Report, refuse_preferences, rows_sha256
from ondevice.data.readers.files import check_source, read_file
from ondevice.data.readers.json_files import json_lines
from ondevice.data.readers.source import Record, Source, read_begin, read_lines
from ondevice.data.reading import named_task, rows_of
from ondevice.data.rows import RowProblem, Rows, count_reasons

TRIES = 16
"""Windows that are read for the first usable row, so that a mistake is reported early."""
WINDOWS = 2
"""Windows in memory: a batch may have rows of two."""


def check_stream(path: Path) -> str:
    """Return the kind of a file that can be read a window at a time.

    Raises:
        DataError: the file is of another kind, or `check_source` refuses it.
    """
    kind = check_source(path)
    if kind == "hub":
        raise _no_stream(path, "a data set's name is not a file")
    if kind not in ("json", "table", "columnar"):
        raise _no_stream(path, f"a {kind} is read at once")
    return kind


def open_records(path: Path, skip: int = 0) -> Source:
    """Open a file; its records after the first `skip` are read lazily.

    Raises:
        DataError: as `check_stream`; or the file is empty, or not text in UTF-8.
    """
    kind = check_stream(path)
    if kind == "json":
        if read_begin(path)[:1] == b"[":
            raise _no_stream(path, "a JSON list is read at once")
        return Source(kind, json_lines(read_lines(path), skip))
    source = read_file(path)
    return Source(kind, islice(source.records, skip, None), source.notes)


def first_rows(
    path: Path, records: int, *, task: str | None, columns: Mapping[str, str] | None
) -> Rows:
    """Read the rows of the first window of `records` records that has a usable row.

    Raises:
        DataError: as `open_records`, or none of the first `TRIES` windows has a usable row.
    """
    source = open_records(Path(path))
    chosen = named_task(task, path)
    failed: DataError | None = None
    for _ in range(TRIES):
        window = list(islice(source.records, records))
        if not window and failed is not None:
            break
        found = Source(source.kind, iter(window), source.notes)
        try:
            return rows_of(found, str(path), chosen, columns=columns)
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
        DataError: the first `TRIES` windows have no usable row.
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
        self.path = Path(path)
        self.encoded = encoded
        self.columns = columns
        self.task = named_task(task, path)
        self.window_records = window_records
        self.seed = seed
        self.ends: list[int] = []
        """Sequences up to the end of each window that was read; all windows once it has `ended`."""
        self.digests: list[str] = []
        """Digests of the windows in `ends`; an older run lacks those of its first windows."""
        self.ended = False
        self.label_tokens: frozenset[int] = frozenset()
        """Tokens that a loss over label texts knows; rows with others are left out."""
        self.left_out: Counter[str] = Counter()
        self.cut = self.cut_tokens = 0
        self.report = Report()
        self._windows: dict[int, list[Example]] = {}
        self._orders: dict[tuple[int, ...], np.ndarray] = {}
        self._leaders: list[Record] = []
        self._records: Iterator[Record] = iter(())
        self._next = -1
        self._saved_in: tuple[Path, dict[str, Any]] | None = None
        self._failed: DataError | None = None
        self.first = self._read(0)
        """The rows of the first window that has any."""
        while not self._leaders:
            if self._failed and (self.ended or len(self.ends) >= TRIES):
                raise self._failed
            self.first = self._read(len(self.ends))

    def figures(self) -> dict[str, Any]:
        """Return the figures of `Dataset.figures`, for the windows that were read so far."""
        extent = "so far"
        if self.ended:
            extent = "the entire file"
        note = f"streamed: {len(self.ends):,} windows of {self.window_records:,} records, {extent}"
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
        """Save counts and digests of the windows in a file; with `recall`, load those of this run.

        Raises:
            DataError: a window has changed since it was first read.
        """
        length = self.first.max_length_tokens
        identity = {**identity, "window_records": self.window_records, "length": length}
        self._saved_in = path, identity
        try:
            values = read_json(path) if recall else {}
        except (OSError, ValueError):  # lost or damaged: the windows are counted again
            values = {}
        if values.get("identity") != identity:
            return
        digests = values.get("digests", [])
        for window, (before, now) in enumerate(zip(digests, self.digests)):
            if before != now:
                raise self._changed(window)
        self.digests = max(digests, self.digests, key=len)
        self.ends = values["ends"]
        self.ended = values["ended"]
        self.left_out = Counter(values["left_out"])
        self.cut = values["cut"]
        self.cut_tokens = values["cut_tokens"]
        counts = values.get("report", {})
        self.report = Report(**{name: Counter(parts) for name, parts in counts.items()})

    def example(self, index: int) -> Example:
        """Return the sequence at an index of the run, counted from 0 over all epochs.

        Raises:
            DataError: the file is damaged there, or has changed.
        """
        while not self.ended and index >= self.ends[-1]:
            self._read(len(self.ends))
        epoch = 0
        if self.ended:
            epoch, index = divmod(index, self.ends[-1])
        window = bisect_right(self.ends, index)
        if window not in self._windows:
            self._read(window)
        examples = self._windows[window]
        first = self.ends[window] - len(examples)
        return examples[int(self._order(epoch, window, len(examples))[index - first])]

    def _order(self, epoch: int, window: int, count: int) -> np.ndarray:
        # The first window is ordered as rows that are not streamed.
        numbers = (self.seed, epoch, window) if window else (self.seed, epoch)
        if numbers not in self._orders:
            while len(self._orders) >= WINDOWS:
                del self._orders[next(iter(self._orders))]
            words = np.random.PCG64(np.random.SeedSequence(numbers)).random_raw(count)
            self._orders[numbers] = np.argsort(words, kind="stable")
        return self._orders[numbers]

    def _read(self, window: int) -> Dataset:
        """Read a window and store its sequences; count it if it was not counted before."""
        kind, notes = "stream", []
        if self._next != window:
            source = open_records(self.path, window * self.window_records)
            self._records = source.records
            if not self._leaders:
                kind, notes = source.kind, source.notes
        records = list(islice(self._records, self.window_records))
        self._next = window + 1
        is_known = window < len(self.ends)
        self.ended = self.ended or len(records) < self.window_records
        if window and not records and not is_known:
            self._save()
            return Dataset()
        rows = self._rows(Source(kind, iter([*self._leaders, *records]), notes), records)
        dataset = self._with_known_labels(self.encoded(rows))
        while len(self._windows) >= WINDOWS:
            del self._windows[next(iter(self._windows))]
        self._windows[window] = [item.example for item in dataset.items]
        before = self.ends[window - 1] if window else 0
        digest = rows_sha256(dataset.items)
        if is_known:
            has_changed = self.ends[window] - before != len(dataset.items)
            if window < len(self.digests):
                has_changed |= self.digests[window] != digest
            if has_changed:
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

    def _rows(self, source: Source, records: list[Record]) -> Rows:
        """Turn a window's records into rows, led by the records that decided the format."""
        name, has_format = str(self.path), bool(self._leaders)
        try:
            rows = rows_of(source, name, self.task, columns=self.columns)
        except DataError as error:
            if has_format:
                raise
            self._failed = self._failed or error
            bad = [RowProblem(name, record.line, "", "fits no format") for record in records]
            rows = Rows(name, "text", [], bad)
        if has_format:
            rows.items = [row for row in rows.items if row.line]
            rows.problems = [problem for problem in rows.problems if problem.line]
        elif rows.items:
            refuse_preferences(rows)
            # These records decide the format of every window, as they would of the entire file.
            first = rows.items[0].line
            self._leaders = [record._replace(line=0) for record in records if record.line <= first]
        return rows

    def _changed(self, window: int) -> DataError:
        return DataError(
            f"{self.path} has changed since the run began",
            expected="the same token ids and labels",
            received=f"others in records {window * self.window_records:,} on",
            hint="put the file back, or begin another run",
        )

    def _with_known_labels(self, dataset: Dataset) -> Dataset:
        """Leave out rows with other labels than the first window's, which the loss does not know."""
        if not self.label_tokens:
            return dataset
        allowed = self.label_tokens | {IGNORE}
        why = "is not among the labels of the first window; "
        why += "name all of them in a template, --task FILE.yaml"
        items, problems = [], [*dataset.problems]
        for item in dataset.items:
            if allowed.issuperset(item.example.labels):
                items.append(item)
            else:
                problems.append(RowProblem(str(self.path), item.line, "label", why))
        return replace(dataset, items=items, problems=problems)

    def _save(self) -> None:
        if self._saved_in is None:
            return
        path, identity = self._saved_in
        values = {
            "identity": identity,
            "ends": self.ends,
            "digests": self.digests,
            "ended": self.ended,
            "left_out": dict(self.left_out),
            "cut": self.cut,
            "cut_tokens": self.cut_tokens,
            "report": self.report.to_dict(),
        }
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
        self.stream = stream
        self.batch_size = batch_size
        self.lengths_tokens = None if lengths_tokens is None else tuple(sorted(lengths_tokens))
        self.pad_id = pad_id
        self.packing = packing

    def at(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0: int64 [batch_size, length]."""
        first = step * self.batch_size
        examples = [self.stream.example(index) for index in range(first, first + self.batch_size)]
        room = self.stream.first.max_length_tokens if self.packing else None
        return collate(examples, self.lengths_tokens, self.pad_id, room)
