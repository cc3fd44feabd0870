"""Writes are whole or absent; a full disk is a StorageError; the old content survives."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ondevice.artifact import files
from ondevice.artifact.files import atomic_directory, atomic_write, sha256_file, sha256_spread
from ondevice.core.errors import StorageError


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.txt"
    atomic_write(target, "één")
    atomic_write(target, b"two")
    assert target.read_bytes() == b"two"
    assert names(target.parent) == ["file.txt"]


def test_write_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    atomic_write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_write_that_fails_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    atomic_write(target, "old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StorageError) as caught:
        atomic_write(target, "new")
    assert caught.value.exit_code == 11
    assert target.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_real_write_limit_is_a_storage_error(tmp_path: Path) -> None:
    """The kernel's own refusal (EFBIG), reached through the file and through safetensors."""
    from safetensors.numpy import save_file

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(StorageError) as caught:
            atomic_write(tmp_path / "file", bytes(1 << 20))
        assert "larger than a file may be" in str(caught.value)
        assert "ulimit -f" in str(caught.value)
        with pytest.raises(StorageError):
            with atomic_directory(tmp_path / "folder") as folder:
                (folder / "part").write_bytes(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == []
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "still_works.safetensors")


def test_full_disk_inside_a_library_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        with atomic_directory(tmp_path / "folder"):
            raise RuntimeError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )
    assert names(tmp_path) == []


def test_directory_replaces_at_once(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    for step in range(2):
        with atomic_directory(target) as folder:
            (folder / f"step-{step}").write_text("x")
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_text("y")
            assert not (target / f"step-{step}").exists()
    assert names(target) == ["step-1", "sub"]
    assert names(tmp_path) == ["checkpoint"]


def test_directory_replaces_without_the_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    for step in range(2):
        with atomic_directory(tmp_path / "checkpoint") as folder:
            (folder / f"step-{step}").write_text("x")
    assert names(tmp_path / "checkpoint") == ["step-1"]
    assert names(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_directory_that_fails_keeps_the_old_one(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "checkpoint"
    with atomic_directory(target) as folder:
        (folder / "old").write_text("x")
    with pytest.raises(type(error)):
        with atomic_directory(target) as folder:
            (folder / "new").write_text("x")
            raise error
    assert names(target) == ["old"]
    assert names(tmp_path) == ["checkpoint"]


def test_directory_does_not_replace_somebodys_files(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    with pytest.raises(StorageError) as caught:
        with atomic_directory(tmp_path / "home", marker="adapter_config.json"):
            raise RuntimeError("never reached")
    assert caught.value.received == "thesis.tex"
    assert names(tmp_path / "home") == ["thesis.tex"]
    with pytest.raises(StorageError) as caught:
        with atomic_directory(tmp_path / "home" / "thesis.tex"):
            raise RuntimeError("never reached")
    assert "thesis.tex" in str(caught.value)


def test_killed_writer_leaves_the_old_content_and_its_rest_is_cleared(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with atomic_directory(target) as folder:
        (folder / "old").write_text("x")
    code = (
        "import os, signal\n"
        "from ondevice.artifact.files import atomic_directory\n"
        f"with atomic_directory({str(target)!r}) as folder:\n"
        "    (folder / 'new').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path.cwd()).returncode == -signal.SIGKILL
    )
    assert names(target) == ["old"]
    assert len(names(tmp_path)) == 2
    with atomic_directory(target) as folder:
        (folder / "next").write_text("x")
    assert names(tmp_path) == ["checkpoint"]
    assert names(target) == ["next"]


def test_unwritable_place_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError) as caught:
        atomic_write(tmp_path / "file" / "below", "x")
    assert str(tmp_path / "file") in str(caught.value)


def test_sha256_is_of_the_whole_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes((1 << 20) + 17)
    (tmp_path / "file").write_bytes(data)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_a_large_file_is_known_by_its_size_and_pieces_of_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(bytes(range(200)))
    assert sha256_spread(path, pieces=50, piece_bytes=4) == sha256_file(path)
    first = sha256_spread(path, pieces=4, piece_bytes=10)
    assert first != sha256_file(path)
    for place, seen in ((0, True), (30, False), (65, True), (199, True)):
        changed = bytearray(range(200))
        changed[place] += 1
        path.write_bytes(changed)
        assert (sha256_spread(path, pieces=4, piece_bytes=10) != first) is seen, place
    path.write_bytes(bytes(range(201)))
    assert sha256_spread(path, pieces=4, piece_bytes=10) != first
