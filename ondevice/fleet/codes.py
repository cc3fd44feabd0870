"""Codes for everything that a device or a server refuses: a closed list.

Of an error, only its code leaves a device. The message may quote rows, paths or settings of the
device, so it stays in the device's own log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from ondevice.core.errors import (
    ArtifactError,
    BusyError,
    ConfigError,
    DataError,
    FleetError,
    MissingPackageError,
    ModelError,
    StorageError,
    TrainingError,
)


class Code(StrEnum):
    """The reason for a refusal. A device and a server use the same list."""

    MALFORMED = "malformed"
    """A field is missing, of the wrong type or size, or damaged."""
    NO_FLEET = "no_fleet"
    """The device has not taken a charter yet."""
    OTHER_FLEET = "other_fleet"
    """The message is of another fleet than the device's or the server's."""
    OTHER_STATE = "other_state"
    """It begins from another state."""
    OTHER_TASK = "other_task"
    """The device has replied to another task of this round, or the task is not one of the
    charter's."""
    ANSWERED = "answered"
    """The device has replied to this task, and no longer has the reply."""
    BUDGET = "budget"
    """One more reply would exceed the device's privacy budget."""
    NAME = "name"
    """The charter names a task or a model that a device does not open: a path, or an unknown
    name."""
    DATA = "data"
    """The device's rows cannot be used."""
    MODEL = "model"
    """The device does not have the fleet's model or program."""
    TRAINING = "training"
    """A loss or a number was not finite."""
    STORAGE = "storage"
    """The device's disk is full, or its folder is in use."""
    PACKAGE = "package"
    """The device lacks an optional package."""
    SUBSPACE = "subspace"
    """The device does not compute subspaces."""
    KEYS = "keys"
    """A device's keys are not signed by one of the devices that the charter names."""
    UNSAFE = "unsafe"
    """A stage of a secure sum that would show a device's own numbers."""
    SHARES = "shares"
    """Shares of a secure sum cannot be read, or give another secret than was promised."""
    LATE = "late"
    """The round is not open."""
    NOT_ASKED = "not_asked"
    """The device has no task in this round."""
    TWICE = "twice"
    """The device has already replied."""
    OTHER_DEVICE = "other_device"
    """The reply is in another device's name."""
    NUMBERS = "numbers"
    """The numbers, tensors or vectors are of another count, shape or unit."""
    NOT_FINITE = "not_finite"
    """NaN or infinity."""
    SIGNATURE = "signature"
    """A reply by file is not signed by its device's key."""
    NO_PROCESS = "no_process"
    """The device's process does not respond."""
    FAILED = "failed"
    """Anything else; the device's own log has it."""


KINDS: tuple[tuple[type[Exception], Code], ...] = (
    (DataError, Code.DATA),
    (ConfigError, Code.DATA),
    (ModelError, Code.MODEL),
    (ArtifactError, Code.MODEL),
    (TrainingError, Code.TRAINING),
    (StorageError, Code.STORAGE),
    (BusyError, Code.STORAGE),
    (MissingPackageError, Code.PACKAGE),
)


class Refusal(FleetError):
    """A refused message.

    Args:
        code: all that another machine learns.
        about: the number of the device that the code is about, if it is not the sender.
    """

    def __init__(self, code: Code, message: str, *, about: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.code = code
        self.about = about


def code_of(error: Exception) -> Code:
    """Return the code of an error, whatever it says."""
    if isinstance(error, Refusal):
        return error.code
    return next((code for kind, code in KINDS if isinstance(error, kind)), Code.FAILED)


@contextmanager
def refusing(code: Code) -> Iterator[None]:
    """Give the errors of a fleet that are raised inside this code, unless they have one."""
    try:
        yield
    except Refusal:
        raise
    except FleetError as error:
        raise Refusal(
            code, error.message, expected=error.expected, received=error.received, hint=error.hint
        ) from None
