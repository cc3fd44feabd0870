"""A fleet over Flower: the walk of docs/howto/fleet.md, and what it refuses.

Flower pins other versions of typer, rich and fastapi than the newest, so it may be in an environment beside this one:
`make fleet-test` makes it, and runs these tests there.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import ConfigError
from ondevice.fleet.asking import ask, encoded
from ondevice.fleet.certificates import CERTIFICATES
from ondevice.fleet.device import DeviceSettings, answering
from ondevice.fleet.link import Link
from ondevice.fleet.messages import TaskReply
from ondevice.fleet.privacy import epsilon
from ondevice.fleet.rounds import Rounds
from tests.cli.command import CommandLine, write_rows
from tests.fleet.fleets import charter, open_to_others
from tests.fleet.test_mixed import fleet_of
from tests.fleet.test_simulate import rows
from tests.ports import free_port
from tests.training.test_preferences import pairs

normal = statistics.NormalDist().cdf


def python() -> Path:
    """The interpreter, if it has Flower."""
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("Flower is not installed; try: make fleet-test")
    return Path(sys.executable)


MORE = {"plain": "", "secure": "--set fleet.clip_norm=50 --set fleet.secure=true"}


@dataclass
class Walk:
    """examples/fleet.sh, on its way."""

    folder: Path
    process: subprocess.Popen[bytes]

    def result(self) -> dict[str, Any]:
        """Wait for its end, and return what the server said."""
        code = self.process.wait(timeout=280)
        logs = {
            log.name: log.read_text(errors="replace")[-1500:]
            for log in self.folder.parent.rglob("*.log")
        }
        assert code == 0, logs
        return json.loads((self.folder / "result.json").read_text())


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Walk]]:
    """Both walks at once: each waits for most of its time. TLS, a key for each device, a folder with a space."""
    root, path = (
        Path(__file__).parents[2],
        os.pathsep.join([str(python().parent), os.environ["PATH"]]),
    )
    found = {}
    for name, more in MORE.items():
        home = tmp_path_factory.mktemp(name)
        environment = {
            **os.environ, "PATH": path, "PYTHONPATH": str(root), "OUT": str(home / "a fleet"),
            "PORT": str(free_port()), "ROUNDS": "2", "MORE": more,
        }  # fmt: skip
        with open(home / "walk.log", "wb") as log:
            process = subprocess.Popen(
                ["bash", str(root / "examples/fleet.sh")], env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        found[name] = Walk(home / "a fleet", process)
    yield found
    for walk in found.values():
        if walk.process.poll() is None:
            os.killpg(walk.process.pid, signal.SIGTERM)
            walk.process.wait(timeout=60)


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("kind", MORE)
def test_three_devices_on_one_machine_end_with_one_adapter(
    walks: dict[str, Walk], kind: str
) -> None:
    result = walks[kind].result()
    assert result["hashes_equal"] is True
    assert result["devices"] == 3
    assert result["rounds"] == 2
    assert result["bytes_per_device_round"] <= (12_000 if kind == "secure" else 256)
    for name in ("server", "keys", "device-1", "device-2", "device-3"):
        assert open_to_others(walks[kind].folder / name) == []


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(320)
def test_first_order_devices_rejoin_a_server_that_was_started_again(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    """They learn from preference pairs: the walks have labels."""
    python()
    port, link = str(free_port()), ("--host", "localhost", "--insecure")
    done = ondevice("fleet", "begin", "--model", "tiny:llama", "--set", "train.objective=dpo", "--max-length", 256,
                    "--method", "lora", "--out", tmp_path / "server", "--json")  # fmt: skip
    assert done.code == 0, done.err
    command = [sys.executable, "-m", "ondevice", "fleet"]
    devices = []
    for number in (1, 2):
        data = write_rows(tmp_path / f"r-{number}.jsonl", pairs(4 + number)[number:])
        out = tmp_path / f"device-{number}"
        arguments = [
            "device",
            "--data",
            str(data),
            "--batch-size",
            "2",
            "--out",
            str(out),
            "--port",
            port,
            *link,
        ]
        devices.append(subprocess.Popen([*command, *arguments]))
    try:
        for count in ("1", "2"):
            arguments = [
                "server",
                str(tmp_path / "server"),
                "--rounds",
                count,
                "--devices",
                "2",
                "--port",
                port,
                *link,
            ]
            server = subprocess.run(
                [*command, *arguments, "--json"], capture_output=True, text=True, check=False
            )
            assert server.returncode == 0, server.stderr
            result = json.loads(server.stdout)
            assert (result["rounds"], result["devices"], result["hashes_equal"]) == (
                int(count),
                2,
                True,
            )
    finally:
        for device in devices:
            device.terminate()
            device.wait()
    assert open_to_others(tmp_path / "server") == []
    status = ondevice("fleet", "status", tmp_path / "server", "--json").json
    losses = [each["loss"] for each in status["rounds_table"]]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # the model before training ties pairs
    assert losses[1] < losses[0]


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(320)
def test_flowers_engine_gives_the_hash_of_our_own(ondevice: CommandLine, tmp_path: Path) -> None:
    """Devices in Ray's actors, and in this project's one process: the same of them are away, late or lie, so the
    adapter, what was refused and the curve are the same."""
    python()
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; try: make fleet-test")
    if " " in sys.executable:
        pytest.skip("Ray cannot start a Python whose path has a space")
    wrong = [
        f"--set=simulation.{name}"
        for name in ("dropout=0.2", "late=0.3", "hostile=0.2", "eval_every=1")
    ]
    data = str(rows(tmp_path / "r.jsonl"))
    command = ["fleet", "simulate", "--model", "tiny:llama", "--data", data, "--task", "sst2",
               "--devices", "5", "--rounds", "3", "--batch-size", "2", "--queries", "2", "--dirichlet", "0.5",
               *wrong, "--json", "--out"]  # fmt: skip
    own = ondevice(*command, tmp_path / "own").json
    done = subprocess.run(
        [sys.executable, "-m", "ondevice", *command, str(tmp_path / "flower"), "--engine", "flower"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    flower = json.loads(done.stdout)
    assert own["refused"], "nobody was late"
    for result in (own, flower):  # paths
        del result["log"], result["adapter"]
    assert flower == own
    assert own["hashes_equal"] is True


@pytest.mark.flower
def test_epsilon_is_above_the_exact_one_of_the_gaussian_mechanism_and_near_it() -> None:
    """Answers compose to one Gaussian mechanism, whose delta is known in closed form (Balle and Wang, 2018)."""
    cases = [(20.0, 1), (20.0, 100), (3.0, 10)]
    program = (
        "import json; from ondevice.fleet.privacy import epsilon; "
        f"print(json.dumps([epsilon(noise, answers, 1e-5) for noise, answers in {cases}]))"
    )
    done = subprocess.run(
        [str(python()), "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for (noise, answers), value in zip(cases, json.loads(done.stdout), strict=True):
        m = noise / 2 / math.sqrt(answers)

        def delta(epsilon: float, m: float = m) -> float:
            return normal(1 / (2 * m) - epsilon * m) - math.exp(epsilon) * normal(
                -1 / (2 * m) - epsilon * m
            )

        assert delta(value) <= 1e-5 < delta(0.75 * value)


def test_a_fleet_without_noise_claims_no_privacy() -> None:
    assert epsilon(0.0, 5) == math.inf
    assert epsilon(1.0, 0) == 0.0


def test_connections_are_encrypted_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as unsaid:
        Link("localhost", 1).check(CERTIFICATES)
    assert "--insecure" in str(unsaid.value)
    with pytest.raises(ConfigError) as lacking:
        Link("localhost", 1, tmp_path).check(CERTIFICATES)
    assert "ca.crt" in str(lacking.value)
    Link("localhost", 1, insecure=True).check(CERTIFICATES)


@pytest.mark.flower
def test_certificates_are_for_the_server_and_private_keys_for_their_owner(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    from ondevice.fleet.certificates import make

    files = make(tmp_path / "keys", ("fleet.example", "10.0.0.7"), devices=2)
    assert [file.relative_to(tmp_path / "keys").as_posix() for file in files] == [
        *CERTIFICATES, "devices/1.key", "devices/1.pub", "devices/2.key", "devices/2.pub",
    ]  # fmt: skip
    authority, server = (x509.load_pem_x509_certificate(file.read_bytes()) for file in files[:2])
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fleet.example" in names.get_values_for_type(x509.DNSName)
    assert "10.0.0.7" in map(str, names.get_values_for_type(x509.IPAddress))
    assert all(
        stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files if file.suffix == ".key"
    )
    with pytest.raises(ConfigError):
        make(tmp_path / "keys", ("localhost",), devices=0)


def test_a_device_replies_over_its_socket_and_reports_errors(tmp_path: Path) -> None:
    session, fleet = fleet_of("stateful")
    session.close()
    task = Rounds(fleet).begin([9]).tasks[9].to_bytes()
    settings = DeviceSettings(
        folder=str(tmp_path / "a device"),
        data=str(rows(tmp_path / "r.jsonl")),
        task="sst2",
        model=fleet.model_source,
    )
    with answering(settings) as file:
        assert ask(file, {"task": task}, 9) == {"error": "no_fleet"}
        assert ask(file, {"charter": fleet.to_bytes()}, 9) == {"place": 0}
        first = ask(file, {"events": [], "task": task}, 9)
        assert TaskReply.from_bytes(first["answer"]).device == 9
        assert ask(file, {"events": [], "task": task}, 9) == first
        assert ask(file, {"events": []}, 9)["digest"] == fleet.state().digest()
        assert ask(file, {"charter": charter().to_bytes()}, 9) == {"error": "other_fleet"}
        assert ask(file, {"events": [], "task": task[:20]}, 9) == {"error": "malformed"}
    gone = tmp_path / "gone.json"
    gone.write_text(json.dumps({"socket": str(tmp_path / "nobody")}))
    assert ask(gone, {}, 9) == {"error": "no_process"}


def test_a_device_replies_after_a_process_that_asked_was_killed_while_it_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer then goes to nobody, which must not end the thread that answers."""
    gone = threading.Event()

    def reply(device: object, content: object, number: int) -> dict[str, Any]:
        assert gone.wait(30)
        return {"place": 0}

    monkeypatch.setattr("ondevice.fleet.device.Device.reply", reply)
    with answering(DeviceSettings(folder=str(tmp_path), data="")) as file:
        address = json.loads(file.read_text())["socket"]
        with Client(address, family="AF_UNIX") as asker:
            asker.send_bytes(encoded(9, {}))
        gone.set()
        assert ask(file, {}, 9) == {"place": 0}


def test_systemd_takes_the_unit_of_a_device(root: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (root / "examples/fleet/ondevice-fleet-device.service").read_text()
    unit = tmp_path / "ondevice-fleet-device.service"
    unit.write_text(text.replace("/opt/ondevice/bin/ondevice", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_containers_of_a_fleet_are_not_root_and_publish_the_devices_port_only(root: Path) -> None:
    import yaml

    services = yaml.safe_load((root / "examples/fleet/compose.yaml").read_text())["services"]
    assert {name: service.get("ports", []) for name, service in services.items()} == {
        "server": ["9092:9092"],
        "device": [],
    }
    for service in services.values():
        assert service["user"] == "${FLEET_USER:-1000:1000}"
        assert (service["cap_drop"], service["security_opt"]) == (
            ["ALL"],
            ["no-new-privileges:true"],
        )
        assert service["read_only"] and service["mem_limit"] and service["pids_limit"]
        assert "privileged" not in service and "network_mode" not in service
        private = [volume for volume in service["volumes"] if volume.endswith(".key:ro")]
        assert len(private) == 1, "each has its own key and no other"


def test_the_unit_and_the_compose_file_name_flags_that_exist(root: Path) -> None:
    import yaml
    from typer.main import get_command

    from ondevice.cli.fleet import app

    commands = [service["command"] for service in
                yaml.safe_load((root / "examples/fleet/compose.yaml").read_text())["services"].values()]  # fmt: skip
    unit = (root / "examples/fleet/ondevice-fleet-device.service").read_text().replace("\\\n", " ")
    commands.append(next(line for line in unit.splitlines() if line.startswith("ExecStart=")))
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    for command in commands:
        verb, *flags = command.split("ondevice fleet ", 1)[1].split()
        known = {name for parameter in verbs[verb].params for name in parameter.opts}
        assert {flag for flag in flags if flag.startswith("--")} <= known, command
