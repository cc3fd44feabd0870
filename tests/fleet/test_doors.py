"""A fleet's doors: who can make a server or a device run something, with and without TLS.

The attackers are real: Flower's own command line, its SuperLink and its client, with what each of them could have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")

from tests.fleet.intruder import Intruder
from tests.fleet.test_simulate import rows
from tests.ports import free_port

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(400)]
DEVICES = 2


@contextlib.contextmanager
def started(*arguments: str, log: Path, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a session of its own, which ends with the context."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env=environment,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def until(test, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)


@dataclass(frozen=True)
class Fleet:
    """A fleet whose server waits for a third device, so that its port is open and two devices are connected."""

    port: int
    folder: Path
    keys: Path | None

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    @property
    def authority(self) -> Path | None:
        return self.keys / "ca.crt" if self.keys else None

    def connected(self) -> bool:
        logs = [self.folder / f"device-{number}" / "network.log" for number in range(1, DEVICES + 1)]
        return all(log.is_file() and "connected as device" in log.read_text(errors="replace") for log in logs)


def ondevice(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ondevice", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def devices(folder: Path, port: int, keys: Path | None) -> Iterator[None]:
    """Two devices, each with a row that nobody else should see."""
    with contextlib.ExitStack() as stack:
        for number in range(1, DEVICES + 1):
            data = rows(folder / f"rows-{number}.jsonl")
            link = ["--insecure"] if keys is None else ["--certificates", str(keys), "--key",
                                                        str(keys / "devices" / f"{number}.key")]  # fmt: skip
            stack.enter_context(started(
                sys.executable, "-m", "ondevice", "fleet", "device", "--data", str(data), "--out",
                str(folder / f"device-{number}"), "--host", "localhost", "--port", str(port), *link,
                log=folder / f"device-{number}.log",
            ))  # fmt: skip
        yield


@pytest.fixture(scope="module", params=["tls", "insecure"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder, port = tmp_path_factory.mktemp(request.param), free_port()
    keys = folder / "keys" if request.param == "tls" else None
    ondevice("fleet", "begin", "--model", "tiny:llama", "--task", "sst2", "--max-length", 64, "--queries", 2,
             "--out", folder / "server")  # fmt: skip
    if keys:
        ondevice("fleet", "certificates", keys, "--host", "localhost", "--devices", DEVICES + 1)
    link = ["--certificates", str(keys)] if keys else ["--insecure"]
    server = started(
        sys.executable, "-m", "ondevice", "fleet", "server", str(folder / "server"), "--host", "localhost", "--port",
        str(port), "--devices", str(DEVICES + 1), *link, log=folder / "server.log",
    )  # fmt: skip
    with server, devices(folder, port, keys):
        found = Fleet(port, folder, keys)
        until(found.connected)
        yield found


def test_an_attacker_at_the_port_runs_nothing_on_the_server_and_nothing_on_devices(
    fleet: Fleet, tmp_path: Path
) -> None:
    """All that `flwr run` needs is the fleet's address and, with TLS, the public certificate of its authority."""
    loot = Intruder(tmp_path, fleet.authority).attack(fleet.address)
    assert (loot.servers, loot.devices, loot.replies) == (0, 0, []), loot.said
    assert listens(fleet.port)
