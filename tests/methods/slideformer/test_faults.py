"""A fault surfaces at the step, with the name of what broke, soon; and the engine can still be closed."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.core.errors import (  # noqa: E402
    DataError,
    DoesNotFitError,
    OndeviceError,
    StorageError,
    TrainingError,
)
from ondevice.offload import (  # noqa: E402
    drive,
    updater,
)
from ondevice.offload.device import BLOCK_BYTES  # noqa: E402
from ondevice.offload.host import HostStore  # noqa: E402
from ondevice.offload.store import TieredStore  # noqa: E402
from ondevice.runtime_ops import layer_adam  # noqa: E402
from tests.methods.slideformer.reference import batches, open_engine, run  # noqa: E402
from tests.warm import Warm  # noqa: E402

SOON_S = 60.0
"""Half of what an engine of these tests waits for what hangs."""
LAYERS = 4


@pytest.fixture(params=["native", "torch"])
def broken_update(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """`broken_update(index, call)` lets the update of that unit make `call` first; gives the optimizer's name."""
    if request.param == "native" and not layer_adam.available():
        pytest.skip("no C++ compiler")

    def breaks(index: int, call: Callable[[], None]) -> str:
        name = {"native": "layer_adam", "torch": "torch_adam"}[request.param]
        update = getattr(updater, name)

        def broken(gradient: Any, state: Any, *rest: Any, **options: Any) -> None:
            if state.seed == index:
                call()
            update(gradient, state, *rest, **options)

        monkeypatch.setattr(updater, name, broken)
        return request.param

    return breaks


def raises_soon(engine: Any, kind: type[OndeviceError], steps: int = 2) -> OndeviceError:
    """Return the error that one of the next steps raises, and every one after it."""
    started = time.monotonic()
    with pytest.raises(OndeviceError) as caught:
        for step, batch in enumerate(batches(steps)):
            engine.step(*batch, step, 1e-3)
        engine.flush()
    assert time.monotonic() - started < SOON_S
    assert type(caught.value) is kind
    with pytest.raises(OndeviceError):  # it stays broken, and says so at once
        engine.step(*batches(1)[0], steps, 1e-3)
    return caught.value


def closes_soon(engine: Any) -> None:
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < SOON_S
    assert not any(worker.thread.is_alive() for worker in (engine.transfers, engine.updates))


@pytest.mark.parametrize("index", [0, LAYERS - 1, LAYERS, LAYERS + 1])
def test_an_update_that_fails_names_its_unit(index: int, broken_update: Any) -> None:
    def fail() -> None:
        raise ZeroDivisionError("seventeen")

    engine = open_engine({"optimizer": broken_update(index, fail)}, layers=LAYERS)
    name = engine.units.all[index].name
    error = raises_soon(engine, TrainingError)
    assert f"update of {name} failed: ZeroDivisionError: seventeen" in str(error)
    assert "resume" in str(error)
    closes_soon(engine)


def test_our_errors_keep_their_type_and_hint(broken_update: Any) -> None:
    def fail() -> None:
        raise StorageError(
            "the drive is on fire", expected="no fire", received="fire", hint="water"
        )

    engine = open_engine({"optimizer": broken_update(2, fail)}, layers=LAYERS)
    error = raises_soon(engine, StorageError)
    assert str(error).splitlines() == [
        "update of layer 2: the drive is on fire", "  expected: no fire", "  received: fire", "  try: water",
    ]  # fmt: skip
    closes_soon(engine)


def test_a_transfer_that_fails_names_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = HostStore.outgoing

    def broken(self: Any, unit: Any, span: slice) -> Any:
        if unit.name == "layer 1":
            raise RuntimeError("out of wires")
        return outgoing(self, unit, span)

    monkeypatch.setattr(HostStore, "outgoing", broken)
    engine = open_engine({}, layers=LAYERS)
    assert "transfer of layer 1 failed: RuntimeError: out of wires" in str(
        raises_soon(engine, TrainingError)
    )
    closes_soon(engine)


@pytest.mark.parametrize("index", [1, LAYERS + 1])
def test_an_update_that_hangs_is_given_up(index: int, broken_update: Any) -> None:
    """The next step waits `timeout_s`, for that unit or for one behind it, and then names what hangs. Should that go on
    after all, the engine closes."""
    reached, released = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        released.wait()

    engine = open_engine({"optimizer": broken_update(index, hang)}, layers=LAYERS)
    try:
        engine.step(*batches(1)[0], 0, 1e-3)
        at_once = index <= LAYERS  # the embedding's update is of the next step
        assert not at_once or reached.wait(SOON_S)
        # From here on: before, what does not hang may be slow.
        engine.watch.timeout_s = limit_s = 0.3 if at_once else 1.0
        error = raises_soon(engine, TrainingError)
        assert f"did not end within {limit_s:g} s" in error.message
        assert f"update of {engine.units.all[index].name} running for" in str(error.received)
        assert not engine.updates.close(timeout_s=0.1)
    finally:
        released.set()
    closes_soon(engine)


def test_a_hanging_thread_does_not_hold_the_process(warm: Warm) -> None:
    code = """
import threading
from ondevice.core.errors import TrainingError
from ondevice.offload import updater  # noqa: E402
from tests.methods.slideformer.reference import batches, open_engine

updater.layer_adam = updater.torch_adam = lambda *_, **__: threading.Event().wait()
engine = open_engine({}, layers=2)
try:
    for step, batch in enumerate(batches(2)):
        engine.step(*batch, step, 1e-3)
        engine.watch.timeout_s = 0.3
except TrainingError as error:
    print(error)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(warm.python), "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "did not end within 0.3 s" in ended.stdout
    assert "update of " in ended.stdout


@pytest.mark.parametrize("damage", ["changed", "short"])
@pytest.mark.parametrize(
    ("name", "doing"), [("moments", "update of layer 2"), ("weights", "of layer 2")]
)
def test_a_file_that_is_damaged_names_the_record(
    name: str, doing: str, damage: str, tmp_path: Path
) -> None:
    engine = open_engine(
        {"disk_fraction": 1.0, "disk_masters": True, "disk_folder": tmp_path}, layers=LAYERS
    )
    run(engine, batches(2))
    states = engine.disk.states
    states.flush()
    (path,) = [file for file in tmp_path.rglob(name) if file.is_file()]
    number, records = (0, states.records) if name == "moments" else (1, states.weight_records)
    record, start = records[2], states.files[number]._starts[records[2]]
    if damage == "short":
        os.truncate(path, start)
        record, doing = record, ""  # whichever of the last layers comes first
    else:
        with open(path, "r+b") as file:
            file.seek(start + BLOCK_BYTES * (name == "moments"))
            file.write(b"\x5a" * 64)
    error = raises_soon(engine, StorageError, steps=3)
    assert doing in error.message and f"{path}: record " in error.message
    assert damage == "short" or f"record {record} " in error.message
    closes_soon(engine)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    "config",
    [{"disk_fraction": 1.0}, {"disk_fraction": 1.0, "disk_masters": True}, {"activations": "disk"}],
    ids=str,
)
def test_a_disk_that_refuses_writes_during_training(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine({**config, "disk_folder": tmp_path}, layers=12)
    run(engine, batches(1))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(drive.os, "pwritev", full)
    error = raises_soon(engine, StorageError, steps=3)
    assert "the disk is full" in error.message and "record" in error.message
    closes_soon(engine)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    "config",
    [{"activations": "disk"}, {"disk_fraction": 1.0}, {"disk_fraction": 1.0, "disk_masters": True}],
    ids=str,
)
def test_a_disk_that_does_not_respond_ends_the_step(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine({**config, "disk_folder": tmp_path}, layers=12)
    run(engine, batches(1))
    released, move = threading.Event(), drive.Drive.move

    def hang(*rest: Any, **options: Any) -> int:
        released.wait()
        return move(*rest, **options)

    monkeypatch.setattr(drive.Drive, "move", hang)
    engine.watch.timeout_s = 0.5
    try:
        assert "did not end within 0.5 s" in raises_soon(engine, TrainingError, steps=3).message
    finally:
        released.set()
    closes_soon(engine)


def test_a_checkpoint_may_take_longer_than_a_wait() -> None:
    """Units are updated as they are written, one after the other; only one that takes too long ends the step."""
    engine = open_engine({"timeout_s": 1.0}, layers=6)
    run(engine, batches(1))
    keys = [unit.key for unit in engine.units.all]
    engine.updater.keep(set(keys))

    def write() -> None:
        for key in keys:
            time.sleep(0.5)
            engine.updater.release(key)

    writer = threading.Thread(target=write)
    writer.start()
    run(engine, batches(2))
    writer.join()
    engine.updater.keep(set(keys))
    error = raises_soon(engine, TrainingError, steps=3)
    assert "waiting for the checkpoint of " in error.message or "running for" in str(error.received)
    closes_soon(engine)


@pytest.mark.parametrize("clip", ["previous", "global"])
def test_no_step_follows_a_half_finished_one(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some units have their update and others do not, and their gradients hold the buffers."""
    engine = open_engine({"max_grad_norm": 0.1, "clip": clip, "timeout_s": 20.0}, layers=LAYERS)
    run(engine, batches(1))
    block, calls = engine.passes.family.block, Counter[int]()

    def interrupted(i: int, *rest: Any, **options: Any) -> Any:
        calls[i] += 1
        if i == 1 and calls[i] == 2:  # on the way back
            raise KeyboardInterrupt
        return block(i, *rest, **options)

    monkeypatch.setattr(engine.passes.family, "block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step(*batches(1)[0], 1, 1e-3)
    began = time.monotonic()
    for follow in (lambda: engine.step(*batches(1)[0], 1, 1e-3), engine.flush):
        with pytest.raises(
            TrainingError, check=lambda error: isinstance(error.__cause__, KeyboardInterrupt)
        ):
            follow()
    assert time.monotonic() - began < 10
    closes_soon(engine)


def test_a_full_disk_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread, no file and no folder is left."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads, (_, hard) = threading.active_count(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageError) as caught:
            open_engine({"disk_fraction": 1.0}, layers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "offload file" in str(caught.value) and "room for" in str(caught.value.expected)
    assert threading.active_count() == threads
    assert list(tmp_path.glob("ondevice*")) == []


@pytest.mark.parametrize("place", [TieredStore, updater.Updater])
def test_running_out_of_memory_leaves_no_files_or_threads(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise DoesNotFitError("no memory")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(place, "__init__", none)
    threads = threading.active_count()
    with pytest.raises(DoesNotFitError):
        open_engine({"disk_fraction": 1.0, "activations": "disk"}, layers=2)
    assert threading.active_count() == threads
    assert list(tmp_path.glob("ondevice*")) == []


def test_no_label_is_a_data_error_and_does_no_harm(engine: Any) -> None:
    opened, other = engine(layers=2), engine(layers=2)
    first, second = batches(2)
    empty = first[1].copy()
    empty[:, 1:] = -100  # the first token has no predecessor
    losses = [opened.step(*first, 0, 1e-3)]
    with pytest.raises(DataError):
        opened.step(first[0], empty, 1, 1e-3)
    losses.append(opened.step(*second, 1, 1e-3))
    assert losses == [other.step(*first, 0, 1e-3), other.step(*second, 1, 1e-3)]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 120
    while (
        left := [t for t in threading.enumerate() if t not in before and "ondevice" in t.name]
    ) and (time.monotonic() < deadline):
        time.sleep(0.02)
    assert left == []


def test_closing_twice_and_without_a_step(engine: Any) -> None:
    opened = engine({"disk_fraction": 0.5, "activations": "disk"}, layers=2)
    folder = opened.disk.temporary
    assert folder.exists()
    opened.close()
    opened.close()
    assert not folder.exists()
    assert np.isfinite(opened.host_bytes)
