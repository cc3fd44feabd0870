"""Files as raw records, and the texts in them. A few records are in memory at once, whatever the file's size.

JSON lines and plain text are read here; the other kinds in `json_list`, `tables`, `columnar`, `folders` and `hub`,
which are imported where a file is of theirs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ondevice.core.errors import DataError, MissingPackageError
from ondevice.core.untrusted import Refused, parse_row
from ondevice.data.rows import BadRow


class Record(NamedTuple):
    """One record of a file: its fields, or why it is none."""

    line: int
    fields: dict[str, Any] | BadRow
    file: str = ""
    """The file inside a folder of files; empty where the data is one file."""


@dataclass(slots=True)
class Source:
    """The records of a file, read as they are asked for; `kind` is one of the kinds of `SUFFIXES`, texts or hub."""

    kind: str
    records: Iterator[Record]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one piece of a file may take, for a file from outside. What is larger is refused before it is in memory."""

    row_bytes: int = sys.maxsize
    """Of one line, or of one element of a JSON list. Of a plain text, which is one row, so much is kept."""

    whole_bytes: int = sys.maxsize
    """Of what has to be read whole: a JSON object over many lines, the part of an Excel file with its texts."""

    unpacked_bytes: int = sys.maxsize
    """Of a packed file, unpacked."""

    def check_unpacked(self, path: Path, unpacked_bytes: int, instead: str) -> None:
        """Refuse with DataError a file that grows too much; `instead` is a kind that it could be saved as."""
        if self.unpacked_bytes == sys.maxsize:
            return
        packed_bytes = path.stat().st_size
        allowed = min(self.unpacked_bytes, FREE_BYTES + MOST_TIMES * packed_bytes)
        if unpacked_bytes > allowed:
            raise DataError(
                f"{path} is too large unpacked",
                expected=f"at most {allowed >> 20} MiB from a file of {packed_bytes} bytes",
                received=f"{unpacked_bytes >> 20} MiB or more",
                hint=f"save it as {instead}",
            )


UNLIMITED = Limits()
FROM_OUTSIDE = Limits(row_bytes=16 << 20, whole_bytes=32 << 20, unpacked_bytes=4 << 30)
"""Limits for files that somebody uploads: within them a reader stays below 512 MiB."""
FREE_BYTES, MOST_TIMES = 64 << 20, 200
"""How far any packed file may grow, and how many times its own size besides: texts and numbers stay far below."""

SUFFIXES = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "table", ".tsv": "table", ".tab": "table",
    ".txt": "txt", ".md": "txt", ".xlsx": "excel", ".xlsm": "excel", ".parquet": "columnar", ".arrow": "columnar",
}  # fmt: skip
NAMED = ".jsonl, .json, .csv, .tsv, .xlsx, .parquet or .txt"
_ELSEWHERE = {
    ".xls": ".xlsx",
    ".ods": ".xlsx",
    ".numbers": ".xlsx",
    ".pdf": ".txt",
    ".docx": ".txt",
    ".doc": ".txt",
}
"""Kinds that are not read, and the kind that the program they come from saves."""

BEGIN_BYTES = 1 << 18
"""Read to see what kind of text a file is."""
_BOM = b"\xef\xbb\xbf"
"""The byte-order mark of Windows' editors."""
_BINARY = {
    b"PK\x03\x04": ("an Excel file or another zip", ".xlsx"),
    b"PAR1": ("Parquet", ".parquet"),
}
_HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?"
)


_WRAPPED = re.compile(rb'"(data|rows|examples|items|records|train)"\s*:\s*\[\s*\{').search
"""Finds the list in an object on one line, which is else a row."""


def check_source(path: str | Path) -> str:
    """Return the kind of a data file, "folder" or "hub", before anything is read or imported for it.

    Raises:
        DataError: no such file, or a kind that is not read.
        MissingPackageError: not a file, could be a data set's name, and `datasets` is not installed.
    """
    path = Path(path)
    kind = SUFFIXES.get(path.suffix.lower())
    try:
        if path.is_dir() or ("@" in path.name and Path(str(path).rpartition("@")[0]).is_dir()):
            return "folder"
        exists = path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise DataError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    if exists and kind is not None:
        return kind
    if exists:
        saved = _ELSEWHERE.get(path.suffix.lower())
        hint = f"save it as {saved}" if saved else None
        expected = f"a name that ends with {NAMED}"
        raise DataError(
            f"cannot tell what kind of data {path} is",
            expected=expected,
            received=path.name,
            hint=hint,
        )
    if kind is not None or _HUB_NAME.fullmatch(path.as_posix()) is None:
        hint = "check the path; relative paths start at the folder you are in"
        raise DataError(f"no such data file: {path}", received=str(path), hint=hint)
    from importlib.util import find_spec

    if find_spec("datasets") is None:
        raise MissingPackageError(
            f"there is no file {path}, and reading a Hugging Face data set needs the package 'datasets'",
            expected=f"a {NAMED} file, or the package 'datasets'",
            received=str(path),
            hint="check the path, or: pip install datasets",
        )
    return "hub"


def read_records(path: str | Path, limits: Limits = UNLIMITED) -> Source:
    """Read a file, a folder of files, or a data set named `name[:config][@split]`.

    A plain text file is one record {"text": whole file}. Lines that are not UTF-8 are problems and
    become blank, so that line numbers stay right.

    Raises:
        DataError: no such file, unreadable, empty, or a kind that is not read.
        MissingPackageError: the package that reads this kind is not installed.
    """
    kind, path = check_source(path), Path(path)
    if kind == "folder":
        from ondevice.data.readers.folders import read_folder

        return read_folder(path, limits)
    if kind == "hub":
        from ondevice.data.readers.hub import read_hub

        match = _HUB_NAME.fullmatch(path.as_posix())
        assert match is not None  # noqa: S101  check_source matched it
        return Source("hub", read_hub(match["name"], match["config"], match["split"] or "train"))
    return read_file(path, kind, limits)


def read_file(path: Path, kind: str, limits: Limits = UNLIMITED) -> Source:
    """Read one file of a kind of `SUFFIXES`; its records are read as they are asked for. DataError as `read_records`,
    of what lies further on when it is reached."""
    if kind in ("columnar", "excel") and not path.is_file():
        raise DataError(
            f"cannot read {path}", expected="a file", received="a folder, a pipe or a device"
        )
    if kind == "columnar":
        from ondevice.data.readers.columnar import read_columnar

        return read_columnar(path, limits)
    if kind == "excel":
        from ondevice.data.readers.tables import read_excel

        return read_excel(path, limits)
    begin = read_begin(path)
    if kind == "table":
        from ondevice.data.readers.tables import read_table

        return read_table(path, begin, limits)
    if kind == "txt":
        most = limits.row_bytes
        notes = (
            [f"the first {most >> 20} MiB of the text are read"]
            if path.stat().st_size > most
            else []
        )
        return Source(kind, _txt(read_lines(path, limits), most), notes)
    if begin[:1] == b"[":
        from ondevice.data.readers.json_list import read_list

        return Source(kind, read_list(path, limits))
    if begin[:1] == b"{" and _is_spread(path, limits):
        from ondevice.data.readers.json_list import read_object

        if (records := read_object(path, limits)) is not None:
            return Source(kind, records)
    return Source(kind, json_lines(read_lines(path, limits)))


def _is_spread(path: Path, limits: Limits) -> bool:
    """Return True if a file that begins with `{` looks like one object: over many lines, or around a list of rows."""
    lines = (line for line in read_lines(path, limits) if isinstance(line, BadRow) or line.strip())
    first = next(lines)
    if isinstance(first, BadRow) or not first.rstrip().endswith(b"}"):
        return True
    return _WRAPPED(first) is not None and next(lines, None) is None


def read_begin(path: Path) -> bytes:
    """Return the first bytes of a text file that are not space, without the byte-order mark.

    Raises:
        DataError: the file cannot be read, is empty, or is not UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(BEGIN_BYTES)
            check_text_file(path, content)
            content = content.removeprefix(_BOM)
            begin, size = content.lstrip(), len(content)
            while content and not begin:
                content = file.read(BEGIN_BYTES)
                begin, size = content.lstrip(), size + len(content)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", hint="check the file's permissions"
        ) from None
    if not begin:
        raise DataError(f"{path} is empty", expected="at least one row", received=f"{size} bytes")
    return begin


def read_lines(path: Path, limits: Limits = UNLIMITED) -> Iterator[bytes | BadRow]:
    """Yield a file's lines with their ends, the first without the byte-order mark. One that is longer than
    `limits.row_bytes` is a BadRow; the rest of it is passed over."""
    most = limits.row_bytes if limits.row_bytes < sys.maxsize else -1
    with path.open("rb") as file:
        number = 0
        while line := file.readline(most):
            number += 1
            if len(line) == most and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(BEGIN_BYTES)
                yield BadRow("", f"the line is longer than {most >> 20} MiB")
            else:
                yield line.removeprefix(_BOM) if number == 1 else line


def check_text_file(path: Path, begin: bytes) -> None:
    """Refuse with DataError a file whose first bytes are not those of a text in UTF-8."""
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(
            f"{path} is UTF-16", expected="UTF-8", received="UTF-16", hint="save it as UTF-8"
        )
    for magic, (what, suffix) in _BINARY.items():
        if begin.startswith(magic):
            raise DataError(
                f"{path} is {what}",
                expected="text in UTF-8",
                hint=f"a name that ends with {suffix}",
            )


def json_lines(lines: Iterable[bytes | BadRow], skip: int = 0) -> Iterator[Record]:
    """Read a record a line, behind the first `skip` records; a line with nothing on it is none."""
    for number, line in enumerate(lines, 1):
        if not isinstance(line, BadRow) and not line.strip():
            continue
        if skip:
            skip -= 1
        elif isinstance(line, BadRow):
            yield Record(number, line)
        else:
            try:
                yield Record(number, _json_object(line.removesuffix(b"\n")))
            except BadRow as problem:
                yield Record(number, problem)


def _json_object(line: bytes) -> dict[str, Any]:
    if b"\0" in line:
        raise BadRow("", "contains a NUL byte")
    try:
        value = parse_row(_utf8(line), unique_keys)
    except json.JSONDecodeError as error:
        raise BadRow("", f"is not JSON: {error.msg} at column {error.colno}") from None
    except Refused:
        raise BadRow("", "is nested too deeply") from None
    except BadRow:
        raise
    except ValueError:  # an integer of more digits than Python converts
        raise BadRow("", "is not JSON: a number with too many digits") from None
    if not isinstance(value, dict):
        raise BadRow("", f"expected a JSON object, received {describe(value)}")
    return value


def _utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(
            "", f"is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1}"
        ) from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; BadRow where a key occurs twice."""
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:  # json.loads alone would keep the last in silence
            raise BadRow(key, "the key occurs twice")
        record[key] = value
    return record


def _txt(lines: Iterable[bytes | BadRow], most_bytes: int) -> Iterator[Record]:
    """Yield a problem a bad line, which becomes blank, and then the text as one record; of a longer text its
    beginning."""
    kept: list[str] = []
    left = most_bytes
    for number, line in enumerate(lines, 1):
        end = "" if isinstance(line, BadRow) or not line.endswith(b"\n") else "\n"
        try:
            if isinstance(line, BadRow):
                raise line
            if b"\0" in line:
                raise BadRow("", "contains a NUL byte")
            text = _utf8(line.removesuffix(b"\n").removesuffix(b"\r")) + end
        except BadRow as problem:
            yield Record(number, problem)
            text = end
        if left > 0:
            kept.append(text)
            left -= len(text)
    yield Record(1, {"text": "".join(kept)})


def missing_package(path: Path, package: str, instead: str) -> MissingPackageError:
    """Build the error of a file that a package of the extra `tables` reads; `instead` is what it could be saved as."""
    return MissingPackageError(
        f"reading {path} needs the package '{package}'",
        expected="the extra 'tables'",
        hint=f"pip install 'ondevice-train[tables]', or save it as {instead}",
    )


_SURROGATE, _KEPT_BYTE = re.compile("[\ud800-\udfff]").search, re.compile("[\udc80-\udcff]").search


def check_text(value: Any, name: str, *, empty: bool = False) -> str:
    """Check that `value` is a text that every tokenizer accepts, and return it.

    Raises:
        BadRow: not a string, empty (unless `empty`), a NUL character, or half a surrogate pair
            (which is how bytes that are not UTF-8 arrive from a CSV file).
    """
    if not isinstance(value, str):
        raise BadRow(name, f"expected a text, received {describe(value)}")
    if not empty and not value.strip():
        raise BadRow(name, "is empty")
    if "\0" in value:
        raise BadRow(name, "contains a NUL character")
    if not value.isascii() and _SURROGATE(value):
        if _KEPT_BYTE(value):  # a byte of the file, kept as it was
            raise BadRow(name, "is not UTF-8: save the file as UTF-8 (Excel's 'CSV UTF-8')")
        raise BadRow(name, "is not valid UTF-8 (half a surrogate pair)")
    return value


def describe(value: Any) -> str:
    """Describe a JSON value for messages, shortly and safely."""
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    if value is None:
        return "null"
    if isinstance(value, str):
        shown = value if len(value) <= 40 else value[:37] + "..."
        return "'" + shown.encode("utf-8", "backslashreplace").decode("utf-8") + "'"
    short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**20)
    shown = str(value) if short else ""
    return f"{names.get(type(value), type(value).__name__)} {shown.lower()}".strip()
