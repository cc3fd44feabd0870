"""The disk tier gives back what was written, or an error that names the record."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ondevice.core.errors import StorageError  # noqa: E402
from ondevice.offload import drive  # noqa: E402
from ondevice.offload.storage import BLOCK_BYTES, CHUNK_BYTES, TierFile, buffer, checksum  # noqa: E402

BACKENDS = ("direct", "buffered")
SIZES = (1, 4095, 4096, 4097, CHUNK_BYTES + 12345, 2 * CHUNK_BYTES, 100_003)
SMALL = (10_000, 10_000, 10_000)
START = (
    3 * BLOCK_BYTES + BLOCK_BYTES
)  # of record 1 in a file of SMALL: 10000 bytes are 3 blocks, and a trailer
WAIT_S = 60


def filled(size: int, seed: int) -> torch.Tensor:
    tensor = buffer(size, pin=False)
    tensor[:size] = torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return tensor


def fails(future: Future[None], *words: str) -> StorageError:
    with pytest.raises(StorageError) as caught:
        future.result(WAIT_S)
    assert all(word in caught.value.message for word in words)
    return caught.value


@pytest.fixture(params=BACKENDS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A file of SMALL records, all written; record r holds `filled(10000, r)`."""
    with TierFile(tmp_path, "tier.bin", SMALL, backend=request.param) as file:
        for future in [file.write(record, filled(10_000, record)) for record in range(3)]:
            future.result(WAIT_S)
        yield file


def change(tier: TierFile, offset: int, data: bytes) -> None:
    with open(tier.path, "r+b") as file:
        file.seek(offset)
        file.write(data)
        os.fsync(file.fileno())


def content(tier: TierFile, offset: int, size: int) -> bytes:
    return tier.path.read_bytes()[offset : offset + size]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("workers", [1, 3])
def test_odd_sizes_come_back_with_many_in_flight(
    tmp_path: Path, backend: Any, workers: int
) -> None:
    sources = [filled(size, seed) for seed, size in enumerate(SIZES)]
    folder = tmp_path / "Straße mit Lücken 数据"
    with TierFile(folder, "état 1.bin", SIZES, backend=backend, workers=workers) as tier:
        assert tier.path.parent == folder and tier.path.is_file()
        targets = [buffer(size, pin=False) for size in SIZES]
        futures = [tier.write(record, source) for record, source in enumerate(sources)]
        futures += [tier.read(record, target) for record, target in enumerate(targets)]
        for future in futures:
            assert future.result(WAIT_S) is None
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source, target)
        moved = sum(len(source) + BLOCK_BYTES for source in sources)
        assert (
            (tier.bytes_written, tier.bytes_read)
            == (moved, moved)
            == (tier.path.stat().st_size,) * 2
        )
        assert tier.read_s > 0 and tier.write_s > 0
        assert tier.generations == (1,) * len(SIZES)
    assert not tier.path.exists()


def test_direct_io_is_really_chosen_where_the_system_has_it(tmp_path: Path) -> None:
    """/proc names the flags of the open file: what `backend` says must be what the kernel was asked for."""
    if not Path("/proc/self/fdinfo").is_dir():
        pytest.skip("no /proc")
    for wanted in BACKENDS:
        with TierFile(tmp_path, "tier.bin", SMALL, backend=wanted) as tier:
            text = Path(f"/proc/self/fdinfo/{tier._drive._file}").read_text()
            flags = int(text.split("flags:")[1].split()[0], 8)
            assert bool(flags & os.O_DIRECT) == (tier.backend == "direct")
            assert wanted == "direct" or tier.backend == "buffered"


def test_a_file_system_that_refuses_direct_io_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(drive.os, "open", refuse)
    with TierFile(tmp_path, "tier.bin", SMALL, backend="direct") as tier:
        assert tier.backend == "buffered"
        tier.write(0, filled(10_000, 5)).result(WAIT_S)
        tier.read(0, target := buffer(10_000, pin=False)).result(WAIT_S)
        assert torch.equal(target, filled(10_000, 5))


def test_requests_of_one_record_keep_their_order(tmp_path: Path) -> None:
    size = 3 * CHUNK_BYTES
    with TierFile(tmp_path, "tier.bin", [size], workers=4) as tier:
        futures, targets = [], []
        for seed in range(6):
            targets.append(buffer(size, pin=False))
            futures += [tier.write(0, filled(size, seed)), tier.read(0, targets[-1])]
        for future in futures:
            future.result(WAIT_S)
        for seed, target in enumerate(targets):
            assert torch.equal(target, filled(size, seed)), seed
        assert tier.generations == (6,)


@pytest.mark.parametrize("offset", [0, 5000, 3 * BLOCK_BYTES - 1])
def test_one_wrong_bit_in_the_payload_is_detected(tier: TierFile, offset: int) -> None:
    change(tier, START + offset, bytes([content(tier, START + offset, 1)[0] ^ 1]))
    error = fails(tier.read(1, buffer(10_000, pin=False)), "record 1 ", "payload checksum")
    assert error.hint == "resume from the last checkpoint" and error.expected != error.received
    assert str(tier.path) in error.message
    for record in (0, 2):  # the others are as they were
        tier.read(record, buffer(10_000, pin=False)).result(WAIT_S)


@pytest.mark.parametrize(
    ("offset", "name"),
    [(0, "magic"), (8, "version"), (12, "record"), (16, "gener"), (24, "length"), (40, "checksum")],
)
def test_one_wrong_byte_in_the_trailer_is_detected(tier: TierFile, offset: int, name: str) -> None:
    at = START + 3 * BLOCK_BYTES + offset
    change(tier, at, bytes([content(tier, at, 1)[0] ^ 0x80]))
    fails(tier.read(1, buffer(10_000, pin=False)), f"record 1 at byte {at - offset} ", f"{name}")


def test_one_wrong_byte_behind_the_trailers_fields_is_detected(tier: TierFile) -> None:
    change(tier, START + 4 * BLOCK_BYTES - 1, b"\1")
    fails(tier.read(1, buffer(10_000, pin=False)), "record 1 ", "damaged trailer")


@pytest.mark.parametrize("kept", [2 * START + BLOCK_BYTES, 2 * START + 777, 3 * START - 1])
def test_a_truncated_file_is_reported(tier: TierFile, kept: int) -> None:
    os.truncate(tier.path, kept)
    error = fails(tier.read(2, buffer(10_000, pin=False)), "record 2 ", "was read only in part")
    assert error.expected and error.received
    tier.read(1, buffer(10_000, pin=False)).result(WAIT_S)


def test_a_misplaced_record_is_detected(tier: TierFile) -> None:
    change(tier, START, content(tier, 0, START))
    error = fails(tier.read(1, buffer(10_000, pin=False)), "record 1 ", "record number")
    assert (error.expected, error.received) == (1, 0)


def test_a_stale_record_is_detected(tier: TierFile) -> None:
    """A drive that loses a write leaves a whole, valid record: only the generation tells."""
    old = content(tier, START, START)
    tier.write(1, filled(10_000, 9)).result(WAIT_S)
    change(tier, START, old)
    error = fails(tier.read(1, buffer(10_000, pin=False)), "record 1 ", "generation")
    assert (error.expected, error.received) == (2, 1)


def test_a_source_changed_during_its_write_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = filled(10_000, 0), os.pwritev
    with TierFile(tmp_path, "tier.bin", SMALL) as tier:

        def late(*arguments: Any) -> int:
            source[3] += 1
            return real(*arguments)

        monkeypatch.setattr(drive.os, "pwritev", late)
        tier.write(0, source).result(WAIT_S)
        fails(tier.read(0, buffer(10_000, pin=False)), "record 0 ", "payload checksum")


def test_checksum_finds_what_a_plain_sum_or_one_weighted_by_odd_numbers_misses() -> None:
    chunk = filled(16 * BLOCK_BYTES, 0)
    words = chunk.view(torch.int64).view(16, -1)
    top, seen = -(2**63), {checksum(chunk)}
    in_a_block, in_a_column = words.clone(), words.clone()
    in_a_block[5, [3, 7]] ^= top
    in_a_column[[3, 7], 5] ^= top
    twice = torch.cat([words[:8], words[:8]])
    for changed in (
        words.flip(0),
        words.roll(1, 0),
        words.roll(1, 1),
        twice,
        in_a_block,
        in_a_column,
    ):
        seen.add(checksum(changed.contiguous().view(torch.uint8).view(-1)))
    assert len(seen) == 7


def test_a_record_that_was_never_written(tmp_path: Path) -> None:
    with TierFile(tmp_path, "tier.bin", SMALL) as tier:
        fails(tier.read(2, buffer(10_000, pin=False)), "record 2 was never written")
        tier.write(2, filled(10_000, 0))
        tier.read(2, buffer(10_000, pin=False)).result(WAIT_S)


def test_tensors_that_cannot_be_moved_are_refused(tmp_path: Path) -> None:
    with TierFile(tmp_path, "tier.bin", [10_000]) as tier:
        good = buffer(20_000, pin=False)
        for tensor, why in (
            (good[8:], "not aligned to 4096"),
            (good[:10_000], "at least 12288]"),
            (good.view(torch.float32), "uint8"),
            (good[::2], "contiguous"),
        ):
            for call in (tier.write, tier.read):
                with pytest.raises(ValueError) as caught:
                    call(0, tensor)
                assert why in str(caught.value)
        with pytest.raises(ValueError):
            tier.write(1, good)
        tier.write(0, good).result(WAIT_S)  # longer than the record is fine


def test_a_full_disk_is_refused_before_any_record(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        TierFile(tmp_path, "tier.bin", [1 << 60])
    assert str(1 << 60)[:4] in str(caught.value.expected) and "bytes free" in str(
        caught.value.received
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_fills_up(tmp_path: Path) -> None:
    """A real one of 1 MiB, where this user may mount it; the free space is not looked at before."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drive.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
            with pytest.raises(StorageError):
                TierFile(tmp_path, "tier.bin", [2 << 20])
        assert list(tmp_path.iterdir()) == []
        with TierFile(tmp_path, "tier.bin", [500_000]) as tier:
            tier.write(0, filled(500_000, 0)).result(WAIT_S)
            tier.read(0, buffer(500_000, pin=False)).result(WAIT_S)
    finally:
        subprocess.run(
            ["umount", "--lazy", str(tmp_path)], check=True
        )  # also where a failure left it open


def test_a_limit_on_file_sizes(tmp_path: Path, root: Path) -> None:
    program = f"""
import resource, sys
sys.path.insert(0, {str(root)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from pathlib import Path
from ondevice.core.errors import StorageError
from ondevice.offload.storage import TierFile
try:
    TierFile(Path({str(tmp_path)!r}), "tier.bin", [2 << 20])
except StorageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "size limit" in done.stdout and "2101248 bytes" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EIO, "the disk reports an I/O error")],
)
def test_a_drive_that_fails_a_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    with TierFile(tmp_path, "tier.bin", SMALL) as tier:

        def fail(*_: Any) -> int:
            raise OSError(code, os.strerror(code))

        tier.write(1, filled(10_000, 0)).result(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(drive.os, "pwritev", fail)
            fails(
                tier.write(1, filled(10_000, 1)), f"record 1 at byte {START} ", f"written: {words}"
            )
        fails(
            tier.read(1, buffer(10_000, pin=False)), "record 1 ", f"written: {words}"
        )  # not the write before
        tier.write(1, filled(10_000, 2)).result(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(drive.os, "preadv", fail)
            fails(tier.read(1, buffer(10_000, pin=False)), "record 1 ", f"read: {words}")
        with monkeypatch.context() as patch:
            patch.setattr(drive.os, "pwritev", lambda *_: 0)
            fails(tier.write(1, filled(10_000, 2)), "record 1 ", "written only in part")


def test_a_partial_transfer_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may move less than it was asked for; the rest is then asked for."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            drive.os,
            name,
            lambda file, views, at, real=real: real(file, [memoryview(views[0])[:BLOCK_BYTES]], at),
        )
    with TierFile(tmp_path, "tier.bin", SMALL) as tier:
        tier.write(0, filled(10_000, 3)).result(WAIT_S)
        tier.read(0, target := buffer(10_000, pin=False)).result(WAIT_S)
        assert torch.equal(target, filled(10_000, 3))


def test_close_waits_for_queued_transfers(tmp_path: Path) -> None:
    tier = TierFile(tmp_path, "tier.bin", [CHUNK_BYTES] * 4)
    futures = [tier.write(record, filled(CHUNK_BYTES, record)) for record in range(4)]
    tier.close()
    assert all(future.done() and future.exception() is None for future in futures)
    assert not tier.path.exists()
    tier.close()
    with pytest.raises(StorageError):
        tier.write(0, filled(CHUNK_BYTES, 0))


def test_close_gives_up_on_a_drive_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, real, calls = threading.Event(), os.pwritev, []

    def hang(*arguments: Any) -> int:
        calls.append(arguments)
        release.wait(WAIT_S)
        return real(*arguments)

    tier = TierFile(tmp_path, "tier.bin", SMALL, timeout_s=0.2, workers=1)
    monkeypatch.setattr(drive.os, "pwritev", hang)
    futures = [tier.write(record, filled(10_000, record)) for record in (2, 0, 2)]
    with pytest.raises(StorageError) as caught:
        tier.close()
    assert "3 transfers" in caught.value.message
    for future in futures:
        fails(future, "did not end")
    assert not tier.path.exists()
    release.set()  # the thread comes back to a closed file and must end in peace
    for thread in tier._threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert all(future.exception() for future in futures)
    assert len(calls) == 2  # the payload that hung and its trailer; nothing else was begun


def test_a_slow_drive_is_not_a_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the time that `close` waits for all transfers one ends, and so each time: it waits again."""
    real, permits = os.pwritev, threading.Semaphore(0)

    def slow(*arguments: Any) -> int:
        assert permits.acquire(timeout=WAIT_S)
        return real(*arguments)

    monkeypatch.setattr(drive.os, "pwritev", slow)
    tier = TierFile(tmp_path, "tier.bin", SMALL, workers=1)
    futures = [tier.write(record % 3, filled(10_000, record)) for record in range(6)]
    wait_for, waits = tier._changed.wait_for, []

    def in_the_time(idle: Callable[[], bool], timeout_s: float) -> bool:
        waits.append(timeout_s)
        permits.release(2)  # a payload and its trailer
        wait_for(lambda: sum(map(len, tier._lines)) <= len(futures) - len(waits), WAIT_S)
        return idle()

    monkeypatch.setattr(tier._changed, "wait_for", in_the_time)
    tier.close()
    assert len(waits) == len(futures)
    assert all(future.exception() is None for future in futures)


def test_a_cancelled_request_does_not_block_others(tmp_path: Path) -> None:
    with TierFile(tmp_path, "tier.bin", [CHUNK_BYTES], workers=1) as tier:
        futures = [tier.write(0, filled(CHUNK_BYTES, seed)) for seed in range(4)]
        cancelled = futures[3].cancel()
        tier.read(0, target := buffer(CHUNK_BYTES, pin=False)).result(WAIT_S)
        assert torch.equal(target, filled(CHUNK_BYTES, 2 if cancelled else 3))


def test_the_file_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "tier.bin").write_bytes(b"x" * 1_000_000)
    with TierFile(tmp_path, "tier.bin", SMALL) as tier:
        assert tier.path.stat().st_size == 3 * START and not any(tier.path.read_bytes())


def test_a_kept_file_opens_with_its_generations(tmp_path: Path) -> None:
    tier = TierFile(tmp_path, "tier.bin", SMALL)
    for seed in (0, 1):
        tier.write(1, filled(10_000, seed)).result(WAIT_S)
    generations = tier.generations
    tier.close(keep=True)
    with TierFile(tmp_path, "tier.bin", SMALL, generations=generations) as again:
        again.read(1, target := buffer(10_000, pin=False)).result(WAIT_S)
        assert torch.equal(target, filled(10_000, 1))
        fails(again.read(0, target), "record 0 was never written")
        again.close(keep=True)
    with TierFile(tmp_path, "tier.bin", SMALL, generations=(0, 3, 0)) as stale:
        fails(stale.read(1, target), "record 1 ", "generation")
        stale.close(keep=True)
    with pytest.raises(StorageError, check=lambda error: error.received is not None):
        TierFile(tmp_path, "tier.bin", [10_000], generations=[0])
    with pytest.raises(StorageError):
        TierFile(tmp_path, "other.bin", SMALL, generations=generations)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        TierFile(tmp_path / "file" / "folder", "tier.bin", SMALL)


def test_buffers_are_aligned_and_live_as_long_as_a_view() -> None:
    for size in (1, 4096, 4097, 5_000_001):
        tensor = buffer(size, pin=True)
        assert tensor.dtype == torch.uint8 and len(tensor) == -(-size // 4096) * 4096
        assert tensor.data_ptr() % 4096 == 0 and not tensor.any()
    view = buffer(1 << 22, pin=False).fill_(7).view(torch.float32)[5:]
    others = [buffer(1 << 22, pin=False) for _ in range(8)]
    assert len(others) == 8 and bool((view.view(torch.uint8) == 7).all())
    with pytest.raises(ValueError):
        buffer(0, pin=False)


@pytest.mark.gpu
def test_pinned_buffers_are_page_locked() -> None:
    tensor = buffer(5_000_001, pin=True).fill_(3)
    assert tensor.is_pinned() and not buffer(4096, pin=False).is_pinned()
    assert int(tensor.to("cuda", non_blocking=True).sum()) == 3 * len(tensor)
    del tensor
    torch.cuda.synchronize()
