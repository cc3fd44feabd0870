"""Checkpoints: what is saved comes back, what is damaged is passed over, what is foreign is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ondevice.artifact.files import DamagedError, read_tensors, write_tensors
from ondevice.core.errors import CheckpointError
from ondevice.training.checkpoint import META_FILE, STATE_FILE, CheckpointStore, read_meta

IDENTITY = {
    "model": "b" * 64,
    "method": {"name": "prge", "queries": 4},
    "data": {"path": "a.jsonl"},
    "seed": 7,
}


def store(folder: Path, identity: dict | None = None) -> CheckpointStore:
    return CheckpointStore(folder, identity or IDENTITY, seed=7, backend="torch-cpu")


def state(step: int) -> dict[str, np.ndarray]:
    return {"weights": np.arange(1000, dtype=np.float32) + step, "step": np.array(step, np.int64)}


def no_warning(message: str) -> None:
    pytest.fail(message)


def test_every_dtype_and_layout_comes_back_and_safetensors_reads_it(tmp_path) -> None:
    random = np.random.default_rng(0)
    tensors = {
        name: random.integers(0, 2, (3, 5)).astype(name)
        for name in [
            "float64",
            "float32",
            "float16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint64",
            "uint32",
            "uint16",
            "uint8",
            "bool",
        ]
    }
    tensors |= {
        "scalar": np.array(2**63, np.uint64),
        "empty": np.empty((0, 4), np.float32),
        "fortran": np.asfortranarray(random.normal(size=(4, 6))),
        "strided": random.normal(size=(8, 8))[::2, 1::3],
        "big_endian": np.arange(5, dtype=">i4"),
        "nan": np.array([np.nan, -0.0, np.inf], np.float32),
    }
    write_tensors(tmp_path / "x", tensors)
    for back in (read_tensors(tmp_path / "x"), load_file(tmp_path / "x")):
        assert back.keys() == tensors.keys()
        for name, array in tensors.items():
            assert back[name].shape == array.shape and back[name].dtype == array.dtype.newbyteorder(
                "="
            )
            assert back[name].tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes()
    whole = (tmp_path / "x").read_bytes()
    for length in (0, 7, 40, len(whole) - 1):
        (tmp_path / "x").write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            read_tensors(tmp_path / "x")
    with pytest.raises(CheckpointError) as caught:
        write_tensors(tmp_path / "x", {"c": np.zeros(2, np.complex128)})
    assert "'c'" in caught.value.message


def test_keeps_the_two_newest_and_the_best(tmp_path) -> None:
    checkpoints = store(tmp_path)
    for step, score in [
        (10, (0.5, -1.0)),
        (20, (0.9, -0.8)),
        (30, (0.9, -0.8)),
        (40, None),
        (50, (0.2, -0.1)),
    ]:
        checkpoints.save(step, state(step), score=score)
    assert [path.name for path in checkpoints.paths()] == [
        f"checkpoint-000000{n}" for n in (20, 40, 50)
    ]
    best = checkpoints.best()
    assert best is not None and best[0] == (0.9, -0.8) and read_meta(best[1]).step == 20
    newest = checkpoints.newest(no_warning)
    assert newest is not None and newest.meta.step == 50 and newest.meta.seed == 7
    assert newest.state["weights"].tobytes() == state(50)["weights"].tobytes()
    assert newest.state["step"].shape == () and newest.state["step"] == 50


def truncate_state(path: Path) -> None:
    with (path / STATE_FILE).open("r+b") as file:
        file.truncate(600)


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / STATE_FILE).read_bytes())
    data[-1] ^= 1
    (path / STATE_FILE).write_bytes(data)


@pytest.mark.parametrize(
    "tear",
    [
        truncate_state,
        flip_a_bit,
        lambda path: (path / STATE_FILE).unlink(),
        lambda path: (path / META_FILE).unlink(),
        lambda path: (path / META_FILE).write_text('{"schema": 1, "step"'),
        lambda path: shutil.rmtree(path) or path.mkdir(),
    ],
    ids=["cut", "bit", "no state", "no meta", "cut meta", "empty"],
)
def test_a_damaged_one_is_reported_and_the_one_before_is_used(tmp_path, tear) -> None:
    checkpoints = store(tmp_path)
    for step in (10, 20):
        checkpoints.save(step, state(step))
    tear(tmp_path / "checkpoint-00000020")
    warnings: list[str] = []
    loaded = checkpoints.newest(warnings.append)
    assert loaded is not None and loaded.meta.step == 10
    assert len(warnings) == 1 and "checkpoint-00000020" in warnings[0]
    checkpoints.save(
        15, state(15)
    )  # the run goes on from 10: the damaged one is of no use any more
    assert [path.name for path in checkpoints.paths()] == [
        "checkpoint-00000010",
        "checkpoint-00000015",
    ]
    for path in checkpoints.paths():
        tear(path)
    with pytest.raises(CheckpointError):
        checkpoints.newest(warnings.append)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "c" * 64}, "model"),
        ({"method": {"name": "prge", "queries": 8}}, "method.queries"),
        ({"data": {"path": "other.jsonl"}}, "data.path"),
        ({"seed": 8}, "seed"),
        ({"batch_size": 4}, "batch_size"),
    ],
)
def test_a_foreign_one_is_refused_and_the_setting_named(tmp_path, change, field) -> None:
    store(tmp_path).save(10, state(10))
    with pytest.raises(CheckpointError) as caught:
        store(tmp_path, {**IDENTITY, **change}).newest(no_warning)
    for values in (caught.value.expected, caught.value.received):
        assert values.startswith(f"{field} = ") and values.count(" = ") == 1


def test_another_version_is_refused_not_called_damaged(tmp_path) -> None:
    path = store(tmp_path).save(10, state(10))
    meta = json.loads((path / META_FILE).read_text())
    (path / META_FILE).write_text(json.dumps({**meta, "schema": 2}))
    with pytest.raises(CheckpointError) as caught:
        store(tmp_path).newest(no_warning)
    assert caught.value.received == "schema 2"


FULL_DISK = """
import os, subprocess, sys, pathlib
import numpy as np
from ondevice.core.errors import StorageError
from ondevice.training.checkpoint import CheckpointStore
disk = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "ondevice-test", str(disk)], check=True)
def state(step):
    return {"weights": np.full(100_000, step, np.float32)}
store = CheckpointStore(disk / "run", {"seed": 1}, seed=1, backend="torch-cpu")
store.save(1, state(1))
store.save(2, state(2))
(disk / "ballast").write_bytes(bytes(500_000))
for attempt in range(2):
    try:
        store.save(3, state(3))
        sys.exit("there was room")
    except StorageError as error:
        print(error)
print(sorted(path.name for path in (disk / "run").iterdir()))
loaded = store.newest(sys.exit)
assert loaded.meta.step == 2 and (loaded.state["weights"] == 2).all()
(disk / "ballast").unlink()
store.save(3, state(3))
print("saved", store.newest(sys.exit).meta.step)
"""


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    probe = [*unshare, "mount", "-t", "tmpfs", "ondevice-test", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip(
            "this system lets no user mount a small tmpfs; test_loop.py has the file-size limit instead"
        )
    done = subprocess.run(
        [*unshare, sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no space left") == 2
    assert "['checkpoint-00000001', 'checkpoint-00000002']" in done.stdout
    assert done.stdout.endswith("saved 3\n")


def test_what_a_killed_writer_left_is_removed(tmp_path) -> None:
    left = tmp_path / ".checkpoint-00000037.partial-0a0b0c0d-999999-deadbeef"
    left.mkdir()
    (left / STATE_FILE).write_bytes(b"half")
    checkpoints = store(tmp_path)
    assert checkpoints.newest(no_warning) is None
    checkpoints.remove_leftovers()
    assert list(tmp_path.iterdir()) == []
