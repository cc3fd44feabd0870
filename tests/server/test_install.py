"""The unit, the notifications, the place of the store, and the logs."""

from __future__ import annotations

import logging
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ondevice.core.errors import (
    ConfigError,
    StorageError,
)
from ondevice.server import service, systemd
from ondevice.server.serve import default_store
from tests.server.running import DaemonProcess


def test_the_unit_is_one_that_systemd_takes_and_is_hardened(tmp_path) -> None:
    path = systemd.install(systemd.unit(groups=()), tmp_path)
    text = path.read_text()
    command = (
        f"ExecStart={shlex.quote(sys.executable)} -P -m ondevice serve --host 127.0.0.1 --port 8765"
    )
    assert command in text.splitlines() and path.stat().st_mode & 0o777 == 0o644
    for line in ("Type=notify", "WatchdogSec=60", "DynamicUser=yes", "ProtectSystem=strict", "NoNewPrivileges=yes",
                 "LimitNOFILE=65536"):  # fmt: skip
        assert line in text.splitlines()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    verified = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0 and "Unknown" not in verified.stderr, verified.stderr
    security = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--threshold=25",
        "--no-pager",
        str(path),
    ]
    rated = subprocess.run(security, capture_output=True, text=True, check=False)
    assert rated.returncode == 0, rated.stdout[-300:]  # exposure of 2.5 at most


def test_a_unit_with_odd_paths(tmp_path) -> None:
    cert = tmp_path / "50% of $HOME.pem"
    text = systemd.unit("0.0.0.0", 80, cert, cert, offline=True)
    assert "--tls-cert %d/tls-cert --tls-key %d/tls-key" in text and "IPAddressDeny=any" in text
    # A service without root's rights gets its copies from systemd, which reads them as root.
    assert f"LoadCredential=tls-cert:{tmp_path}/50%% of $HOME.pem\nLoadCredential=tls-key:" in text
    with pytest.raises(ConfigError):
        systemd.unit("127.0.0.1\nExecStartPre=/bin/true")
    with pytest.raises(StorageError):
        systemd.install(text, Path("/proc/nowhere"))


def test_systemd_hears_that_it_is_ready_alive_and_stopping(tmp_path) -> None:
    address = tmp_path / "notify.sock"
    said: queue.Queue[str] = queue.Queue()

    def heard(what: str) -> str:
        while what not in (text := said.get(timeout=120)):
            pass
        return text

    def listen() -> (
        None
    ):  # all the time, as systemd does: a socket that nobody reads would hold the daemon up
        while text := listener.recv(4096):
            said.put(text.decode())

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(address))
        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        environment = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "600000"}
        with DaemonProcess(tmp_path / "store", environment=environment) as daemon:
            assert heard("READY=1").startswith("READY=1\nSTATUS=serving on")
            heard("WATCHDOG=1")
            assert daemon.process is not None
            os.kill(
                daemon.process.pid, signal.SIGSTOP
            )  # it hangs: systemd hears nothing and starts it again
            with pytest.raises(queue.Empty):
                for _ in range(50):
                    said.get(timeout=1.5)
            os.kill(daemon.process.pid, signal.SIGCONT)
            daemon.stop()
            heard("STOPPING=1")
        listener.sendto(b"", str(address))  # its end
        listening.join()


def test_without_systemd_nothing_is_said(monkeypatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not service.notify("READY=1")
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert service.watchdog_s() == 3.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert service.watchdog_s() is None
    monkeypatch.setenv("WATCHDOG_USEC", "soon")
    assert service.watchdog_s() is None


def test_where_the_store_is(monkeypatch, tmp_path) -> None:
    for name in ("ONDEVICE_STORE", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_store() == tmp_path / "ondevice"
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/ondevice:/var/lib/other")
    assert default_store() == Path("/var/lib/ondevice")
    monkeypatch.setenv("ONDEVICE_STORE", "/data")
    assert default_store() == Path("/data")


def test_logs_rotate_and_hold_no_token(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(service, "LOG_BYTES", 2000)
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        service.start_log(tmp_path)
        for number in range(300):
            logging.getLogger("x").info(
                "line %d, Authorization: Bearer abc%d, odt_12ab_SECRET-%d", number, number, number
            )
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
    files = list(tmp_path.iterdir())
    assert len(files) == service.LOG_FILES + 1 and all(
        path.stat().st_size <= 2000 for path in files
    )
    text = "".join(path.read_text() for path in files)
    assert "line 299" in text and "SECRET" not in text and "abc" not in text


def test_a_workers_log_is_trimmed(tmp_path) -> None:
    path = tmp_path / "worker.log"
    assert service.tail(path, 10) == ""
    with path.open("ab") as file:
        for number in range(1950):
            file.write(f"line {number}\n".encode())
            file.flush()
            if number % 100 == 99:
                service.trim(path, 3000)
    assert path.stat().st_size < 6000 and (tmp_path / "worker.log.1").stat().st_size < 6000
    assert service.tail(path, 30).splitlines()[-1] == "line 1949"
    assert service.tail(path, 30).splitlines()[0].startswith("line ")
