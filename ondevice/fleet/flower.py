"""Runs the two ends of a fleet over Flower: the server's rounds behind its Fleet API, and a device.

Both run the code that is installed, and nothing else: no app is submitted, sent or started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ondevice.artifact.files import atomic_write, private
from ondevice.core.errors import ConfigError, MissingPackageError
from ondevice.core.process import python_command
from ondevice.fleet.certificates import CERTIFICATES, device_key
from ondevice.fleet.confine import shed
from ondevice.fleet.device import DeviceSettings, answering
from ondevice.fleet.link import Delays, Link, News, NodeSettings
from ondevice.fleet.standing import Standing

STOP_S = 15.0
LOG_BYTES = 1 << 20
OWN_KEY = "device.key"
"""The key that a device without TLS makes for itself: its server knows it again by it."""
MOST_NEWS = 64
"""Bytes of a line of the process for the network."""
SAID = "fleet: "
"""Prefix of a server's messages to its user."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def check_installed() -> None:
    """Check that Flower is there.

    Raises:
        MissingPackageError: it is not.
    """
    if importlib.util.find_spec("flwr") is None:
        raise MissingPackageError(
            "flwr is not installed", hint="pip install 'ondevice-train[fleet]'"
        )


def environment() -> dict[str, str]:
    """Return the environment of a device's process for the network.

    It has what Python and a proxy need, and no secret of the user's.
    """
    proxies = {name for name in os.environ if name.lower() in PROXIES}
    passed_on = {name: os.environ[name] for name in {*PASSED_ON, *proxies} if name in os.environ}
    return {**passed_on, "FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"}


@contextmanager
def stoppable() -> Iterator[None]:
    """Let a termination end the context as Ctrl-C does, so that no process stays behind."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(
    folder: Path,
    link: Link,
    settings: dict[str, Any],
    say: Callable[[str], None] = lambda line: None,
) -> dict[int, dict[str, int]]:
    """Listen for devices and run the fleet's rounds, until the last one; return the rounds that
    failed, with the reasons.

    Args:
        folder: the fleet's.
        settings: see `apps.Server`.
        say: called with each line that the server says.

    Raises:
        ConfigError: a certificate or a device's key is missing.
        FleetError: nobody can listen at the address, or the rounds cannot go on.
    """
    check_installed()
    link.check(CERTIFICATES)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    from ondevice.fleet.apps import run_rounds
    from ondevice.fleet.grid import admit, in_memory, open_grid
    from ondevice.fleet.network import fleet_api, listening, logged

    shed()
    messages = in_memory()
    keys = None
    if not link.insecure:
        keys = admit(messages.state(), link.certificates or Path())
    api = fleet_api(messages, keys)
    with (
        stoppable(),
        logged(folder / "server.log"),
        listening(link, api),
        open_grid(messages.state()) as grid,
        contextlib.redirect_stdout(_Lines(say)),
    ):
        say(f"listening at {link.address}")
        return run_rounds(grid, folder, settings, grid.arrived)


class _Lines(io.TextIOBase):
    """Standard output of the rounds: what they say to the user goes to `say`, without the mark."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.rest = ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            if line.startswith(SAID):
                self.say(line.removeprefix(SAID))
        return len(text)


def join(
    settings: DeviceSettings,
    link: Link,
    key: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Standing:
    """Take part in a fleet until this process is stopped, or the server says that the fleet is
    over.

    The rows and the model stay in this process. Another one, with almost no rights, talks to the
    network (`node`). It connects again whenever the connection is lost.

    Args:
        key: the device's private key, whose public one the server admits; not needed if the link is
            insecure.
        say: called with a line for each outage, and for its end.

    Raises:
        ConfigError: neither a key nor `insecure`.
        FleetError: the fleet is over, and this device did not reply in each of its rounds.
    """
    check_installed()
    link.check(CERTIFICATES[:1])
    if not link.insecure and (key is None or not key.is_file()):
        raise ConfigError(
            "a device must prove its identity", expected="--key FILE, its private key", received=key
        )
    shed()
    folder = Path(settings.folder).absolute()
    if key is None:
        key = _own_key(folder)
    standing = Standing(folder, link.address, say)
    with stoppable(), answering(settings, standing) as file:
        node = NodeSettings(
            address=link.address,
            device=str(file),
            ports=[link.port, *_proxy_ports()],
            authority=None if link.insecure else link.file(CERTIFICATES[0]),
            key=str(key.absolute()),
        )
        command = python_command("-m", "ondevice.fleet.node", node.to_json())
        delays = Delays()
        while not standing.is_over:
            with _running(command, folder / "network.log") as process:
                _listen_to(process, standing, delays)
            if not standing.is_over:
                standing.hear(News.ENDED)
                time.sleep(next(delays))
    say("the fleet is over")
    standing.check()
    return standing


def _own_key(folder: Path) -> Path:
    """Return this device's key file, made at the first start."""
    file = folder / OWN_KEY
    if not file.is_file():
        with private():
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(file, device_key()[0])
    return file


def _listen_to(process: subprocess.Popen[bytes], standing: Standing, delays: Delays) -> None:
    """Take the words of a process for the network, until it ends or the fleet is over.

    It is a stranger's in part: a line that is none of `News` is left out.
    """
    assert process.stdout is not None  # noqa: S101
    while line := process.stdout.readline(MOST_NEWS):
        try:
            news = News(line.decode("ascii", "replace").strip())
        except ValueError:
            continue
        delays.reset()
        standing.hear(news)
        if news is News.REPLIED and standing.is_over:
            return


@contextmanager
def _running(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a group of its own, which ends with the context, or with this process: its
    standard input ends then."""
    with open(log, "ab" if log.is_file() and log.stat().st_size < LOG_BYTES else "wb") as output:
        process = subprocess.Popen(
            arguments, env=environment(), stdout=subprocess.PIPE, stderr=output, stdin=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(STOP_S)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _proxy_ports() -> list[int]:
    """Return the ports of the proxies that the environment names; they stand between a device and
    its server."""
    named = {value for name, value in os.environ.items() if name.lower() in PROXIES[:3]}
    return sorted({port for value in named if (port := urlsplit(value).port)})
