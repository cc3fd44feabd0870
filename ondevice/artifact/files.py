"""Files and folders that are complete or absent: written under another name, flushed, then renamed.

A crash, a full disk or a kill at any moment leaves the previous content under the name. The next
write of the same name removes partial files of a killed process. Named numpy arrays go into one
safetensors file, in a stream with its hash and without a second copy; numpy has no bfloat16, so a
session hands out such a tensor as uint16 or float32.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.core.errors import CheckpointError, StorageError
from ondevice.core.untrusted import read_header

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = re.compile(
    r"No space left on device|Disk quota exceeded|os error (27|28|122)\b", re.IGNORECASE
)
_HASH_CHUNK_BYTES = 1 << 20
_RENAME_EXCHANGE = 2
"""Both Linux's renameat2 and macOS's renamex_np call the flag that swaps two names 2."""


@contextmanager
def storage_errors(path: str | Path) -> Iterator[None]:
    """Turn a full disk into StorageError, also if a library wraps it in its own error
    (safetensors).

    Raises:
        StorageError: the disk is full or a quota is used up; `path` is what was being written.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in _FULL
        if full or _FULL_WORDS.search(str(error)):
            raise _full(path, error) from error
        raise


@contextmanager
def private() -> Iterator[None]:
    """Let only this user read and write new files inside: files are 0600, folders 0700.

    The mask is the process's, so what other threads create meanwhile is private too.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def atomic_write(path: str | Path, content: bytes | str) -> None:
    """Replace the file at `path` by `content` (text as UTF-8), all at once.

    Raises:
        StorageError: the disk is full, or the folder cannot be written.
    """
    target = Path(
        os.path.realpath(path)
    )  # through a link: the file it names is replaced, not the link
    data = content.encode("utf-8") if isinstance(content, str) else content
    with _named_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        partial = _beside(target)
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # before the rename, as in `atomic_directory`
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        fsync_folder(target.parent)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a free name to write a file of any size to; on a clean exit it takes the name `path`.

    Raises:
        StorageError: the disk is full, or the place cannot be written; what was there before is
            untouched.
    """
    target = Path(os.path.realpath(path))
    with _named_errors(target):
        if target.is_dir():
            raise StorageError(
                f"{target} is a folder", expected="a file's name", hint="choose another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
    partial = _beside(target)
    try:
        with storage_errors(target):
            yield partial
        with _named_errors(target):
            descriptor = os.open(partial, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # before the rename, as in `atomic_directory`
            finally:
                os.close(descriptor)
            os.replace(partial, target)
            fsync_folder(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: str | Path, *, marker: str | None = None) -> Iterator[Path]:
    """Yield an empty folder to fill; on a clean exit it takes the name `path`, replacing what was
    there.

    Args:
        path: the folder's final name. Its parents are made.
        marker: a file that only a folder of this kind has. With it, a non-empty folder that lacks
            the marker is never replaced, so that a wrong `--out` cannot delete somebody's files.

    Raises:
        StorageError: the disk is full, the place cannot be written, or `path` is a file or (with
            `marker`) a folder of another kind. The old content is untouched.
    """
    target = Path(os.path.realpath(path))
    with _named_errors(target):
        _check_replaceable(target, marker)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        partial = _beside(target)
        partial.mkdir()
    try:
        with storage_errors(target):
            yield partial
        with _named_errors(target):
            _check_replaceable(target, marker)
            # Flushed before the rename, which may reach the disk first: a power cut would leave a
            # whole name with empty files. The folder is flushed after it, so that the new name is
            # on the disk when this returns.
            fsync_tree(partial)
            _put_in_place(partial, target)
            fsync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sha256_file(path: str | Path) -> str:
    """Hash a file with SHA-256, in constant memory; return 64 hexadecimal digits."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_HASH_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sha256_spread(path: str | Path, pieces: int = 1024, piece_bytes: int = 1 << 20) -> str:
    """Hash a small file as `sha256_file` does; else its size and pieces spread evenly over all of
    it, so that hundreds of gigabytes take seconds."""
    size = os.path.getsize(path)
    if size <= pieces * piece_bytes:
        return sha256_file(path)
    digest = hashlib.sha256(f"{size} bytes, {pieces} pieces of {piece_bytes}".encode())
    with open(path, "rb", buffering=0) as file:
        for piece in range(pieces):
            file.seek(piece * (size - piece_bytes) // (pieces - 1))
            digest.update(file.read(piece_bytes))
    return digest.hexdigest()


def fsync_tree(folder: str | Path) -> None:
    """Flush every file and folder below `folder`, and itself, to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        fsync_folder(Path(root))


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn every OSError of this module's own work into an error that names the place."""
    try:
        with storage_errors(path):
            yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}",
            received=f"{error.strerror or error} ({error.filename})"
            if error.filename
            else str(error),
            hint="choose a folder that exists and that you may write to",
        ) from error


def _full(path: str | Path, error: BaseException) -> StorageError:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return StorageError(
            f"{path} is larger than a file may be",
            received=error.strerror,
            hint="raise the limit (`ulimit -f`) or choose another file system; "
            "what was there before is unharmed",
        )
    try:
        folder = Path(path)
        while not folder.exists():
            folder = folder.parent
        free = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"
    except OSError:
        free = str(error)
    return StorageError(
        f"no space left while writing {path}",
        received=free,
        hint="free some space or choose another disk; what was there before is unharmed",
    )


def _check_replaceable(target: Path, marker: str | None) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        expected = "a folder or a free name"
        raise StorageError(f"{target} is a file", expected=expected, hint="choose another name")
    if marker is None or (target / marker).is_file():
        return
    first = next(iter(sorted(os.listdir(target))), None)
    if first is not None:
        raise StorageError(
            f"{target} holds other files and would be replaced",
            expected=f"an empty folder, or one with {marker}",
            received=first,
            hint="choose another name, or empty the folder yourself",
        )


def _node() -> str:  # process numbers of another machine on a shared disk say nothing here
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _beside(target: Path) -> Path:
    return target.parent / f".{target.name}.partial-{_node()}-{os.getpid()}-{secrets.token_hex(4)}"


def _remove_leftovers(target: Path) -> None:
    """Remove partial files that ended processes of this machine left next to `target`."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.partial-{_node()}-(\d+)-[0-9a-f]{{8}}")
    for entry in os.scandir(target.parent):
        match = pattern.fullmatch(entry.name)
        if match and not _alive(int(match[1])):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    if os.name == "nt":
        return True  # os.kill would end the process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _put_in_place(partial: Path, target: Path) -> None:
    if not target.exists():
        os.rename(partial, target)
    elif not _exchange(partial, target):
        # A file system that cannot swap two names: between the two renames the old content has
        # another name.
        old = _beside(target)
        os.rename(target, old)
        os.rename(partial, target)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(path: Path, other: Path) -> bool:
    """Swap two names in one system call; False if the system or the file system cannot."""
    first = os.fsencode(path)
    second = os.fsencode(other)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return libc.renamex_np(first, second, _RENAME_EXCHANGE) == 0
        return libc.renameat2(-100, first, -100, second, _RENAME_EXCHANGE) == 0
    except (AttributeError, OSError, TypeError):
        return False


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder: a rename into it is on the disk then."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DamagedError(CheckpointError):
    """A file is not what was written: cut off, changed or missing."""


_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_CHUNK_BYTES = 1 << 24
PADDING = "__padding"


def write_tensors(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    written: Callable[[str], None] | None = None,
    bfloat16: bool = False,
    alignment: int = 8,
) -> str:
    """Write `tensors` to `path` and return the SHA-256 of the file; the caller waits for the disk.

    Args:
        written: called with the name of each array that has been read and may change again; the
            arrays are then written in the order of `tensors`.
        bfloat16: uint16 arrays are bfloat16 numbers, and the file is one of transformers' weights.
        alignment: bytes, at multiples of which every tensor begins; the format has no holes, so
            that unused bytes are tensors named `PADDING` and a number.

    Raises:
        CheckpointError: if an array is of a type that safetensors has no name for.
        OSError: from the disk.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if bfloat16 else {}
    arrays = []
    offset = 0
    items = list(tensors.items())
    if written is None:
        items.sort(key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, array in _padded(items, alignment):
        kind = "BF16" if bfloat16 and array.dtype.name == "uint16" else _NAMES.get(array.dtype.name)
        if kind is None:
            raise CheckpointError(
                f"the session's state '{name}' cannot be saved",
                expected=", ".join(_NAMES),
                received=array.dtype,
            )
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
        arrays.append((name, array))
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(len(head) + 8) % alignment)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for head_bytes in (len(head).to_bytes(8, "little"), head):
            digest.update(head_bytes)
            file.write(head_bytes)
        for name, array in arrays:
            little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
            flat = little.reshape(-1).view(np.uint8)
            for start in range(
                0, flat.size, _CHUNK_BYTES
            ):  # hashed and written while it is in the cache, and no copy
                chunk = flat[start : start + _CHUNK_BYTES].data
                digest.update(chunk)
                file.write(chunk)
            if written is not None:
                written(name)
    return digest.hexdigest()


def _padded(
    items: list[tuple[str, np.ndarray]], alignment: int
) -> Iterator[tuple[str, np.ndarray]]:
    for number, (name, array) in enumerate(items):
        yield name, array
        if alignment > 8 and (unused := -array.nbytes % alignment):
            yield f"{PADDING}{number}", np.zeros(unused, np.uint8)


def read_tensors(path: Path, *, mapped: bool = False) -> dict[str, np.ndarray]:
    """Read what `write_tensors` wrote; the arrays can be written to. `mapped` leaves them in the
    file until they are looked at.

    Raises:
        DamagedError: if the file is not whole.
    """
    kinds = {kind: np.dtype(name) for name, kind in _NAMES.items()}
    tensors = {}
    try:
        places = read_header(path).tensors
        with path.open("rb") as file:
            for name, place in places.items():
                if place.dtype not in kinds:
                    raise ValueError(f"'{name}' is of dtype {place.dtype}")
                kind = kinds[place.dtype]
                if mapped and place.end > place.start:
                    tensors[name] = np.memmap(path, kind, "c", place.start, place.shape).view(
                        np.ndarray
                    )
                    continue
                file.seek(place.start)
                array = np.empty(place.shape, dtype=kind)
                if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                    raise ValueError(f"'{name}' is cut off")
                tensors[name] = array
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path}: not a whole safetensors file: {error}") from None
    return tensors


CHECKED_ELEMENTS = 1 << 24
"""Elements of a state that are looked at together: a mask of all might not fit into memory."""
LOWER_HALVES = "low/"
"""Prefix of a state's uint16 arrays that are the lower 16 bits of float32 numbers."""


def not_finite(state: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of a state's first array with NaN or infinity.

    uint16 is bfloat16, as `as_numpy` leaves it, except for `LOWER_HALVES`."""
    for name, value in state.items():
        if value.dtype.kind == "f":
            finite = np.isfinite
        elif value.dtype == np.uint16 and not name.startswith(LOWER_HALVES):
            finite = _finite_bfloat16
        else:
            continue
        flat = value.reshape(-1)
        for low in range(0, flat.size, CHECKED_ELEMENTS):
            if not finite(flat[low : low + CHECKED_ELEMENTS]).all():
                return name
    return None


def _finite_bfloat16(bits: np.ndarray) -> np.ndarray:
    """An exponent of ones is infinity or NaN."""
    return (bits & np.uint16(0x7F80)) != np.uint16(0x7F80)
