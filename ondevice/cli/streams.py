"""Standard streams that take every text: closed ones, ASCII ones, and text that is not Unicode."""

from __future__ import annotations

import codecs
import io
import os
import sys
from contextlib import suppress
from typing import Any

from ondevice.core.errors import ConfigError

_PLAIN = str.maketrans("✓✗–—…×·→‘’“”", "+x--~x.>''\"\"")
_ERRORS = "ondevice"


class Messages(io.TextIOWrapper):
    """Standard error, which ends no command: on a full disk its text is lost, and the exit status
    still says how the command ended."""

    def __init__(self, buffer: Any, encoding: str) -> None:
        super().__init__(buffer, encoding, line_buffering=True)

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def open_streams() -> None:
    """Open closed standard streams on the null device, and let all of them take every character.

    A closed stream is a trap: the next file that is opened has its number, and what a library
    prints then ends in that file.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, mode)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # the processes that this one starts have it open too
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8")
    if sys.stderr is None or type(sys.stderr) is io.TextIOWrapper:  # not a test's
        number = 2
        encoding = "utf-8"
        if sys.stderr is not None:
            sys.stderr.flush()
            number = sys.stderr.fileno()
            encoding = sys.stderr.encoding
        # A new file: the old one may know its descriptor by what it was before a `dup2`.
        sys.stderr = Messages(open(number, "wb", closefd=False), encoding)  # noqa: SIM115
    codecs.register_error(_ERRORS, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    if isinstance(sys.stdin, io.TextIOWrapper) and not is_unicode(sys.stdin):
        sys.stdin.reconfigure(encoding="utf-8")


def discard_output() -> None:
    """Write the rest of standard output to the null device: Python's last flush would otherwise
    print a traceback, as in `ondevice ... | head`."""
    with suppress(OSError, ValueError):  # a test's output has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_unicode(stream: Any) -> bool:
    """Return True if a stream has every character."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def check_arguments(arguments: list[str]) -> None:
    """Check that the command is Unicode: its words are written into logs and manifests.

    Raises:
        ConfigError: a word is not.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "an argument is not valid UTF-8",
                expected="UTF-8, in names of files too",
                received=ascii(os.fsencode(argument))[2:-1],
                hint="rename the file, or use a UTF-8 locale such as LANG=C.UTF-8",
            ) from None


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Write our own signs in ASCII, and any other character as Python's escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", "backslashreplace").decode(), error.end
