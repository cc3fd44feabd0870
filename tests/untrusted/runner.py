"""Runs mutations of a kind in forked children, and tells how each ended.

A child has a limit of memory and, for each mutation, of time. A signal ends it alone: the next one
goes on behind the mutation that it names.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ondevice.core.errors import OndeviceError
from tests.untrusted import mutations

MOST_BYTES = 1 << 30
MOST_S = 20
"""Of the processor; a machine that does other things may take longer."""
_BYTES_A_S = 4 << 20
"""A second more for these: files grow to 150 MB, and are read in time that grows with them."""
_MOST_WAIT_S = 600
"""On a machine with fifteen other processes ten seconds of the processor took four minutes."""
_A_CHILD = 250
"""Mutations of one process."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        build: writes a whole example into an empty folder.
        read: reads it as a user would; gives anything, or raises an `OndeviceError`.
        changed: by file, the functions that change its bytes knowingly; bytes are changed blindly too.
        after: mends what else names the file, such as its hash, after a change.
    """

    name: str
    build: Callable[[Path], None]
    read: Callable[[Path], object]
    changed: dict[str, tuple[Callable[[random.Random, bytes], bytes], ...]]
    after: Callable[[Path], None] = lambda folder: None


@dataclass
class Tally:
    """How the mutations of a kind ended; `failures` has number and reason of the first ones."""

    kind: str
    mutations: int = 0
    refused: int = 0
    read: int = 0
    signals: int = 0
    exceptions: int = 0
    seconds: float = 0.0
    is_cut: bool = False
    failures: list[tuple[int, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def run(
    kind: Kind, count: int, *, seed: int = 0, first: int = 0, most_s: float | None = None
) -> Tally:
    """Run mutations `first` to `first + count` of a kind, or fewer if `most_s` seconds are over or
    Ctrl-C ends them."""
    tally, number = Tally(kind.name), first
    with _example(kind) as (folder, originals):
        began = time.monotonic()
        try:
            while number < first + count and (most_s is None or time.monotonic() - began < most_s):
                end = min(first + count, number + _A_CHILD)
                number = _child(kind, folder, originals, seed, number, end, tally)
        except KeyboardInterrupt:
            tally.is_cut = True
    tally.seconds = time.monotonic() - began
    return tally


@contextmanager
def _example(kind: Kind) -> Iterator[tuple[Path, dict[str, bytes]]]:
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="untrusted-", dir=memory if memory.is_dir() else None))
    try:
        folder = root / "example"
        folder.mkdir()
        kind.build(folder)
        originals = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        kind.read(folder)  # whole: an example that is refused would prove nothing
        yield folder, originals
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _child(
    kind: Kind,
    folder: Path,
    originals: dict[str, bytes],
    seed: int,
    first: int,
    end: int,
    tally: Tally,
) -> int:
    """Run mutations in a child; return the number to go on with."""
    progress = mmap.mmap(-1, 8)
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        try:
            _work(kind, folder, originals, seed, first, end, progress, os.fdopen(target, "w"))
        finally:
            os._exit(0)
    os.close(target)
    with os.fdopen(source) as lines:
        for line in lines:
            ended, number, reason = json.loads(line)
            tally.mutations += 1
            setattr(tally, ended, getattr(tally, ended) + 1)
            tally.reasons[reason if ended == "refused" else ended] += 1
            if ended == "exceptions":
                tally.failures.append((number, reason))
    _, status = os.waitpid(child, 0)
    reached = struct.unpack("<q", progress[:8])[0]
    progress.close()
    if not os.WIFSIGNALED(status):
        return end
    tally.mutations += 1
    tally.signals += 1
    tally.failures.append((reached, f"signal {signal.Signals(os.WTERMSIG(status)).name}"))
    return reached + 1


def _work(kind, folder, originals, seed, first, end, progress, report) -> None:  # type: ignore[no-untyped-def]
    faulthandler.disable()  # its traceback of a signal would go to the log of the tests
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _data_bytes() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in range(first, end):
        progress[:8] = struct.pack("<q", number)
        mutate(kind, folder, originals, seed, number)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        signal.setitimer(signal.ITIMER_PROF, MOST_S + size / _BYTES_A_S)
        signal.alarm(_MOST_WAIT_S)
        try:
            kind.read(folder)
            ended, reason = "read", ""
        except OndeviceError as error:
            ended, reason = "refused", type(error).__name__
            try:
                _ = (
                    str(error).encode(),
                    json.dumps(error.to_dict()).encode(),
                    error.message.encode(),
                )
            except Exception as unprintable:
                ended, reason = "exceptions", f"the error cannot be printed: {unprintable!r}"
        except BaseException as error:
            ended, reason = "exceptions", _reason(error)
        signal.setitimer(
            signal.ITIMER_PROF, 0
        )  # writing the next mutation is not the reader's time
        signal.alarm(0)
        report.write(json.dumps([ended, number, reason]) + "\n")
        report.flush()


def mutate(kind: Kind, folder: Path, originals: dict[str, bytes], seed: int, number: int) -> None:
    """Make the folder whole again, and damage it."""
    shutil.rmtree(folder)
    for name, content in originals.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    draw = random.Random(f"{seed} {kind.name} {number}")
    name = draw.choice(list(kind.changed))
    path, knowing = folder / name, kind.changed[name]
    chance = draw.random()
    if chance < 0.05:
        mutations.other_file(draw, path)
    elif chance < 0.6 and knowing:
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            try:
                path.write_bytes(draw.choice(knowing)(draw, path.read_bytes()))
            except (ValueError, RecursionError, KeyError, OverflowError):
                break  # changed once already, into what cannot be changed knowingly again
            except Exception:
                break
    else:
        path.write_bytes(mutations.flip_bytes(draw, path.read_bytes()))
    kind.after(folder)


def _data_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))


def _reason(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/tests/" not in frame.filename
    ]
    ours = [
        frame
        for frame in frames
        if "/ondevice/" in frame.filename or "/exporters/" in frame.filename
    ]
    last = (ours or frames or [None])[-1]
    where = f"{Path(last.filename).name}:{last.lineno} {last.name}" if last else ""
    return f"{type(error).__name__}: {str(error)[:100]!r} at {where}"


def main(kinds: dict[str, Kind], arguments: list[str] | None = None) -> int:
    """Run from the command line; print a line for each kind and, last, one JSON object."""
    import argparse

    parser = argparse.ArgumentParser(description="Damage files of every kind and read them.")
    parser.add_argument("--kind", action="append", choices=list(kinds), help="all without it")
    parser.add_argument("--count", type=int, default=100_000, help="mutations of each kind")
    parser.add_argument("--seconds", type=float, help="most for each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    options = parser.parse_args(arguments)
    tallies = []
    for name in options.kind or kinds:
        tally = run(
            kinds[name],
            options.count,
            seed=options.seed,
            first=options.first,
            most_s=options.seconds,
        )
        tallies.append(tally)
        print(
            f"{name:22} {tally.mutations:7} mutations, {tally.read:6} read, {tally.refused:6} refused, "
            f"{tally.exceptions:5} exceptions, {tally.signals:4} signals, {tally.seconds:6.1f} s",
            flush=True,
        )
        for reason, count in Counter(reason for _, reason in tally.failures).most_common(12):
            number = next(number for number, other in tally.failures if other == reason)
            print(f"    {count:5} times, first {number}: {reason}", flush=True)
        if tally.is_cut:
            break
    total = {
        key: sum(getattr(tally, key) for tally in tallies)
        for key in ("mutations", "exceptions", "signals")
    }
    each = {tally.kind: tally.mutations for tally in tallies}
    print(
        json.dumps(
            {"seed": options.seed, **total, "kinds": len(tallies), "mutations_by_kind": each}
        )
    )
    return 1 if total["exceptions"] or total["signals"] else 0


if __name__ == "__main__":
    from tests.untrusted.kinds import KINDS

    sys.exit(main(KINDS))
