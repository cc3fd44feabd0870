"""`events.jsonl`: appended line by line, read back after a power cut, cut where a resume begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ondevice.errors import StorageError
from ondevice.train import events

FILE_NAME = "events.jsonl"
Sink = Callable[[events.Event], None]
"""Takes every event as it happens: the terminal, the run store, a test."""


@dataclass(frozen=True)
class Entry:
    """One readable line: where it begins and ends in the file (bytes), its number (from 1) and its event."""

    start: int
    end: int
    line: int
    event: events.Event


@dataclass(frozen=True)
class LogContent:
    """What a log holds.

    Attributes:
        entries: the readable lines, in order; events of kinds that this version does not know are left out.
        torn: numbers of unreadable lines that readable ones follow: damage.
        torn_tail: the file ends in an unreadable or unfinished line, as after a power cut.
        intact_bytes: length of the file without the torn tail.
    """

    entries: tuple[Entry, ...] = ()
    torn: tuple[int, ...] = ()
    torn_tail: bool = False
    intact_bytes: int = 0

    @property
    def start(self) -> events.Start | None:
        """The head of the log."""
        first = self.entries[0].event if self.entries else None
        return first if isinstance(first, events.Start) else None

    def steps(self) -> list[events.Step]:
        """All optimizer steps, in order."""
        return [entry.event for entry in self.entries if isinstance(entry.event, events.Step)]


def read_log(path: Path) -> LogContent:
    """Read `path`; a file that is not there is an empty log."""
    entries, unreadable, offset, intact = [], [], 0, 0
    if not path.exists():
        return LogContent()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end = offset + len(line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("unfinished line")
                event = events.parse(line)
                intact = end
                if event is not None:
                    entries.append(Entry(offset, end, number, event))
            except ValueError:
                unreadable.append((number, offset))
            offset = end
    torn = tuple(number for number, start in unreadable if start < intact)
    return LogContent(tuple(entries), torn, len(torn) < len(unreadable), intact)


def cut_log(path: Path, step: int) -> LogContent:
    """Drop the torn tail and everything from the first event of step `step` on, and give what is left.

    After it a run that goes on at `step` appends each step once.
    """
    content = read_log(path)
    keep = next(
        (entry.start for entry in content.entries if isinstance(entry.event, events.Step) and entry.event.step >= step),
        content.intact_bytes,
    )
    if path.exists() and path.stat().st_size != keep:
        with path.open("r+b") as file:
            file.truncate(keep)
            os.fsync(file.fileno())
    lines = tuple(entry for entry in content.entries if entry.end <= keep)
    last = lines[-1].line if lines else 0
    return LogContent(lines, tuple(number for number in content.torn if number < last), False, keep)


class EventLog:
    """Writes events to a file and hands each on to the sinks. A context manager.

    Args:
        path: the log; created if it is not there, else appended to.
        sinks: called with every event after it is written.

    Raises:
        StorageError: from every method that writes, if the disk is full.
    """

    def __init__(self, path: Path, sinks: Iterable[Sink] = ()) -> None:
        self.path, self.sinks = path, tuple(sinks)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failed(error) from None
        self._size = os.fstat(self._file).st_size

    def write(self, event: events.Event) -> None:
        """Append `event`, whole or not at all, and pass it on."""
        line = event.to_line()
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise self._failed(error) from None
        self._size += len(line)
        for sink in self.sinks:
            sink(event)

    def sync(self) -> None:
        """Wait until the disk has every event."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """Close the file; again is no error."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path}: the event log cannot be written: {error.strerror}",
            hint="free some space or choose another `train.out`; the last checkpoint is intact",
        )
