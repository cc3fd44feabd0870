"""Open a file, a folder of files, or a Hugging Face data set as records."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from ondevice.core.errors import DataError, MissingPackageError
from ondevice.data.readers.files import NAMED, SAVE_AS, SUFFIXES, read_file
from ondevice.data.readers.folders import read_folder
from ondevice.data.readers.hub import read_hub
from ondevice.data.readers.source import UNLIMITED, Limits, Source

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
            hint=f"save it as {saved}" if saved else None,
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
