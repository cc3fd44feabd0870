"""What happens in a run, as typed events: one JSON object a line in `events.jsonl`.

The terminal, the run store, the web page and `ondevice replay` read this stream and nothing else. Floats are
written with the digits that give back the same float64, and so the same float32. A value that JSON has no
number for is written as the string `nan`, `inf` or `-inf`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all events; `time_s` is seconds since the epoch."""

    kind: ClassVar[str] = ""
    time_s: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """The event as plain JSON values, with its name under `event`."""
        values = {item.name: plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return {"event": self.kind, **values}

    def to_line(self) -> bytes:
        """One line of `events.jsonl`, ending in a line feed."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """The head of a log; what a reader needs to open the same program again."""

    kind: ClassVar[str] = "start"
    schema: int = SCHEMA_VERSION
    config: dict[str, Any]
    """The whole run file, as JSON values."""
    identity: dict[str, Any]
    """The settings that make two runs the same run; a resume must have the same (`checkpoint.py`)."""
    seed: int
    backend: str
    """`torch-cpu`, `torch-cuda` or `executorch`."""
    generator_backend: str = ""
    """Which kernel of the random generator made the noise; empty for methods without noise."""
    model_source: str = ""
    model_sha256: str = ""
    steps: int = 0
    """Steps asked for."""


@dataclass(frozen=True, kw_only=True)
class Resume(Event):
    """The run goes on; `step` is the first step that is run again."""

    kind: ClassVar[str] = "resume"
    step: int
    steps: int
    """Steps asked for, in all."""
    backend: str
    checkpoint: str
    """Folder name of the checkpoint, or empty where there was none."""


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One optimizer step."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    losses: tuple[float, ...]
    projected_gradients: tuple[float, ...]
    learning_rate: float
    tokens: int
    """Tokens of the batch, padding included; perturbed copies of a row are not counted again."""
    step_time_s: float
    tokens_per_s: float
    peak_memory_bytes: int
    """Highest resident memory of the process since the run began."""
    peak_device_bytes: int | None = None
    """Highest CUDA memory that tensors took since the run began; None without CUDA."""
    eta_s: float = 0.0
    overlap: dict[str, Any] | None = None
    """For methods that offload: seconds and bytes by lane of the step before, and what bounded it."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Event):
    """An evaluation after `step` steps."""

    kind: ClassVar[str] = "evaluate"
    step: int
    loss: float
    accuracy: float | None = None
    f1: float | None = None
    exact_match: float | None = None
    majority_share: float | None = None
    rows: int = 0
    seconds_s: float = 0.0
    best: bool = False
    """No earlier evaluation of the run was better."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint was written after `step` steps."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    """Folder name inside the run's folder."""
    size_bytes: int
    seconds_s: float


@dataclass(frozen=True, kw_only=True)
class Warning(Event):
    """Something that the user should know and that does not stop the run."""

    kind: ClassVar[str] = "warning"
    message: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Interrupt(Event):
    """The run was asked to stop, and its state after `step` steps is saved."""

    kind: ClassVar[str] = "interrupt"
    step: int
    signal: str


@dataclass(frozen=True, kw_only=True)
class Error(Event):
    """The run ended with an error; `error` is what `--json` prints."""

    kind: ClassVar[str] = "error"
    step: int
    error: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finish(Event):
    """All steps are done."""

    kind: ClassVar[str] = "finish"
    steps: int
    first_loss: float
    final_loss: float
    step_time_s: float
    tokens_per_s: float
    peak_memory_bytes: int


KINDS: dict[str, type[Event]] = {
    event.kind: event for event in (Start, Resume, Step, Evaluate, Checkpoint, Warning, Interrupt, Error, Finish)
}


def parse(line: bytes | str) -> Event | None:
    """Read one line. Keys that this version does not know are left out; an unknown event gives None.

    Raises:
        ValueError: if the line is not a JSON object or lacks a field.
    """
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        raise ValueError("not an event")
    event = KINDS.get(values["event"])
    if event is None:
        return None
    known = {item.name: item for item in dataclasses.fields(event)}
    try:
        return event(**{name: _typed(values[name], str(item.type)) for name, item in known.items() if name in values})
    except TypeError as error:
        raise ValueError(str(error)) from None


def plain(value: Any) -> Any:
    """`value` as JSON has it: tuples as lists, paths and infinities as strings, numpy scalars as numbers."""
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


def _typed(value: Any, annotation: str) -> Any:
    if annotation.startswith("tuple"):
        if not isinstance(value, list):
            raise ValueError(f"expected a list, received {value!r}")
        return tuple(float(item) for item in value)
    if annotation == "float":
        return float(value)
    if annotation == "int" and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"expected an integer, received {value!r}")
    return value
