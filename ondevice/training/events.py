"""The log of a run: typed events, one JSON object a line in `events.jsonl`.

The terminal, the run store, the web page and `ondevice replay` read this stream and nothing else. Floats are
written with the digits that give back the same float64, and so the same float32. A value that JSON has no
number for is written as the string `nan`, `inf` or `-inf`. The log is appended line by line, read back after a power
cut, and cut where a resume begins.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter

from ondevice.core.errors import StorageError
from ondevice.core.untrusted import parse_json

SCHEMA_VERSION = 1
Whole = Annotated[int, Field(strict=True)]
"""A number that a log has as a number, and not as a text or a boolean."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all events; `time_s` is seconds since the epoch."""

    kind: ClassVar[str] = ""
    time_s: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """Convert the event to plain JSON values, with its name under `event`."""
        values = {item.name: plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return {"event": self.kind, **values}

    def to_line(self) -> bytes:
        """Return one line of `events.jsonl`, ending in a line feed."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """The head of a log: all that a reader needs to open the same program again."""

    kind: ClassVar[str] = "start"
    schema: Whole = SCHEMA_VERSION
    config: dict[str, Any]
    """The whole run file, as JSON values."""
    identity: dict[str, Any]
    """The settings that make two runs the same run; a resume must have the same (`checkpoint.py`)."""
    seed: Whole
    backend: str
    """`torch-cpu`, `torch-cuda` or `executorch`."""
    generator_backend: str = ""
    """Which kernel of the random generator made the noise; empty for methods without noise."""
    model_source: str = ""
    model_sha256: str = ""
    steps: Whole = 0
    """Steps asked for."""
    said: list[str] = field(default_factory=list)
    """The choices for the run, in sentences: the method, if none was named, and the precision."""
    decided: dict[str, Any] = field(default_factory=dict)
    """The same choices by dotted key, for a resume (`identity.py`)."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, threads and processor, which may change the last bits (`identity.py`)."""
    data: dict[str, Any] = field(default_factory=dict)
    """The rows that were read, `train` and maybe `evaluation`: sequences, rows left out by reason, rows and tokens cut,
    notes."""


@dataclass(frozen=True, kw_only=True)
class Resume(Event):
    """The run goes on; `step` is the first step that is run again."""

    kind: ClassVar[str] = "resume"
    step: Whole
    steps: Whole
    """Steps asked for, in all."""
    backend: str
    checkpoint: str
    """Folder name of the checkpoint, or empty if there was none."""
    changed: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]] = field(
        default_factory=dict
    )
    """Settings that are others than before, each as [before, now]: `method.learning_rate`, `train.schedule`, ...; also
    the parts of the identity that were accepted (`encoded.template`) and of the environment (`environment.torch`)."""


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One optimizer step."""

    kind: ClassVar[str] = "step"
    step: Whole
    loss: float
    losses: tuple[float, ...]
    projected_gradients: tuple[float, ...]
    learning_rate: float
    tokens: Whole
    """Tokens of the batch, padding included; perturbed copies of a row are not counted again."""
    step_time_s: float
    tokens_per_s: float
    peak_memory_bytes: Whole
    """Highest resident memory of the process since the run began."""
    peak_device_bytes: Whole | None = None
    """Highest CUDA memory that tensors took since the run began; None without CUDA."""
    eta_s: float = 0.0
    overlap: dict[str, Any] | None = None
    """For methods that offload: seconds and bytes by lane of the step before, and what bounded it."""
    experts: dict[str, float] | None = None
    """For a mixture whose experts are read as tokens need them: how many of `all` were `read`, their `bytes`, and the
    `bytes_per_token` of the batch."""
    preferences: dict[str, float] | None = None
    """Of preferences: rewards of chosen and rejected answers, margin, accuracy, KL. Of grpo: reward, its deviation in a
    group, share of clipped answers, tokens of an answer, KL."""


@dataclass(frozen=True, kw_only=True)
class Prepare(Event):
    """Before step `step` a file was written that a replay needs from there on, such as a new subspace."""

    kind: ClassVar[str] = "prepare"
    step: Whole
    path: str
    """File name inside the run's folder."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Evaluate(Event):
    """An evaluation after `step` steps."""

    kind: ClassVar[str] = "evaluate"
    step: Whole
    loss: float
    accuracy: float | None = None
    f1: float | None = None
    exact_match: float | None = None
    majority_share: float | None = None
    metric: str | None = None
    metric_value: float | None = None
    """The metric of a template of one's own: `macro_f1`, `matthews`, `pearson` or `spearman`."""
    preferences: dict[str, float] | None = None
    """Of preferences: rewards of chosen and rejected answers, margin, KL; `accuracy` is of rows in the right order."""
    rows: Whole = 0
    seconds_s: float = 0.0
    best: bool = False
    """No earlier evaluation of the run was better."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint was written after `step` steps."""

    kind: ClassVar[str] = "checkpoint"
    step: Whole
    path: str
    """Folder name inside the run's folder."""
    size_bytes: Whole
    seconds_s: float


@dataclass(frozen=True, kw_only=True)
class Warning(Event):
    """Something that the user should know and that does not stop the run."""

    kind: ClassVar[str] = "warning"
    message: str
    step: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class Interrupt(Event):
    """The run was asked to stop, and its state after `step` steps is saved."""

    kind: ClassVar[str] = "interrupt"
    step: Whole
    signal: str


@dataclass(frozen=True, kw_only=True)
class Error(Event):
    """The run ended with an error; `error` is what `--json` prints."""

    kind: ClassVar[str] = "error"
    step: Whole
    error: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finish(Event):
    """All steps are done, or the run stopped early."""

    kind: ClassVar[str] = "finish"
    steps: Whole
    first_loss: float
    final_loss: float
    step_time_s: float
    tokens_per_s: float
    peak_memory_bytes: Whole
    reason: str = ""
    """Why it ended before the steps that were asked for (`train.patience`); empty if all are done."""


KINDS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        Start,
        Resume,
        Step,
        Prepare,
        Evaluate,
        Checkpoint,
        Warning,
        Interrupt,
        Error,
        Finish,
    )
}


def parse(line: bytes | str) -> Event | None:
    """Read one line. Keys that this version does not know are left out; an unknown event gives None.

    Raises:
        ValueError: if the line is not a JSON object, or lacks a field or has one of a wrong type.
    """
    return event_of(parse_json(line))


def event_of(values: Any) -> Event | None:
    """Build the event of a line's JSON value; see `parse`."""
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        raise ValueError("not an event")
    event = KINDS.get(values["event"])
    if event is None:
        return None
    return _adapter(event).validate_python(values)


@functools.cache
def _adapter(event: type[Event]) -> TypeAdapter[Event]:
    return TypeAdapter(event)


def plain(value: Any) -> Any:
    """Convert `value` to JSON values: tuples to lists, paths and infinities to strings, numpy scalars to numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (str, int, float, type(None))):
        return value
    if hasattr(value, "item"):  # a numpy scalar
        return plain(value.item())
    return str(value)


FILE_NAME = "events.jsonl"
Sink = Callable[[Event], None]
"""Takes every event as it happens: the terminal, the run store, a test."""


@dataclass(frozen=True)
class Entry:
    """One readable line: where it begins and ends in the file (bytes), its number (from 1) and its event."""

    start: int
    end: int
    line: int
    event: Event


@dataclass(frozen=True)
class LogContent:
    """The content of a log.

    Attributes:
        entries: the readable lines, in order; events of kinds that this version does not know are left out.
        damaged: numbers of unreadable lines that readable ones follow.
        unfinished: the file ends in an unreadable or unfinished line, as after a power cut.
        intact_bytes: length of the file without that last line.
    """

    entries: tuple[Entry, ...] = ()
    damaged: tuple[int, ...] = ()
    unfinished: bool = False
    intact_bytes: int = 0

    @property
    def start(self) -> Start | None:
        """The head of the log."""
        first = next((entry.event for entry in self.entries), None)
        return first if isinstance(first, Start) else None

    def steps(self) -> list[Step]:
        """Return all optimizer steps, in order."""
        return [entry.event for entry in self.entries if isinstance(entry.event, Step)]


def read_log(path: Path) -> LogContent:
    """Read `path`; a file that is not there is an empty log."""
    entries = []
    unreadable = []
    offset = 0
    intact = 0
    if not path.is_file():
        return LogContent()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end = offset + len(line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("unfinished line")
                event = parse(line)
                intact = end
                if event is not None:
                    entries.append(Entry(offset, end, number, event))
            except ValueError:
                unreadable.append((number, offset))
            offset = end
    damaged = tuple(number for number, start in unreadable if start < intact)
    return LogContent(tuple(entries), damaged, len(damaged) < len(unreadable), intact)


def read_start(path: Path) -> Start | None:
    """Read no more of a log than its head; None if there is no log, or if it does not begin with one."""
    try:
        with path.open("rb") as file:
            event = parse(file.readline())
    except (FileNotFoundError, ValueError):
        return None
    if isinstance(event, Start):
        return event
    return None


def cut_log(path: Path, step: int) -> LogContent:
    """Drop an unfinished last line and everything from the first event of step `step` on; return the rest.

    After it a run that goes on at `step` appends each step once.
    """
    content = read_log(path)
    keep = next(
        (
            entry.start
            for entry in content.entries
            if isinstance(entry.event, Step) and entry.event.step >= step
        ),
        content.intact_bytes,
    )
    if path.exists() and path.stat().st_size != keep:
        with path.open("r+b") as file:
            file.truncate(keep)
            os.fsync(
                file.fileno()
            )  # before the next line: a power cut must not bring old lines back behind new ones
    lines = tuple(entry for entry in content.entries if entry.end <= keep)
    last = max((entry.line for entry in lines), default=0)
    return LogContent(
        lines, tuple(number for number in content.damaged if number < last), False, keep
    )


class EventLog:
    """Writes events to a file and hands each on to the sinks. A context manager.

    Args:
        path: the log; created if it is not there, else appended to.
        sinks: called with every event after it is written.

    Raises:
        StorageError: from every method that writes, if the disk is full.
    """

    def __init__(self, path: Path, sinks: Iterable[Sink] = ()) -> None:
        self.path = path
        self.sinks = tuple(sinks)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failed(error) from None
        self._size = os.fstat(self._file).st_size

    def write(self, event: Event) -> None:
        """Append `event`, whole or not at all, and pass it on."""
        line = event.to_line()
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(
                self._file, self._size
            )  # half a line would make the next one unreadable too
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
        """Close the file; closing it twice is allowed."""
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
