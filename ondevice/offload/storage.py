"""The disk tier: a scratch file of fixed-size records, one a unit, moved during the computation.

A record is its payload, padded to whole 4096-byte blocks, and one trailer block that says which
record it is, which write of it, and the payload's checksum. So a lost, partial, misplaced or older
write is an error that names the record, never wrong weights. Page caches are bypassed if the file
system allows it."""

from __future__ import annotations

import hashlib
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ondevice.core.errors import StorageError
from ondevice.offload.device import BLOCK_BYTES, buffer, round_up
from ondevice.offload.drive import Backend, Drive, Meter, checksum, reason, reserve

CHUNK_BYTES = 8 << 20
"""One request; a record's chunks are spread over the threads, so that the drive has several to work
on."""
_RESUME = "resume from the last checkpoint"
_TRAILER = struct.Struct("<8sIIQQ16s")
_FIELDS = (
    "magic",
    "version",
    "record number",
    "generation",
    "payload length in bytes",
    "payload checksum",
)
_MAGIC = b"ODTIER\r\n"
_VERSION = 1


@dataclass(eq=False)
class Job:
    """One read or write of one record; `left` counts its chunks."""

    record: int
    payload: torch.Tensor
    write: bool
    future: Future[None] = field(default_factory=Future)
    trailer: torch.Tensor = field(default_factory=lambda: buffer(BLOCK_BYTES, pin=False))
    checksums: dict[int, bytes] = field(default_factory=dict)
    generation: int = 0
    left: int = 0
    error: BaseException | None = None

    def seal(self, payload_bytes: int) -> bytes:
        """Return the trailer block that belongs to what was moved."""
        sums = b"".join(self.checksums[start] for start in sorted(self.checksums))
        digest = hashlib.blake2b(sums, digest_size=16).digest()
        fields = _TRAILER.pack(
            _MAGIC, _VERSION, self.record, self.generation, payload_bytes, digest
        )
        return fields.ljust(BLOCK_BYTES, b"\0")

    def compare(self, block: bytes) -> tuple[Any, ...] | None:
        """Compare the trailer that was read with `block`; return what differs: words, expected and
        received."""
        trailer = self.trailer.numpy().tobytes()
        for name, expected, received in zip(
            _FIELDS, _TRAILER.unpack_from(block), _TRAILER.unpack_from(trailer)
        ):
            if expected != received:
                show = [
                    value.hex() if isinstance(value, bytes) else value
                    for value in (expected, received)
                ]
                return f"came back damaged or not as last written: its {name}", *show
        if trailer == block:
            return None
        return ("came back with a damaged trailer",)

    def resolve(self, error: BaseException | None) -> None:
        """Give the future its result, unless it has one: `close` was faster, or its owner cancelled
        it."""
        try:
            self.future.set_result(None) if error is None else self.future.set_exception(error)
        except InvalidStateError:
            pass


class TierFile:
    """A file of fixed-size records in `folder`; scratch state, removed by `close`. A context
    manager.

    Everything queued for one record happens in order; different records overtake each other.

    Args:
        folder: on a local disk; made if absent. A file called `name` in it is replaced.
        sizes_bytes: payload of every record, each at least 1.
        backend: "auto" and "direct" bypass the page cache (O_DIRECT), and fall back to "buffered"
            if the file system refuses; the attribute `backend` says so. macOS is "buffered" with
            F_NOCACHE.
        workers: threads, and the number of requests that the drive sees at once.
        timeout_s: how long `close` waits for a drive that moves nothing.
        generations: open the kept file `name` instead of a new one, and expect these (see
            `generations`).

    Raises:
        StorageError: the disk has no room for all records (no file is left behind), the folder
            cannot be written, or the kept file is absent or of another size.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        sizes_bytes: Sequence[int],
        *,
        backend: Backend = "auto",
        workers: int = 2,
        timeout_s: float = 60.0,
        generations: Sequence[int] | None = None,
    ) -> None:
        if not sizes_bytes or min(sizes_bytes) < 1 or workers < 1:
            raise ValueError(
                f"a tier file needs a thread and records of at least 1 byte: {workers}, {sizes_bytes}"
            )
        if generations is not None and len(generations) != len(sizes_bytes):
            raise ValueError(f"{len(generations)} generations for {len(sizes_bytes)} records")
        self.path = Path(folder) / name
        self._sizes = tuple(sizes_bytes)
        self._starts = tuple(
            accumulate((round_up(size) + BLOCK_BYTES for size in self._sizes), initial=0)
        )
        if generations is None:
            reserve(self.path, self._starts[-1])
        self._drive = Drive(self.path, backend)
        if (actual_bytes := self.path.stat().st_size) != self._starts[-1]:
            self._drive.close()
            message = f"{self.path}: not the offload file that was kept"
            raise StorageError(
                message, expected=f"{self._starts[-1]} bytes", received=f"{actual_bytes} bytes"
            )
        self._generations = list(generations or [0] * len(self._sizes))
        self._failed: dict[int, BaseException] = {}
        self._lines: list[deque[Job]] = [deque() for _ in self._sizes]
        self._reads = Meter()
        self._writes = Meter()
        self._changed = threading.Condition()
        self._timeout_s = timeout_s
        self._closed = self._abandoned = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Daemons: a thread that a dead drive holds must not keep the process from ending.
        titles = [f"tier {name} {number}" for number in range(workers)]
        self._threads = [
            threading.Thread(target=self._work, name=title, daemon=True) for title in titles
        ]
        for thread in self._threads:
            thread.start()

    backend = property(lambda self: self._drive.backend, doc='"direct" or "buffered": see `Drive`.')
    bytes_read = property(lambda self: self._reads.moved, doc="Bytes read, trailers included.")
    bytes_written = property(
        lambda self: self._writes.moved, doc="Bytes written, trailers included."
    )
    read_s = property(
        lambda self: self._reads.seconds, doc="Seconds with a read under way, checks included."
    )
    write_s = property(
        lambda self: self._writes.seconds, doc="Seconds with a write under way, checks included."
    )
    generations = property(
        lambda self: tuple(self._generations), doc="Writes begun of each record, from 0."
    )

    def __enter__(self) -> TierFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except StorageError:
            if kind is None:  # else the first error says more
                raise

    def write(self, record: int, source: torch.Tensor) -> Future[None]:
        """Begin to write a record; `source` must stay as it is until the future has its result.

        Args:
            record: its number.
            source: uint8 [at least the record's size rounded up to 4096] from `buffer`.

        Returns:
            A future; its result() raises StorageError if the bytes did not reach the drive.

        Raises:
            ValueError: the tensor is of another type, too short or not aligned.
            StorageError: the file is closed.
        """
        return self._submit(record, source, write=True)

    def read(self, record: int, into: torch.Tensor) -> Future[None]:
        """Begin to read a record as the last write before left it; see `write` for the arguments
        and errors.

        Returns:
            A future; its result() raises StorageError if the record was never written, if the last
                write of it failed, or if the data is short, damaged, of another record or of an
                older write.
            `into` is then not to be used.
        """
        return self._submit(record, into, write=False)

    def payload(self, record: int) -> torch.Tensor:
        """Return a record's payload as a read-only map of the file, uint8, not checked; only while
        nothing is written."""
        shape = (self._sizes[record],)
        return torch.from_numpy(np.memmap(self.path, np.uint8, "c", self._starts[record], shape))

    def close(self, *, keep: bool = False) -> None:
        """Wait for queued transfers, then remove the file unless `keep`. A second call does
        nothing.

        Raises:
            StorageError: the drive moved nothing for `timeout_s`. Queued transfers fail with the
                same error; the file is removed all the same.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            before = -1
            while not self._idle() and before != self.bytes_read + self.bytes_written:
                before = self.bytes_read + self.bytes_written
                self._changed.wait_for(self._idle, self._timeout_s)
            stuck = [job for line in self._lines for job in line]
            self._abandoned = bool(stuck)
        for _ in self._threads:
            self._tasks.put(None)
        if not stuck:
            for thread in self._threads:
                thread.join()
            self._drive.close()  # never while a thread may still use the file's number
        if not keep:
            self.path.unlink(missing_ok=True)
        if stuck:
            error = StorageError(
                f"{self.path}: {len(stuck)} transfers did not end, the first one of record {stuck[0].record}",
                received=f"nothing moved for {self._timeout_s:g} s",
                hint=f"the drive does not respond: check it, then {_RESUME}",
            )
            for job in stuck:
                job.resolve(error)
            raise error

    def _idle(self) -> bool:
        return not any(self._lines)

    def _submit(self, record: int, tensor: torch.Tensor, *, write: bool) -> Future[None]:
        if not 0 <= record < len(self._sizes):
            raise ValueError(f"record {record} of {len(self._sizes)}")
        wanted = round_up(self._sizes[record])
        flat = tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous()
        if tensor.dtype != torch.uint8 or not flat or len(tensor) < wanted:
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}"
            raise ValueError(
                f"record {record} needs a contiguous uint8 CPU tensor [at least {wanted}], not {got}"
            )
        if tensor.data_ptr() % BLOCK_BYTES:
            raise ValueError(
                f"record {record}: the tensor's address is not aligned to 4096; make it with buffer()"
            )
        job = Job(record, tensor[:wanted], write)
        with self._changed:
            if self._closed:
                raise StorageError(f"{self.path}: record {record}: the file is closed")
            self._lines[record].append(job)
            if len(self._lines[record]) == 1:
                self._tasks.put(partial(self._begin, job))
        return job.future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._abandoned:
                task()

    def _begin(self, job: Job) -> None:
        """First in its record's line: check, and cut it into chunks for all threads."""
        runs = job.future.set_running_or_notify_cancel()
        with self._changed:
            self._meter(job).run(1)
            if job.write and runs:
                self._generations[job.record] += 1
            job.generation = self._generations[job.record]
        if runs and job.generation == 0:
            job.error = StorageError(
                f"{self.path}: record {job.record} was never written", hint="write it first"
            )
        elif not job.write:
            job.error = self._failed.get(job.record)
        if not runs or job.error:
            return self._end(job)
        stop = len(job.payload) + (0 if job.write else BLOCK_BYTES)
        starts = [
            *range(0, len(job.payload), CHUNK_BYTES),
            *([] if job.write else [len(job.payload)]),
        ]
        job.left = len(starts)
        for start, end in zip(starts, [*starts[1:], stop]):
            self._tasks.put(partial(self._chunk, job, start, end))

    def _chunk(self, job: Job, start: int, stop: int) -> None:
        try:
            if job.error is None:
                self._move(job, start, stop)
        except BaseException as error:
            job.error = error
        with self._changed:
            job.left -= 1
            if job.left:
                return
        try:
            if job.error is None:
                self._finish(job)
        except BaseException as error:
            job.error = error
        self._end(job)

    def _move(self, job: Job, start: int, stop: int) -> None:
        """Bytes `start` to `stop` of the record; those behind the payload are the trailer."""
        behind = start >= len(job.payload)
        if behind:
            chunk = job.trailer
        else:
            chunk = job.payload[start:stop]
        if job.write and not behind:
            job.checksums[start] = checksum(chunk)
        try:
            moved = self._drive.move(chunk, self._starts[job.record] + start, write=job.write)
        except OSError as error:
            raise self._error(
                job, f"cannot be {_done(job)}: {reason(error)}", offset=start
            ) from error
        with self._changed:
            self._meter(job).moved += moved
        if moved != stop - start:
            what = f"was {_done(job)} only in part"
            raise self._error(job, what, f"{stop - start} bytes", f"{moved} bytes", offset=start)
        if not job.write and not behind:
            job.checksums[start] = checksum(chunk)

    def _finish(self, job: Job) -> None:
        """All chunks moved: write the trailer, or check the one that was read."""
        block = job.seal(self._sizes[job.record])
        size = len(job.payload)
        if job.write:
            job.trailer.numpy()[:] = np.frombuffer(block, np.uint8)
            return self._move(job, size, size + BLOCK_BYTES)
        problem = job.compare(block)
        if problem is not None:
            raise self._error(job, *problem, offset=size)

    def _end(self, job: Job) -> None:
        with self._changed:
            self._meter(job).run(-1)
            if job.write and job.error is not None:
                self._failed[job.record] = job.error
            elif job.write and not job.future.cancelled():
                self._failed.pop(job.record, None)
        job.resolve(job.error)
        with self._changed:
            line = self._lines[job.record]
            line.popleft()
            if line:
                self._tasks.put(partial(self._begin, line[0]))
            self._changed.notify_all()

    def _meter(self, job: Job) -> Meter:
        return self._writes if job.write else self._reads

    def _error(
        self, job: Job, what: str, expected: Any = None, received: Any = None, *, offset: int
    ) -> StorageError:
        place = f"{self.path}: record {job.record} at byte {self._starts[job.record] + offset} of the file"
        return StorageError(f"{place} {what}", expected=expected, received=received, hint=_RESUME)


def _done(job: Job) -> str:
    return "written" if job.write else "read"
