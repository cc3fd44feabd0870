"""Files by names that come from outside: below their folder, plain files, and of a bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ondevice.core.untrusted.refused import Refused

MOST_NAME_LETTERS = 1024


def check_name(name: object) -> str:
    """Return `name` if it is a relative path that stays below a folder, by its letters only.

    The app's `Storage.safeRelative` has the same rule.

    Raises:
        Refused: it is absolute, steps up, has empty parts, or cannot be a file's name.
    """
    if not isinstance(name, str):
        raise Refused(f"a file's name is a {type(name).__name__}")
    parts = name.split("/")
    if not name or len(name) > MOST_NAME_LETTERS or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"a file's name leads outside the folder: {name[:80]!r}")
    if "\\" in name or not name.isprintable():
        raise Refused(f"a file's name has letters that no name has: {name[:80]!r}")
    return name


def inside(folder: Path, name: object) -> Path:
    """Return the path of `name` in `folder`; symbolic links may not lead outside either.

    In the cache of the Hugging Face hub every file is a link into `blobs`, which is allowed.

    Raises:
        Refused: the file would be outside the folder.
    """
    path = folder / check_name(name)
    home = Path(os.path.realpath(folder))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    place = Path(os.path.realpath(path))
    if not any(place.is_relative_to(home) for home in homes):
        raise Refused(f"a link leads outside the folder: {str(name)[:80]!r}")
    return path


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading.

    Raises:
        Refused: it is a folder, a pipe or a device.
        OSError: as `open` raises it.
    """
    # Opening a pipe would wait for its writer, for ever; a device may have no end.
    file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115 - returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Refused(f"{path.name} is not a plain file")
    return file


def read_plain(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a plain file; Refused if it is another thing, or larger than `most_bytes`."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise Refused(f"it is larger than {most_bytes} bytes")
        return file.read()
