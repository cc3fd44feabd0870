"""Every error a user can cause, and the exit code that the command line returns for it.

An error says what was expected, what was received and what to try; nothing here imports
anything but the standard library.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

_REFUSED = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|bad_alloc|can't start new thread"
    r"|malloc of size|failed to map segment",
    re.IGNORECASE,
)


class Need(Enum):
    """Ability of a method that an error asks for; `registry.name_methods` lists the methods that have it."""

    ANY_DECODER = "takes every decoder"
    ADAPTS_EXPERTS = "adapts experts"
    CLASSIFIES = "trains a classification head"
    PACKS = "packs rows"
    OFFLOADS = "keeps the model in host memory"
    RANKS = "trains in several processes"
    TRAINS_ALL = "trains all parameters"
    ZEROTH_ORDER = "needs no gradient"
    PREFERENCES = "learns from preferences"
    REWARDS = "learns from rewards"
    TORCH = "runs in torch"
    MLX = "runs in MLX"


class OndeviceError(Exception):
    """A mistake or a condition the user can act on; never shown as a traceback.

    Args:
        message: one sentence that says what went wrong, with file, line and field if known.
        expected: what would have been right.
        received: what was found instead.
        hint: what to try next.
        needs: ability of the methods that would do.

    Attributes:
        methods: names of the methods that would do, once the command line or the API has filled them in;
            None before.
    """

    # An interface: scripts and the daemon's supervisor act on these codes, so none is ever given to another error.
    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        expected: Any = None,
        received: Any = None,
        hint: str | None = None,
        needs: Need | None = None,
    ) -> None:
        message = _printable(message)
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.received = received
        self.hint = hint
        self.needs = needs
        self.methods: Sequence[str] | None = None

    @property
    def advice(self) -> str | None:
        """What to try: the hint, and the methods that would do."""
        names = None
        if self.methods:
            names = f"methods that do: {', '.join(self.methods)}"
        return "; ".join(filter(None, (self.hint, names))) or None

    @property
    def reason(self) -> str:
        """The error in one line without its advice, as a part of another error."""
        parts = [self.message]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.received is not None:
            parts.append(f"received {self.received}")
        return _printable(", ".join(parts))

    def __str__(self) -> str:
        lines = [self.message]
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.received is not None:
            lines.append(f"  received: {self.received}")
        if self.advice:
            lines.append(f"  try: {self.advice}")
        return _printable("\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return the error as the JSON object that `--json` prints."""
        told = {"expected": self.expected, "received": self.received, "try": self.advice}
        return {
            "error": type(self).__name__,
            "message": self.message,
            **{
                key: value if value is None else _printable(str(value))
                for key, value in told.items()
            },
            "exit_code": self.exit_code,
        }


def _printable(text: str) -> str:
    """Return `text` with escapes for half surrogate pairs, which no terminal and no socket takes.

    They are in what a damaged file holds, and an error quotes it.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class ConfigError(OndeviceError):
    """A run file, flag or key is wrong."""

    exit_code = 2


class DataError(OndeviceError):
    """A data file is missing, empty, or has rows that cannot be used."""

    exit_code = 3


class ModelError(OndeviceError):
    """A model cannot be found, read, or is of a family that is not supported."""

    exit_code = 4


class ArtifactError(OndeviceError):
    """An artifact or adapter is incomplete, changed, or from another version."""

    exit_code = 5


class CheckpointError(OndeviceError):
    """A checkpoint is damaged, another run's, or does not fit the run."""

    exit_code = 6


class BusyError(OndeviceError):
    """Another run holds this folder."""

    exit_code = 7


class DoesNotFitError(OndeviceError):
    """The plan says that the run needs more memory than the device has."""

    exit_code = 8


class TrainingError(OndeviceError):
    """Training cannot go on: the loss is not a number, for example."""

    exit_code = 9


class MissingPackageError(OndeviceError):
    """An optional package, compiler or driver is needed and not there."""

    exit_code = 10


class StorageError(OndeviceError):
    """The disk is full or cannot be written."""

    exit_code = 11


class VerificationError(OndeviceError):
    """An export or a fuse does not do what eager PyTorch does."""

    exit_code = 12


class DeviceError(OndeviceError):
    """A phone is not connected, has not allowed debugging, or lacks the app or space."""

    exit_code = 13


class FleetError(OndeviceError):
    """A fleet's message or log is malformed, late, or of another fleet."""

    exit_code = 14


def was_refused(error: BaseException) -> bool:
    """Return True for the error of an allocation that was refused, or one that such an error caused."""
    if (
        isinstance(error.__cause__, MemoryError)
        or isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    ):
        return True
    return bool(_REFUSED.search(str(error)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def refused_memory(error: BaseException) -> DoesNotFitError:
    """Build the error that a user reads for an allocation that was refused."""
    return DoesNotFitError(
        "the system refused this process memory",
        received=first_line(error),
        hint="raise its limit (`ulimit -v`), or use a smaller model, batch or maximum length",
    )


INTERRUPTED_EXIT_CODE = 130
