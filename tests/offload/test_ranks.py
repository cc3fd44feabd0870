"""Shares of units, cores of ranks, and the end of a wait for a rank that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from ondevice.core.errors import CheckpointError, TrainingError  # noqa: E402
from ondevice.offload import cores  # noqa: E402
from ondevice.offload.overdue import Overdue  # noqa: E402
from ondevice.offload.units import Joined, Piece, Unit, shard, shard_bounds  # noqa: E402
from ondevice.offload.worker import Watch  # noqa: E402


def unit(sizes: list[int], kind: Any = "layer", width: int = 0) -> Unit:
    pieces, offset = [], 0
    for number, size in enumerate(sizes):
        shape = (size // width, width) if width else (size,)
        parameter = nn.Parameter(
            torch.arange(size, dtype=torch.float32).view(shape) + 1000 * number
        )
        pieces.append(Piece(f"p{number}", parameter, shape, offset, size))
        offset += -(-size // 128) * 128
    return Unit(3, "layer 3", kind, 3, tuple(pieces), pieces[-1].offset + pieces[-1].numel)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(
    "whole",
    [unit([1]), unit([129, 7, 1000]), unit([3000], "head", 24), unit([77 * 3], "embedding", 77)],
)
def test_the_shards_of_all_ranks_cover_a_unit(world: int, whole: Unit) -> None:
    parts = [shard(whole, rank, world) for rank in range(world)]
    assert (
        len({part.numel for part in parts}) == 1 and sum(part.here for part in parts) == whole.numel
    )
    memory = torch.full((parts[0].numel * world,), -1.0)
    for part in parts:
        assert part.low % 128 == 0
        assert [tuple(p.shape) for p in part.pieces if whole.kind != "layer"] == [
            (p.numel // p.shape[1], p.shape[1]) for p in part.pieces if whole.kind != "layer"
        ]
        for piece in part.pieces:
            memory[part.low + piece.offset : part.low + piece.offset + piece.numel] = piece.values
    for piece in whole.pieces:
        assert torch.equal(
            memory[piece.offset : piece.offset + piece.numel], piece.parameter.reshape(-1)
        )
    span = slice(whole.numel // 3, whole.numel - 1)
    bounds = shard_bounds(whole, world, span)
    assert [bounds[0], bounds[-1]] == [0, span.stop - span.start] and sorted(bounds) == list(bounds)
    for part, first, last in zip(parts, bounds, bounds[1:]):
        if first < last:
            assert part.low <= span.start + first and span.start + last <= part.low + part.numel


def test_a_checkpoint_with_a_missing_shard_is_refused() -> None:
    first, second = (torch.arange(n, m).numpy() for n, m in ((0, 3), (5, 8)))
    joined = Joined({"m/a@0:3:8": first, "m/a@5:8:8": second, "n": first})
    assert (
        joined.get("m/a")[6:8].tolist() == [6, 7]
        and joined.get("n") is first
        and joined.get("b") is None
    )
    with pytest.raises(CheckpointError, check=lambda error: error.expected == "element 3"):
        joined.get("m/a")[2:6]


def test_cores_are_those_next_to_the_gpu(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    for core in range(8):  # 0 and 4, 1 and 5 and so on are threads of one physical core
        write(f"devices/system/cpu/cpu{core}/topology/core_id", str(core % 4))
        write(f"devices/system/cpu/cpu{core}/topology/physical_package_id", "0")
    write("devices/system/node/node0/cpulist", "0-1,4-5")
    write("devices/system/node/node1/cpulist", "2-3,6-7")
    for gpu, node in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        write(f"bus/pci/devices/{gpu}/numa_node", str(node))
    every = set(range(8))
    assert cores.divide(every, ["a", "b", "c"], tmp_path) == [[2, 6], [0, 4, 1, 5], [3, 7]]
    assert cores.divide(every - {6}, ["a", "c"], tmp_path) == [[2], [3, 7]]
    for unknown in (["a", "d"], [None, None], ["a", "e"]):
        assert cores.divide(every, unknown, tmp_path) == [[0, 4, 1, 5], [2, 6, 3, 7]]


@pytest.mark.parametrize("lost", [None, RuntimeError("Connection reset by peer. And more")])
def test_a_transfer_that_never_ends_is_named(lost: Exception | None) -> None:
    """The communicator is given up, so that whoever waits for the event goes on and sees the failure."""
    done: list[bool] = []
    ranks: Any = SimpleNamespace(lost=lost, abort=lambda: done.append(True))
    watch = Watch(120.0 if lost else 0.3)
    overdue, began = Overdue(watch, ranks), time.monotonic()
    overdue.expect("layer 1", SimpleNamespace(done=lambda: True))  # pyright: ignore[reportArgumentType]
    overdue.expect("layer 2", SimpleNamespace(done=lambda: bool(done)))  # pyright: ignore[reportArgumentType]
    while not done:  # as a thread does that waits for the GPU
        time.sleep(0.01)
    with pytest.raises(TrainingError) as caught:
        watch.check()
    overdue.close()
    assert caught.value.message == "transfer of layer 2: another rank has ended or does not respond"
    assert ("Connection reset by peer" if lost else "no reply for ") in str(caught.value.received)
    assert done == [True] and time.monotonic() - began < 60


def test_an_engine_that_closes_gives_up_what_is_under_way() -> None:
    """Its device would wait for it; a rank that has failed takes part in nothing more."""
    done: list[bool] = []
    ranks: Any = SimpleNamespace(lost=None, abort=lambda: done.append(True))
    overdue, began = Overdue(Watch(1.0), ranks), time.monotonic()
    overdue.expect("layer 1", SimpleNamespace(done=lambda: bool(done)))  # pyright: ignore[reportArgumentType]
    overdue.close()
    assert done == [True] and 0.5 < time.monotonic() - began < 60


STUCK = """
import ctypes, sys, threading, time
from types import SimpleNamespace
from ondevice.offload import overdue as overdues
from ondevice.offload.overdue import Overdue
from ondevice.offload.worker import Watch

overdues.ABORT_S = 0.5
forever, lost = threading.Event(), RuntimeError("gone") if sys.argv[1] == "no abort" else None
overdue = Overdue(Watch(50.0 if lost else 0.5), SimpleNamespace(lost=lost, abort=forever.wait))
overdue.expect("layer 1", SimpleNamespace(done=lambda: True))
print(overdue.guard.process.pid, flush=True)
if sys.argv[1] == "closes":
    time.sleep(1.0)
    overdue.close()
    sys.exit()
frozen = lambda: ctypes.PyDLL(None).sleep(60)  # with Python's lock, as a driver's call may wait
if sys.argv[1] == "frozen as it begins":
    time.sleep(0.5)  # nothing is under way before
if sys.argv[1] != "ends":
    overdue.expect("layer 2", SimpleNamespace(done=frozen if sys.argv[1].startswith("frozen ") else bool))
time.sleep(0.3)
if sys.argv[1] == "frozen":
    frozen()
if sys.argv[1] == "no abort":
    forever.wait(60)
"""


@pytest.mark.skipif(
    os.name != "posix", reason="Windows has no limit for a wait on a pipe, and so no guard"
)
@pytest.mark.parametrize(
    "case", ["frozen", "frozen as it begins", "frozen after another", "no abort", "ends", "closes"]
)
def test_a_blocked_process_is_killed_and_its_layer_named(case: str) -> None:
    """It neither looks nor raises: one thread holds Python's lock, or the communicator is not given up."""
    command, began = [sys.executable, "-c", STUCK, case], time.monotonic()
    root = Path(__file__).resolve().parents[2]  # where `-c` finds the package that is tested
    run = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    if case not in ("ends", "closes"):
        assert run.returncode == -signal.SIGKILL and time.monotonic() - began < 45
        assert run.stderr.startswith(
            "error: transfer of layer 2: another rank has ended or does not respond"
        )
        assert "the last checkpoint is intact" in run.stderr
    else:
        assert (run.returncode, run.stderr) == (0, "")
    guard, deadline = int(run.stdout), time.monotonic() + 30
    while _is_alive(guard):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
