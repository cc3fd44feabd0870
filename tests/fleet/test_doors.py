"""A fleet's doors: who can make a server or a device run something, with and without TLS.

The attackers are real: Flower's own command line, its SuperLink and its client, with what each of them could have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from ondevice.fleet.confine import DATA_BYTES, FILE_BYTES
from tests.fleet.intruder import Intruder
from tests.fleet.test_simulate import rows
from tests.ports import free_port

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(400)]
DEVICES = 2
TYPE = {"content-type": "application/protobuf"}
SECRET = "hf_a-token-that-only-the-device-should-have"


@contextlib.contextmanager
def started(
    *arguments: str, log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
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


def until(test: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)


@dataclass(frozen=True)
class Fleet:
    """A fleet whose server waits for more devices, so that its port is open and two devices are connected."""

    port: int
    folder: Path
    keys: Path | None
    devices: list[int]

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    @property
    def authority(self) -> Path | None:
        return self.keys / "ca.crt" if self.keys else None

    def connected(self) -> bool:
        logs = [
            self.folder / f"device-{number}" / "network.log" for number in range(1, DEVICES + 1)
        ]
        return all(
            log.is_file() and "connected as device" in log.read_text(errors="replace")
            for log in logs
        )


def ondevice(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ondevice", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def devices(folder: Path, port: int, keys: Path | None) -> Iterator[list[int]]:
    """Two devices, each with a row that nobody else should see, and a secret in its environment."""
    with contextlib.ExitStack() as stack:
        pids = []
        for number in range(1, DEVICES + 1):
            data, link = rows(folder / f"rows-{number}.jsonl"), ["--insecure"]
            if keys:
                link = ["--certificates", str(keys), "--key", str(keys / f"devices/{number}.key")]
            process = stack.enter_context(started(
                sys.executable, "-m", "ondevice", "fleet", "device", "--data", str(data), "--out",
                str(folder / f"device-{number}"), "--host", "localhost", "--port", str(port), *link,
                log=folder / f"device-{number}.log", environment={**os.environ, "HF_TOKEN": SECRET},
            ))  # fmt: skip
            pids.append(process.pid)
        yield pids


@pytest.fixture(scope="module", params=["tls", "insecure"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder, port = tmp_path_factory.mktemp(request.param), free_port()
    keys = folder / "keys" if request.param == "tls" else None
    ondevice("fleet", "begin", "--model", "tiny:llama", "--task", "sst2", "--max-length", 64, "--queries", 2,
             "--out", folder / "server")  # fmt: skip
    if keys:
        ondevice("fleet", "certificates", keys, "--host", "localhost", "--devices", DEVICES + 2)
    link = ["--certificates", str(keys)] if keys else ["--insecure"]
    server = started(
        sys.executable, "-m", "ondevice", "fleet", "server", str(folder / "server"), "--host", "localhost", "--port",
        str(port), "--devices", str(DEVICES + 2), *link, log=folder / "server.log",
    )  # fmt: skip
    with server, devices(folder, port, keys) as pids:
        found = Fleet(port, folder, keys, pids)
        until(found.connected)
        yield found


def test_an_attacker_at_the_port_runs_nothing_on_the_server_and_nothing_on_devices(
    fleet: Fleet, tmp_path: Path
) -> None:
    """All that `flwr run` needs is the fleet's address and, with TLS, the public certificate of its authority."""
    loot = Intruder(tmp_path, fleet.authority).attack(fleet.address)
    assert (loot.servers, loot.devices, loot.replies) == (0, 0, []), loot.said
    assert listens(fleet.port)


def test_a_registered_device_finds_the_fleet_api_and_no_other(fleet: Fleet) -> None:
    """It asks every path of Flower's Control and Runtime APIs, signed as Flower's client signs."""
    key = device_key(fleet, DEVICES + 1)
    others = [path for _, path in PROTOBUF_REQUEST_TYPES if not path.startswith("/v1/fleet/")]
    assert len(others) > 40
    more = ["/docs", "/openapi.json", "/health", "/v1/responses", "/", "/v1/fleet/../control/start-run",
            "/v1/fleet/%2e%2e/control/start-run", "//v1/control/start-run", "/v1/control/start-run/"]  # fmt: skip
    with client(fleet) as http:
        answers = {
            path: http.post(path, headers=signed(key), content=b"").status_code
            for path in [*others, *more]
        }
        answers |= {f"GET {path}": http.get(path, headers=signed(key)).status_code for path in more}
        assert set(answers.values()) == {404}, {
            path: code for path, code in answers.items() if code != 404
        }
        asked = ActivateNodeRequest(public_key=public(key), heartbeat_interval=30)
        if fleet.keys:
            done = http.post(
                "/v1/fleet/activate-node", headers=signed(key), content=asked.SerializeToString()
            )
            assert done.status_code == 200, done.text


def test_a_stranger_with_the_public_certificate_reaches_no_route_at_all(fleet: Fleet) -> None:
    if fleet.keys is None:
        pytest.skip("without TLS anybody may join as a device; the howto says so")
    stranger, known = generate_key_pairs()[0], device_key(fleet, 1)
    heads = {"no key": TYPE, "a key of its own": signed(stranger), "yesterday's signature": signed(known, -86400.0),
             "another's key": {**signed(stranger), "flwr-public-key": signed(known)["flwr-public-key"]}}  # fmt: skip
    with client(fleet) as http:
        for head in heads.values():
            for _, path in PROTOBUF_REQUEST_TYPES:
                assert http.post(path, headers=head, content=b"").status_code in (401, 404)
            join = RegisterNodeFleetRequest(public_key=public(stranger)).SerializeToString()
            assert (
                http.post("/v1/fleet/register-node", headers=head, content=join).status_code == 401
            )


def test_a_server_that_sends_an_app_gets_an_error_from_devices_and_runs_nothing_on_them(
    fleet: Fleet, tmp_path: Path
) -> None:
    """The server itself is hostile: Flower's own SuperLink, with the certificate and keys of the fleet."""
    port, intruder = free_port(), Intruder(tmp_path / "intruder", fleet.authority, DEVICES)
    bin_ = Path(sys.executable).parent
    tls = ["--insecure"]
    if fleet.keys:
        tls = ["--enable-supernode-auth", "--ssl-ca-certfile", str(fleet.keys / "ca.crt"), "--ssl-certfile",
               str(fleet.keys / "server.pem"), "--ssl-keyfile", str(fleet.keys / "server.key")]  # fmt: skip
    superlink = started(
        str(bin_ / "flower-superlink"), "--host", "localhost", "--port", str(port),
        "--disable-runtime-dependency-installation", *tls, log=tmp_path / "superlink.log",
        environment=intruder.environment(),
    )  # fmt: skip
    with superlink:
        until(lambda: listens(port))
        for number in range(1, DEVICES + 1) if fleet.keys else ():
            intruder.flwr(
                f"localhost:{port}",
                "supernode",
                "register",
                f"{fleet.keys}/devices/{number}.pub",
                "fleet",
            )
        with devices(tmp_path, port, fleet.keys):
            loot = intruder.attack(f"localhost:{port}")
    assert loot.servers == 1, loot.said  # the attack itself worked
    assert len(loot.replies) == DEVICES, loot.said  # and reached both devices
    assert loot.devices == 0
    assert "a dull mess" not in str(loot.replies)


def test_the_process_for_the_network_has_no_secret_and_almost_no_rights(fleet: Fleet) -> None:
    for device in fleet.devices:
        (network,) = psutil.Process(device).children()
        environment = network.environ()
        assert SECRET not in environment.values()
        assert "HF_TOKEN" not in environment and "HOME" not in environment
        for pid in (device, network.pid):
            assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()
        limits = {
            name: network.rlimit(getattr(psutil, f"RLIMIT_{name}"))
            for name in ("CORE", "DATA", "FSIZE")
        }
        assert limits["CORE"] == (0, 0)
        assert max(limits["DATA"]) <= DATA_BYTES and max(limits["FSIZE"]) <= FILE_BYTES
        assert network.num_fds() < 64


def test_the_process_for_the_network_ends_with_its_device_even_if_that_is_killed(
    tmp_path: Path,
) -> None:
    """One that stayed would keep the device's place at the server, and answer for nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # never answers
        port = str(server.getsockname()[1])
        device = started(
            sys.executable, "-m", "ondevice", "fleet", "device", "--data", str(rows(tmp_path / "r.jsonl")), "--out",
            str(tmp_path / "device"), "--port", port, "--insecure", log=tmp_path / "device.log",
        )  # fmt: skip
        with device as process:
            until(lambda: len(psutil.Process(process.pid).children()) == 1)
            (network,) = psutil.Process(process.pid).children()
            time.sleep(1)
            assert network.is_running()
            process.kill()
            until(lambda: not network.is_running() or network.status() == psutil.STATUS_ZOMBIE, 30)


@contextlib.contextmanager
def client(fleet: Fleet) -> Iterator[httpx.Client]:
    scheme = "https" if fleet.keys else "http"
    context = ssl.create_default_context(cafile=str(fleet.authority)) if fleet.keys else False
    with httpx.Client(base_url=f"{scheme}://{fleet.address}", verify=context, timeout=60) as http:
        yield http


def device_key(fleet: Fleet, number: int) -> ec.EllipticCurvePrivateKey:
    if fleet.keys is None:
        return generate_key_pairs()[0]
    key = load_ssh_private_key((fleet.keys / f"devices/{number}.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return public_key_to_bytes(key.public_key())


def signed(key: ec.EllipticCurvePrivateKey, seconds: float = 0.0) -> dict[str, str]:
    """The headers that Flower's client signs a request with, at a time so far from now."""
    time_ = (now() + timedelta(seconds=seconds)).isoformat()
    signature = sign_message(key, time_.encode())
    return {**TYPE, "flwr-public-key": b64encode(public(key)).decode(), "flwr-timestamp": time_,
            "flwr-signature": b64encode(signature).decode()}  # fmt: skip
