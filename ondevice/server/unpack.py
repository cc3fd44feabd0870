"""Zips from outside: every name and size is checked before a byte is written."""

from __future__ import annotations

import errno
import re
import stat
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from ondevice.artifact.files import storage_errors
from ondevice.core.errors import ArtifactError, OndeviceError, StorageError

SUFFIXES = (
    ".json", ".jsonl", ".safetensors", ".txt", ".md", ".jinja", ".model", ".yaml", ".pte", ".ptd", ".mlxfn", ".sh",
    ".gguf", ".swift",
)  # fmt: skip
"""Kinds of files to upload: no pickle (.bin, .pt, .pth, .ckpt, .pkl) and no Python."""
MAX_FILES = 2000
MAX_DEPTH = 6
DIRECTORY_BYTES = 5
"""Index of the directory's length in the end record that zipfile reads."""
ENTRY_BYTES = 1024
"""Most bytes of a file in that list: 46 bytes, its name, and a packer's extra fields."""
BY_THE_WAY = (
    ".DS_Store",
    "Thumbs.db",
    "desktop.ini",
    ".gitattributes",
    ".gitignore",
    "LICENSE",
    "NOTICE",
    "README",
)
MAX_RATIO = 200
"""Largest ratio of unpacked to packed size; safetensors and text stay far below."""
_CHUNK_BYTES = 1 << 20
_DAMAGED = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError,
    KeyError, ValueError, OverflowError,
)  # fmt: skip
"""Errors of zipfile for invalid bytes; OSError is for an offset before the start of the file."""
_PART = re.compile(r"[A-Za-z0-9_+=@-][A-Za-z0-9._+=@ -]{0,199}")


def unpack(
    source: Path, folder: Path, *, limit_bytes: int, room_bytes: int | None = None
) -> list[str]:
    """Unpack a zip into an empty folder; return the names of its files.

    A single top folder is left out, so that a zip of a folder gives the folder's files.

    Args:
        limit_bytes: limit of all unpacked files together.
        room_bytes: disk space that they may take; None for no limit.

    Raises:
        ArtifactError: not a zip, damaged, encrypted or too large; or a name that leads elsewhere,
            occurs twice, is a link, or is of a kind that may not be uploaded.
        StorageError: the disk is full, or has too little space for the files.
    """
    try:
        _check_directory(source)
        with zipfile.ZipFile(source) as archive:
            entries = [
                entry
                for entry in archive.infolist()
                if not entry.filename.endswith("/") and not _by_the_way(entry.filename)
            ]
            names = [_check(entry) for entry in entries]
            _check_all(entries, names, limit_bytes)
            total = sum(entry.file_size for entry in entries)
            if room_bytes is not None and total > room_bytes:
                raise StorageError(
                    "not enough space on the disk",
                    expected=f"{total} bytes",
                    received=f"{max(0, room_bytes)} to spare",
                )
            names = _without_top(names)
            left = limit_bytes
            for entry, name in zip(entries, names):
                left -= _write(archive, entry, folder / name, left)
    except OndeviceError:
        raise
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (
            errno.EINVAL,
            None,
        ):  # of the disk, not of the zip
            raise StorageError(f"the zip cannot be unpacked: {error.strerror}") from None
        raise ArtifactError(
            "the zip cannot be read",
            expected="a complete zip file",
            received=f"{type(error).__name__}: {error}",
            hint="pack it again with `zip -r` or Python's zipfile",
        ) from None
    return [str(name) for name in names]


def _check_directory(source: Path) -> None:
    """Refuse a zip with too long a list of files before it is read into memory."""
    with open(source, "rb") as file:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # what ZipFile itself reads first
    if end is not None and end[DIRECTORY_BYTES] > MAX_FILES * ENTRY_BYTES:
        raise ArtifactError(
            "the zip has too many files",
            expected=f"at most {MAX_FILES}",
            received=f"a list of {end[DIRECTORY_BYTES]} bytes",
        )


def _by_the_way(name: str) -> bool:
    """Return True for files that systems and repositories add to a zip; they are not unpacked."""
    path = PurePosixPath(name)
    return "__MACOSX" in path.parts or path.name.startswith("._") or path.name in BY_THE_WAY


def _check(entry: zipfile.ZipInfo) -> PurePosixPath:
    name = entry.filename
    if "\0" in entry.orig_filename:
        name = entry.orig_filename
    path = PurePosixPath(name)
    kind = entry.external_attr >> 16
    if (
        "\\" in name
        or path.is_absolute()
        or not path.parts
        or not all(map(_PART.fullmatch, path.parts))
    ):
        raise ArtifactError(
            f"the zip holds a name that leads elsewhere or cannot be used: {name[:200]!r}",
            expected="plain names below one folder: letters, digits, '.', '_', '-'",
            received=name[:200],
        )
    if kind and not stat.S_ISREG(kind) and stat.S_IFMT(kind):
        raise ArtifactError(
            f"{name}: only plain files may be uploaded",
            expected="a file",
            received="a link or device",
        )
    if len(path.parts) > MAX_DEPTH:
        raise ArtifactError(
            f"{name}: too many folders", expected=f"at most {MAX_DEPTH}", received=len(path.parts)
        )
    if path.suffix.lower() not in SUFFIXES:
        raise ArtifactError(
            f"{name}: files of this kind cannot be uploaded",
            expected=", ".join(SUFFIXES),
            received=path.suffix or "no suffix",
            hint="weights as safetensors: pickled ones can run any code",
        )
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArtifactError(
            f"{name} uses an unsupported compression", expected="stored or deflated"
        )
    if entry.flag_bits & 1:
        raise ArtifactError(f"{name} is encrypted", expected="a zip without a password")
    return path


def _check_all(
    entries: list[zipfile.ZipInfo], names: list[PurePosixPath], limit_bytes: int
) -> None:
    if not entries:
        raise ArtifactError("the zip is empty", expected="files", received="none")
    if len(entries) > MAX_FILES:
        raise ArtifactError(
            "the zip has too many files", expected=f"at most {MAX_FILES}", received=len(entries)
        )
    lower = [str(name).lower() for name in names]  # on some disks A and a are one file
    if len(set(lower)) < len(lower):
        twice = next(name for name in lower if lower.count(name) > 1)
        raise ArtifactError(f"the zip holds {twice} twice", expected="each name once")
    total = sum(entry.file_size for entry in entries)
    if total > limit_bytes:
        raise ArtifactError(
            "the zip is too large unpacked", expected=f"at most {limit_bytes} bytes", received=total
        )
    for entry in entries:
        if entry.file_size > MAX_RATIO * max(entry.compress_size, 1 << 12):
            raise ArtifactError(
                f"{entry.filename} is packed suspiciously small",
                received=f"{entry.file_size} bytes",
            )


def _without_top(names: list[PurePosixPath]) -> list[PurePosixPath]:
    tops = {name.parts[0] for name in names}
    if len(tops) == 1 and all(len(name.parts) > 1 for name in names):
        return [PurePosixPath(*name.parts[1:]) for name in names]
    return names


def _write(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, left: int) -> int:
    """Unpack one file and return its number of bytes, counted: the zip's figure may be wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
    except (FileExistsError, NotADirectoryError):
        raise ArtifactError(
            f"{entry.filename} is a file and a folder in the zip", expected="one of both"
        ) from None
    written = 0
    with open(path, "wb") as file, archive.open(entry) as source, storage_errors(path):
        while chunk := source.read(_CHUNK_BYTES):
            written += len(chunk)
            if written > min(left, entry.file_size):
                raise ArtifactError(
                    f"{entry.filename} is larger than the zip says", expected=entry.file_size
                )
            file.write(chunk)
    return written
