"""Flags, standard streams, and output as text or JSON of all verbs."""

from __future__ import annotations

import codecs
import io
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from ondevice.core.errors import ConfigError
from ondevice.core.table import Table

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run's folder.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder's contents.")]
Force = Annotated[
    bool, typer.Option("--force", help="Go on even if the plan says it does not fit.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, but load and write nothing.")
]
AdapterPath = Annotated[
    Path | None,
    typer.Option("--adapter", "-a", help="Folder of an adapter (PEFT or mlx-lm) or of a run."),
]
OwnRows = typer.Option("--data", "-d", help="This device's rows, which never leave it.")
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Use no TLS; only for tests on one machine.")
]
FleetHost = Annotated[str, typer.Option("--host", help="Address of the fleet's server.")]
FleetPort = Annotated[int, typer.Option("--port", help="Port of the fleet's server.")]
Certificates = Annotated[
    Path | None,
    typer.Option(
        "--certificates", help="Folder with ca.crt; on the server also server.pem and server.key."
    ),
]
DeviceKey = Annotated[
    Path | None, typer.Option("--key", help="This device's private key (devices/NAME.key).")
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        "--epsilon", min=0, help="Privacy budget at which the device stops (default with noise: 8)."
    ),
]
ROWS = "JSON, CSV, Excel, Parquet, text, a folder, or a data set's name"

Word = TypeVar("Word", str, Path)
command_line: list[str] = []
"""The words of this command, as `app.run` received them."""
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
_PLAIN = str.maketrans("✓✗–—…×·→‘’“”", "+x--~x.>''\"\"")
_ERRORS = "ondevice"


def resumed_command() -> str:
    """Return this command as a shell line that resumes the run."""
    words = [word for word in command_line if word not in ("--overwrite", "--resume")]
    return shlex.join(["ondevice", *words, "--resume"])


def print_json(value: Any) -> None:
    """Print one object on one line of standard output; NaN and infinity become null."""
    escaped = not is_unicode(sys.stdout)
    sys.stdout.write(json.dumps(_plain(value), ensure_ascii=escaped) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def show(value: dict[str, Any], text: str, json: bool) -> None:
    """Print a result: the object with `--json`, otherwise the text."""
    if json:
        print_json(value)
    else:
        out.print(text, markup=False, soft_wrap=True)


def one_of(first: Word | None, named: Word | None, flag: str) -> Word | None:
    """Return the first word, or the value of `--FLAG`.

    Raises:
        ConfigError: both are given, and differ.
    """
    if first is not None and named is not None and first != named:
        raise ConfigError(
            f"the {flag} is given twice",
            expected=f"one {flag}",
            received=f"{first} and --{flag} {named}",
        )
    if first is None:
        return named
    return first


def model_or_adapter(
    first: str | None, model: str | None, adapter: Path | None
) -> tuple[str | None, Path | None]:
    """Return the model and the adapter of a command that takes both.

    An adapter or a run alone is what was trained: it names its base model.

    Raises:
        ConfigError: the model is given twice.
    """
    source = one_of(first, model, "model")
    if source is None and adapter is not None:
        return str(adapter), None
    return source, adapter


def table(values: dict[str, Any], title: str = "") -> None:
    """Print names and values in two columns on standard output, without those that are None."""
    grid = Table(
        title=title or None, show_header=False, title_justify="left", box=None, pad_edge=False
    )
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in values.items():
        if value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else escape(str(value))
            grid.add_row(f"[dim]{name.replace('_', ' ')}[/dim]", text)
    out.print(grid)


def show_table(values: dict[str, Any], json: bool) -> None:
    """Print values as JSON or in two columns."""
    if json:
        print_json(values)
    else:
        table(values)


def mebibytes(count: float | None) -> str | None:
    """Format bytes as MiB with a thousands separator."""
    if count is None:
        return None
    return f"{count / 2**20:,.1f} MiB"


@contextmanager
def stages(silent: bool) -> Iterator[None]:
    """Show the stages of a long command on standard error, and a spinner in a terminal."""
    logger = logging.getLogger("ondevice")
    if silent:
        yield
        return
    with err.status("starting") as status:

        class Show(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                err.print(record.getMessage(), markup=False)
                status.update(record.getMessage())

        handler = Show(logging.INFO)
        level = logger.level
        propagate = logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # A library may have given the root logger a handler, which would print everything again.
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


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
        # A new file: the old one may know its descriptor from before a `dup2`.
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
