"""Starts Flower for a fleet: SuperLink and `flwr run` for the server, a SuperNode for a device.

The app that is submitted is two lines that name `ondevice.fleet.apps` and `client`; it names no dependencies, so
Flower runs it in the environment that it was started from.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_write
from ondevice.core.child import python_command
from ondevice.core.errors import ConfigError, FleetError, MissingPackageError
from ondevice.fleet.certificates import CERTIFICATES, DEVICES
from ondevice.fleet.device import DeviceSettings, answering

STOP_S = 15.0
RETRY_S = 3.0
POLL_S = 0.5
APP = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "ondevice-fleet-app"
version = "1.0.0"
description = "A fleet of ondevice"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "ondevice"

[tool.flwr.app.components]
serverapp = "fleetapp.server:server_app"
clientapp = "fleetapp.client:client_app"

[tool.flwr.app.config]
settings = ""
"""
MODULES = {
    "__init__.py": "",
    "server.py": 'from ondevice.fleet.apps import server_app\n\n__all__ = ["server_app"]\n',
    "client.py": 'from ondevice.fleet.client import client_app\n\n__all__ = ["client_app"]\n',
}


REGISTER = """
import sys
from pathlib import Path
from flwr.cli.app import app
for key in sys.argv[1:]:
    app(["supernode", "register", key, "fleet", "--name", Path(key).stem], standalone_mode=False)
"""
"""`flwr supernode register` of each key, in one process: it takes a second to start."""


@dataclass(frozen=True)
class Link:
    """How the two ends reach each other.

    Attributes:
        host, port: of the SuperLink.
        certificates: folder with TLS certificates; None only where `insecure`.
        insecure: without TLS, for one machine or a network that is private otherwise.
    """

    host: str
    port: int
    certificates: Path | None = None
    insecure: bool = False

    def check(self, names: tuple[str, ...]) -> None:
        """Check that there is TLS, or that nobody wants it.

        Raises:
            ConfigError: neither, or a certificate is missing.
        """
        if self.insecure:
            return
        if self.certificates is None:
            raise ConfigError(
                "a fleet's connections are encrypted",
                expected="--certificates DIR, or --insecure on one machine",
                hint="`ondevice fleet certificates DIR --host NAME` makes them",
            )
        for name in names:
            if not (self.certificates / name).is_file():
                raise ConfigError(f"{self.certificates} lacks {name}", expected=", ".join(names))

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.port}"


def command(name: str) -> str:
    """Return the path of one of Flower's commands.

    Raises:
        MissingPackageError: Flower is not installed.
    """
    path = Path(sys.executable).parent / name
    if importlib.util.find_spec("flwr") is None or not path.is_file():
        raise MissingPackageError("flwr is not installed", hint="pip install 'ondevice-train[fleet]'")
    return str(path)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: its files in `home`, our interpreter's commands first, no
    telemetry."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    soon = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}  # of a second, where it looks for a message each second
    return {**soon, **os.environ, "PATH": path, "FLWR_HOME": str(home), **quiet}


@contextmanager
def running(arguments: list[str], home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of Flower's daemons in a process group of its own, which ends with the context."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            arguments, env=environment(home), stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        stop(process)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let a termination end what is inside as Ctrl-C does, so that no daemon of Flower stays behind."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a daemon and what it started."""
    for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def serve(folder: Path, link: Link, settings: dict[str, Any], say: Callable[[str], None] = lambda line: None) -> None:
    """Run a SuperLink and the fleet's rounds, until the last one.

    Args:
        folder: the fleet's.
        settings: see `apps.Server`.
        say: called with each line that the server says.

    Raises:
        FleetError: Flower ended with an error; its log is in the folder.
    """
    link.check(CERTIFICATES)
    folder, home = folder.absolute(), folder.absolute() / "flower"
    arguments = [command("flower-superlink"), "--host", link.host, "--port", str(link.port),
                 "--disable-runtime-dependency-installation"]  # fmt: skip
    connection = f'[superlink]\ndefault = "fleet"\n\n[superlink.fleet]\naddress = {json.dumps(link.address)}\n'
    if link.insecure:
        arguments.append("--insecure")
        connection += "insecure = true\n"
    else:
        files = [str((link.certificates or Path()).absolute() / name) for name in CERTIFICATES]
        arguments.append("--enable-supernode-auth")
        for flag, file in zip(("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"), files):
            arguments += [flag, file]
        connection += f"root-certificates = {json.dumps(files[0])}\n"
    atomic_write(home / "config.toml", connection)
    with (
        stoppable(),
        running(arguments, home, folder / "superlink.log") as superlink,
        tempfile.TemporaryDirectory() as app,
    ):
        _wait_for(link, superlink, folder / "superlink.log")
        if not link.insecure:
            _admit(link, home)
        write_app(Path(app), {**settings, "folder": str(folder)})
        run = subprocess.Popen(
            [command("flwr"), "run", app, "fleet", "--stream"],
            env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        lines: list[str] = []
        try:
            assert run.stdout is not None  # noqa: S101
            for line in run.stdout:
                lines.append(line.rstrip())
                if line.startswith("fleet: "):
                    say(line.rstrip().removeprefix("fleet: "))
        finally:
            atomic_write(folder / "flower-run.log", "\n".join(lines) + "\n")
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGTERM)
            run.wait()
    if run.returncode:
        raise FleetError("Flower could not run the fleet", received="\n".join(lines[-5:]), hint=f"see {folder}/*.log")


def _admit(link: Link, home: Path) -> None:
    """Register the devices whose public keys lie beside the certificates: nobody else may connect."""
    keys = sorted(((link.certificates or Path()) / DEVICES).glob("*.pub"))
    if not keys:
        raise ConfigError(
            f"{link.certificates} has no device's public key", expected=f"{DEVICES}/NAME.pub for each device"
        )
    done = subprocess.run(
        python_command("-c", REGISTER, *(str(key.absolute()) for key in keys)),
        env=environment(home), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    if done.returncode:
        raise FleetError("a device's key cannot be admitted", received=(done.stdout + done.stderr).strip()[-500:])


def write_app(folder: Path, settings: dict[str, Any]) -> None:
    """Write the app that `flwr run` submits."""
    text = APP.replace('settings = ""', f"settings = {json.dumps(json.dumps(settings))}")
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    (folder / "fleetapp").mkdir()
    for name, module in MODULES.items():
        (folder / "fleetapp" / name).write_text(module, encoding="utf-8")


def join(
    settings: DeviceSettings, link: Link, key: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> int:
    """Run a SuperNode for a device until it is stopped; returns its exit status.

    Args:
        key: the device's private key, whose public one the server admits; not needed where the link is insecure.
        say: called with what the device waits for.

    Raises:
        ConfigError: neither a key nor `insecure`.
    """
    link.check(CERTIFICATES[:1])
    if not link.insecure and (key is None or not key.is_file()):
        raise ConfigError("a device proves who it is", expected="--key FILE, its private key", received=key)
    folder = Path(settings.folder).absolute()
    with answering(settings) as file:
        arguments = [command("flower-supernode"), "--superlink", link.address]
        arguments += ["--node-config", f"device={json.dumps(str(file))}"]
        if link.insecure:
            arguments.append("--insecure")
        else:
            arguments += ["--root-certificates", str((link.certificates or Path()).absolute() / CERTIFICATES[0])]
            arguments += ["--auth-supernode-private-key", str((key or Path()).absolute())]
        # A SuperNode ends where no server admits it, which may not have begun: a device waits for its server.
        with stoppable():
            while True:
                while not _listens(link):  # a SuperNode takes seconds to find that out
                    time.sleep(POLL_S)
                with running(
                    [*arguments, "--port", str(free_port())], folder / "flower", folder / "supernode.log"
                ) as supernode:
                    if not supernode.wait():
                        return 0
                say(f"no server at {link.address} admits this device yet; it tries again ({folder}/supernode.log)")
                time.sleep(RETRY_S)


def free_port() -> int:
    """Return a TCP port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _listens(link: Link) -> bool:
    """Return True if somebody listens where the SuperLink is."""
    host = "127.0.0.1" if link.host in ("0.0.0.0", "::") else link.host
    try:
        socket.create_connection((host, link.port), 1).close()
    except OSError:
        return False
    return True


def _wait_for(link: Link, process: subprocess.Popen[bytes], log: Path, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise FleetError("the SuperLink ended at once", received=log.read_text(errors="replace")[-500:])
        if _listens(link):
            return
        time.sleep(0.1)
    raise FleetError(f"the SuperLink does not listen at {link.address}", hint=f"see {log}")
