"""Things that take long to make and that several tests only look at: made once, by whichever worker
needs it first.

A thing is a folder under build/tests, named by a hash of what it is made from: the settings, every
source file of the package, and the versions of the libraries that make it. So another worker, and
the next run of unchanged code, find it there; any change of code makes it anew. Things that nothing
has asked for in a week are removed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "tests" / "cached"
LIBRARIES = ("torch", "executorch", "transformers", "torchao", "mlx", "numpy")
WEEK_S = 7 * 24 * 3600
T = TypeVar("T")


@functools.cache
def code() -> str:
    """A hash of everything that decides what an export writes."""
    digest = hashlib.sha256()
    for room in ("ondevice", "exporters", "runtime_ops"):
        for path in sorted((ROOT / room).rglob("*")):
            if (
                path.suffix in (".py", ".cpp", ".h", ".yaml")
                and path.is_file()
                and not path.is_symlink()
                and path.parent.name != "host"  # a program that runs what was exported
            ):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    for name in LIBRARIES:
        digest.update(f"{name} {version(name)}".encode())
    return digest.hexdigest()


def cached(name: str, settings: str, make: Callable[[Path], T]) -> T:
    """Return what `make` gave for these settings, now or in another process.

    Args:
        name: for people who look into the folder.
        settings: everything next to the code that decides the result.
        make: writes into an empty folder, whose place is what the result may name; gives something
            that can be pickled.
    """
    key = hashlib.sha256((code() + settings).encode()).hexdigest()[:20]
    FOLDER.mkdir(parents=True, exist_ok=True)
    place = FOLDER / f"{key} {name}"  # a space, because a user's folder has one
    with open(FOLDER / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = place / "result.pickle"
        if not result.is_file():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            whole = place / "result.partial"
            whole.write_bytes(pickle.dumps(make(place)))
            os.replace(whole, result)  # a run that is killed leaves a whole one or none
            _sweep()
        os.utime(result)
        return pickle.loads(result.read_bytes())


def _sweep() -> None:
    """Remove what no run has asked for lately, other versions of the code among them.

    Their locks stay: who waits for one that is removed would not see who holds the next of its
    name.
    """
    for place in FOLDER.iterdir():
        result = place / "result.pickle"
        if not result.is_file() or time.time() - result.stat().st_mtime <= WEEK_S:
            continue
        with open(place.with_name(place.name.partition(" ")[0] + ".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # somebody has just asked for it
                continue
            if result.is_file() and time.time() - result.stat().st_mtime > WEEK_S:
                shutil.rmtree(place, ignore_errors=True)
