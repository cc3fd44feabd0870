"""Files as raw records: JSON lines, CSV, plain text, and Hugging Face data sets by name."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ondevice.data.rows import BadRow, describe
from ondevice.errors import DataError, MissingPackageError

Record = tuple[int, dict[str, Any] | BadRow]
"""(line, fields), or (line, why the line is not a record)."""

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".txt": "txt"}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?")


def read_records(path: str | Path) -> tuple[str, Iterator[Record]]:
    """("jsonl" | "csv" | "txt" | "hub", records) of a file, or of a data set named `name[:config][@split]`.

    A plain text file is one record {"text": whole file}. Lines that are not UTF-8 are problems and
    become blank, so that line numbers stay right.

    Raises:
        DataError: no such file, a folder, unreadable, empty, or a kind that is not read.
        MissingPackageError: not a file, could be a data set's name, and `datasets` is not installed.
    """
    path = Path(path)
    kind = SUFFIXES.get(path.suffix.lower())
    try:
        exists, folder = path.exists(), path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise DataError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    if not exists:
        match = _HUB_NAME.fullmatch(path.as_posix())
        if kind is None and match is not None:
            return "hub", read_hub(match["name"], match["config"], match["split"] or "train")
        hint = "check the path; relative paths start at the folder you are in"
        raise DataError(f"no such data file: {path}", received=str(path), hint=hint)
    if folder:
        raise DataError(f"{path} is a folder", expected="a .jsonl, .csv or .txt file", received="a folder")
    if kind is None:
        expected = "a name that ends with .jsonl, .csv or .txt"
        raise DataError(f"cannot tell what kind of data {path} is", expected=expected, received=path.name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="check the file's permissions") from None
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16", expected="UTF-8", received="UTF-16", hint="save it as UTF-8")
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise DataError(f"{path} is empty", expected="at least one row", received=f"{len(content)} bytes")
    if kind == "jsonl" and content.lstrip()[:1] == b"[":
        hint = f"write it as JSON lines: jq -c '.[]' '{path.name}' > '{path.stem}.jsonl'"
        raise DataError(f"{path} is one JSON list", expected="one JSON object a line", received="[", hint=hint)
    return kind, {"jsonl": _jsonl, "csv": _csv, "txt": _txt}[kind](content)


def _jsonl(content: bytes) -> Iterator[Record]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, _json_object(line)
            except BadRow as problem:
                yield number, problem


def _json_object(line: bytes) -> dict[str, Any]:
    if b"\0" in line:
        raise BadRow("", "contains a NUL byte")
    try:
        value = json.loads(_utf8(line), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise BadRow("", f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
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
        raise BadRow("", f"is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise BadRow(key, "the key occurs twice")
        found[key] = value
    return found


def _csv(content: bytes) -> Iterator[Record]:
    # Bytes that are not UTF-8 survive as lone surrogates, which `check_text` names with their field.
    text = io.StringIO(content.decode("utf-8", "surrogateescape"), newline="")
    reader = csv.reader(text, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, BadRow("", f"is not CSV: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            twice = {name for name in header if header.count(name) > 1}
            if twice:
                raise DataError(f"the CSV header names a column twice: {', '.join(sorted(twice))}")
        elif len(cells) != len(header):
            yield line, BadRow("", f"expected {len(header)} columns as in the header, received {len(cells)}")
        else:
            yield line, dict(zip(header, cells, strict=True))


def _txt(content: bytes) -> Iterator[Record]:
    lines: list[str] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            if b"\0" in line:
                raise BadRow("", "contains a NUL byte")
            lines.append(_utf8(line.removesuffix(b"\r")))
        except BadRow as problem:
            yield number, problem
            lines.append("")
    yield 1, {"text": "\n".join(lines)}


def read_hub(name: str, config: str | None, split: str) -> Iterator[Record]:
    """Records of a Hugging Face data set; class labels become their names. `line` counts rows from 1.

    Raises:
        MissingPackageError: `datasets` is not installed.
        DataError: the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError:
        raise MissingPackageError(
            f"there is no file {name}, and reading a Hugging Face data set needs the package 'datasets'",
            expected="a .jsonl, .csv or .txt file, or the package 'datasets'",
            received=name,
            hint="check the path, or: pip install datasets",
        ) from None
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package raises many kinds, all meaning that there is no such data
        reason = str(error).strip().partition("\n")[0]
        hint = "data sets are named name[:config][@split], such as glue:sst2@validation"
        raise DataError(f"cannot load the data set {name}: {reason}", hint=hint) from None
    names = {key: feature.names for key, feature in loaded.features.items() if hasattr(feature, "names")}
    return _hub_records(loaded, names)


def _hub_records(loaded: Any, names: dict[str, list[str]]) -> Iterator[Record]:
    for number, row in enumerate(loaded, 1):
        for key, known in names.items():
            if isinstance(row.get(key), int) and 0 <= row[key] < len(known):
                row[key] = known[row[key]]
        yield number, row
