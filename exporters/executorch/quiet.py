"""Native libraries print by themselves; this keeps a known chatter from the user."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import IO


@contextmanager
def without_lines(prefix: str) -> Iterator[None]:
    """Drop, within the block, lines of Python's standard error that start with `prefix`; all others
    come out after it. ExecuTorch sends its own there."""
    caught = io.StringIO()
    try:
        with redirect_stderr(caught):
            yield
    finally:
        for line in caught.getvalue().splitlines(keepends=True):
            if not line.startswith(prefix) and sys.stderr is not None:
                sys.stderr.write(line)


@contextmanager
def without_native_output() -> Iterator[None]:
    """Drop, within the block, what native code and subprocesses print; Python's own output comes
    out.

    If the block raises, the last lines that were dropped are added to the exception as a note.
    """
    streams = sys.stdout, sys.stderr
    for stream in streams:
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    try:
        kept = [os.dup(1), os.dup(2)]
    except OSError:  # no output to protect
        yield
        return
    with tempfile.TemporaryFile() as caught:
        own = [
            os.fdopen(os.dup(descriptor), "w", buffering=1, errors="replace") for descriptor in kept
        ]
        if _is_descriptor(sys.stdout, 1):
            sys.stdout = own[0]
        if _is_descriptor(sys.stderr, 2):
            sys.stderr = own[1]
        for descriptor in (1, 2):
            os.dup2(caught.fileno(), descriptor)
        try:
            yield
        except BaseException as error:
            if tail := _tail(caught):
                error.add_note(tail)
            raise
        finally:
            sys.stdout, sys.stderr = streams
            for descriptor, saved in zip((1, 2), kept, strict=True):
                os.dup2(saved, descriptor)
                os.close(saved)
            for stream in own:
                stream.close()


def _is_descriptor(stream: object, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return False


def _tail(caught: IO[bytes]) -> str:
    caught.seek(0)
    text = caught.read().decode(errors="replace")
    errors = [line for line in text.splitlines() if "ERROR" in line or "rror" in line]
    return "\n".join(errors[-5:])
