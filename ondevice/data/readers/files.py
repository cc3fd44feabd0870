"""Data sources by name: a file by its suffix, a folder of files, or a Hugging Face data set.

A folder holds texts, shards of one kind, or splits. `FOLDER@SPLIT` names a split; by default it is
`train` if the folder has splits. Folders that `datasets` saved to disk are read, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ondevice.core.errors import DataError, MissingPackageError
from ondevice.core.untrusted import check_name, read_json
from ondevice.data.readers import json_files
from ondevice.data.readers.columnar import read_columnar
from ondevice.data.readers.hub import read_hub
from ondevice.data.readers.source import UNLIMITED, Limits, Record, Source, needs_memory, read_text
from ondevice.data.readers.tables import read_excel, read_table
from ondevice.data.rows import BadRow


@dataclass(frozen=True, slots=True)
class Reader:
    """A kind of file and the function that reads one; `seeks` if it needs a regular file."""

    kind: str
    suffixes: tuple[str, ...]
    read: Callable[[Path, Limits], Source]
    seeks: bool = False


READERS = (
    Reader("json", (".jsonl", ".ndjson", ".json"), json_files.read_json),
    Reader("table", (".csv", ".tsv", ".tab"), read_table),
    Reader("txt", (".txt", ".md"), read_text),
    Reader("excel", (".xlsx", ".xlsm"), read_excel, seeks=True),
    Reader("columnar", (".parquet", ".arrow"), read_columnar, seeks=True),
)
SUFFIXES = {suffix: reader for reader in READERS for suffix in reader.suffixes}
NAMED = ".jsonl, .json, .csv, .tsv, .xlsx, .parquet or .txt"
SAVE_AS = {
    ".xls": ".xlsx",
    ".ods": ".xlsx",
    ".numbers": ".xlsx",
    ".pdf": ".txt",
    ".docx": ".txt",
    ".doc": ".txt",
}
"""Suffixes without a reader, and the suffix that the program they come from can save as."""


def read_file(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Open one file whose suffix is in `SUFFIXES`; its records are read when they are iterated.

    Raises:
        DataError: the file cannot be read, is empty or is damaged; damage further on is raised when
            iteration reaches it.
        MissingPackageError: the package for this kind is not installed.
    """
    reader = SUFFIXES[path.suffix.lower()]
    if reader.seeks and not path.is_file():
        raise DataError(
            f"cannot read {path}", expected="a file", received="a folder, a pipe or a device"
        )
    try:
        source = reader.read(path, limits)
    except MemoryError as error:
        raise needs_memory(path) from error.with_traceback(None)
    source.records = _within_memory(path, source.records)
    return source


def _within_memory(path: Path, records: Iterator[Record]) -> Iterator[Record]:
    try:
        yield from records
    except MemoryError as error:
        raise needs_memory(path) from error.with_traceback(None)


_HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?"
)


def check_source(path: str | Path) -> str:
    """Return the kind of a data file, "folder" or "hub", without reading it.

    Raises:
        DataError: the file does not exist or has no reader.
        MissingPackageError: the name could be a data set's, and `datasets` is not installed.
    """
    path = Path(path)
    reader = SUFFIXES.get(path.suffix.lower())
    try:
        if path.is_dir() or ("@" in path.name and Path(str(path).rpartition("@")[0]).is_dir()):
            return "folder"
        exists = path.exists()
    except OSError as error:  # the name is too long, or a folder may not be entered
        raise DataError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    if exists and reader is not None:
        return reader.kind
    if exists:
        saved = SAVE_AS.get(path.suffix.lower())
        raise DataError(
            f"unknown kind of data file: {path}",
            expected=f"a name that ends with {NAMED}",
            received=path.name,
            hint=saved and f"save it as {saved}",
        )
    if reader is not None or _HUB_NAME.fullmatch(path.as_posix()) is None:
        hint = "check the path; relative paths start at the current folder"
        raise DataError(f"no such data file: {path}", received=str(path), hint=hint)
    if find_spec("datasets") is None:
        raise MissingPackageError(
            f"there is no file {path}, and a Hugging Face data set needs the package 'datasets'",
            expected=f"a {NAMED} file, or the package 'datasets'",
            received=str(path),
            hint="check the path, or: pip install datasets",
        )
    return "hub"


def read_records(path: str | Path, limits: Limits = UNLIMITED) -> Source:
    """Open a file, a folder of files, or a data set named `name[:config][@split]`.

    A plain text file is one record {"text": content}. Lines that are not UTF-8 are problems and
    become blank, so that line numbers stay right.

    Raises:
        DataError: the file does not exist, is unreadable or empty, or has no reader.
        MissingPackageError: the package for this kind is not installed.
    """
    kind, path = check_source(path), Path(path)
    if kind == "folder":
        return read_folder(path, limits)
    match = _HUB_NAME.fullmatch(path.as_posix())
    if kind == "hub" and match is not None:
        return Source("hub", read_hub(match["name"], match["config"], match["split"] or "train"))
    return read_file(path, limits)


SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
_NO_DATA = (
    *("readme", "license", "licence"),
    *("dataset_info", "dataset_dict", "dataset_infos", "state"),
)


def read_folder(path: Path, limits: Limits = UNLIMITED) -> Source:
    """Read the data files of a folder in the order of their names; a text file is one document.

    Raises:
        DataError: no such split, no data file, files of several kinds, or one that cannot be read.
    """
    folder, files, notes = _files(path)
    kinds = {SUFFIXES[file.suffix.lower()].kind for file in files}
    if len(kinds) > 1:
        shown = ", ".join(str(file.relative_to(folder)) for file in files[:8])
        raise DataError(
            f"{folder} has files of several kinds",
            expected="files of one kind",
            received=shown,
            hint="name one file, or move the others to another folder",
        )
    kind = kinds.pop()
    notes.append(f"{len(files)} file{'s' * (len(files) > 1)} of {folder}, {files[0].name} first")
    return Source({"txt": "texts"}.get(kind, kind), _records(folder, files, limits), notes)


def hash_files(path: Path) -> str:
    """Return the SHA-256 of the names and contents of the files that `read_folder` reads."""
    folder, files, _ = _files(path)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.relative_to(folder)}\n{content}\n".encode())
    return digest.hexdigest()


def _files(path: Path) -> tuple[Path, list[Path], list[str]]:
    """Return the folder, the data files of its split, and notes on them."""
    folder, split = path, ""
    if not path.is_dir():
        name, _, split = str(path).rpartition("@")
        folder = Path(name)
    if (folder / "dataset_dict.json").is_file():
        folder, split = _saved_split(folder, split), ""
    files = _data_files(folder)
    if not files:
        shown = ", ".join(sorted(item.name for item in folder.iterdir())[:8]) or "nothing"
        message = f"{folder} is a folder without data files"
        raise DataError(message, expected=f"files named {NAMED}", received=shown)
    return folder, *_of_split(folder, files, split)


def _records(folder: Path, files: list[Path], limits: Limits) -> Iterator[Record]:
    for file in files:
        name = str(file.relative_to(folder))
        try:
            for record in read_file(file, limits).records:
                yield record._replace(file=name)
        except DataError as error:
            if not error.message.endswith("is empty"):
                raise
            yield Record(0, BadRow("", "is empty"), name)


def _data_files(folder: Path) -> list[Path]:
    files = []
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
        hidden |= file.name.startswith("cache-")  # a computation that `datasets` saved
        is_data = file.stem.lower() not in _NO_DATA and file.suffix.lower() in SUFFIXES
        if is_data and not hidden and file.is_file():
            files.append(file)
    return files


def _of_split(folder: Path, files: list[Path], split: str) -> tuple[list[Path], list[str]]:
    """Return the files of a split with notes; without splits, all files."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        if name := _split_of(folder, file):
            splits.setdefault(name, []).append(file)
    if not splits and not split:
        return files, []
    requested = next(
        (name for name, others in SPLITS.items() if split.lower() in (name, *others)),
        split or "train",
    )
    if requested not in splits:
        raise _no_split(folder, requested, split, sorted(splits))
    return splits[requested], [f"the split '{requested}' is read, of {', '.join(sorted(splits))}"]


def _no_split(folder: Path, requested: str, split: str, splits: list[str]) -> DataError:
    return DataError(
        f"{folder} has no split '{split or requested}'",
        expected=", ".join(splits) or "no @split",
        received=split or "none named",
        hint=f"name it: {folder}@SPLIT" if splits else None,
    )


def _split_of(folder: Path, file: Path) -> str | None:
    """Return the split that begins the name of a file or folder: train-00000-of-00002, valid/a."""
    for part in reversed(file.relative_to(folder).parts):
        stem = Path(part).stem.lower()
        words = "".join(letter if letter.isalnum() else " " for letter in stem).split()
        for name, others in SPLITS.items():
            if words and words[0] in (name, *others):
                return name
    return None


def _saved_split(folder: Path, split: str) -> Path:
    """Return the folder of a split that `DatasetDict.save_to_disk` wrote."""
    try:
        splits = [check_name(name) for name in read_json(folder / "dataset_dict.json")["splits"]]
    except (OSError, ValueError, KeyError, TypeError):
        message = f"cannot read {folder / 'dataset_dict.json'}"
        raise DataError(message, expected='{"splits": [...]}') from None
    requested = next(
        (name for name, others in SPLITS.items() if split.lower() in others and name in splits),
        split or "train",
    )
    if requested not in splits or not (folder / requested).is_dir():
        raise _no_split(folder, requested, split, splits)
    return folder / requested
