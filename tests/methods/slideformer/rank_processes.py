"""Processes that train together: ranks of a case of `ranked.py`, and the command line on one host and on two."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.ports import free_port  # noqa: E402
from tests.warm import Warm  # noqa: E402

DEVICE = os.environ.get("ONDEVICE_RANKS_DEVICE", "cpu")
WORLD = 2
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without torch.distributed"
)


def environment(**values: object) -> dict[str, str]:
    paths = os.pathsep.join(
        filter(None, (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH")))
    )
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        **{k: str(v) for k, v in values.items()},
    }


def start(warm: Warm, case: str, folder: Path, world: int = WORLD) -> list[subprocess.Popen[str]]:
    """Ranks without `torchrun`, which would end the one when the other dies."""
    port = free_port()
    return [
        subprocess.Popen(
            [str(warm.python), "-m", "tests.methods.slideformer.ranked", case, str(folder), DEVICE],
            env=environment(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def torchrun(warm: Warm, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(warm.python), "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    command += [
        "--master-port",
        str(free_port()),
        "--no-python",
        str(warm.ondevice),
        *map(str, arguments),
    ]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


@contextmanager
def two_hosts() -> Iterator[tuple[str, list[list[str]], list[str]]]:
    """The first host's address, what runs a command on each, and each one's network: two network namespaces of this
    machine, joined by a pair of devices, or where they cannot be made its loopback."""
    names = [f"ondevice-{os.getpid()}-{number}" for number in range(2)]
    devices = [f"od{os.getpid() % 100000}{side}" for side in "ab"]

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

    try:
        made = shutil.which("ip") is not None and all(ip("netns", "add", name) for name in names)
        made = made and ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for number, (name, device) in enumerate(zip(names, devices, strict=True)):
            made = made and ip("link", "set", device, "netns", name)
            made = made and ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", device)
            made = made and all(ip("-n", name, "link", "set", one, "up") for one in (device, "lo"))
        if made:
            yield "10.77.0.1", [["ip", "netns", "exec", name] for name in names], devices
        else:
            yield "127.0.0.1", [[], []], ["lo", "lo"]
    finally:
        for name in names:
            if shutil.which("ip") is not None:
                ip("netns", "del", name)


def torchrun_on_two_hosts(warm: Warm, *arguments: object) -> list[str]:
    """One process on each; what they printed to stderr."""
    port = free_port()
    with two_hosts() as (address, prefixes, networks):
        processes = []
        for number, (prefix, network) in enumerate(zip(prefixes, networks, strict=True)):
            command = [*prefix, str(warm.python), "-m", "torch.distributed.run", "--nnodes", "2"]
            command += [
                "--node-rank",
                str(number),
                "--nproc-per-node",
                "1",
                "--master-addr",
                address,
            ]
            command += [
                "--master-port",
                str(port),
                "--no-python",
                str(warm.ondevice),
                *map(str, arguments),
            ]
            settings = environment(GLOO_SOCKET_IFNAME=network)
            processes.append(
                subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)
            )
        errors = [process.communicate(timeout=150)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors
    return errors


def results(warm: Warm, case: str, folder: Path, world: int) -> list[dict[str, Any]]:
    for process in start(warm, case, folder, world):
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{case}-{rank}.pt", weights_only=False) for rank in range(world)]


def last_word(process: subprocess.Popen[str], path: Path) -> dict[str, Any]:
    """What a rank has left; or, of one that a GPU's driver did not let go on, what its guard said."""
    began = time.monotonic()
    _, errors = process.communicate(timeout=240)
    if DEVICE != "cpu" and process.returncode == -signal.SIGKILL:
        return {"message": errors[errors.index("error: ") :], "seconds": time.monotonic() - began}
    assert process.returncode == 0, errors
    return torch.load(path, weights_only=False)
