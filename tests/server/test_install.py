"""The unit, the notifications, the logs, the limits and the figures of a machine."""

from __future__ import annotations

import errno
import io
import logging
import os
import queue
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.errors import (
    BusyError,
    ConfigError,
    DoesNotFitError,
    StorageError,
    TrainingError,
)
from ondevice.server import clock, metrics, service, systemd
from ondevice.server.daemon import Daemon, sweep
from ondevice.server.helper import Helper
from ondevice.server.serve import default_store
from ondevice.server.service import Cgroup, own_bytes
from ondevice.server.store import MIGRATIONS, MissingError, Store
from ondevice.server.worker_process import Running, judge, over_memory
from tests.server.running import DaemonProcess, wait_for


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


def test_one_daemon_a_store(tmp_path) -> None:
    first = Daemon(tmp_path / "store")
    with pytest.raises(BusyError):
        Daemon(tmp_path / "store")
    first.stop()
    Daemon(tmp_path / "store").stop()


def test_what_a_killed_daemon_left_is_swept_up(tmp_path) -> None:
    store = Store(tmp_path / "store")
    for kind in ("datasets", "adapters", "jobs"):
        (store.path(kind, "orphan") / "x").mkdir(parents=True)
    partial = store.path("adapters", "x").with_name(".x.partial-1")
    partial.mkdir()
    old = store.path("uploads", "up-old")
    old.mkdir()
    os.utime(old, (0, 0))
    store.close()
    with DaemonProcess(tmp_path / "store"):
        pass
    assert (
        not list((tmp_path / "store").glob("*/orphan"))
        and not old.exists()
        and not partial.exists()
    )


def test_without_its_database_a_store_loses_nothing(tmp_path, monkeypatch) -> None:
    store = Store(tmp_path / "store")
    store.connection.execute(
        "INSERT INTO datasets VALUES ('data-1', '', 'rows.jsonl', 1, '', '', 12, '[]', 0)"
    )
    for kind, name in (("datasets", "data-1"), ("adapters", "job-1"), ("jobs", "job-1")):
        store.path(kind, name).mkdir()
        (store.path(kind, name) / "content").write_text(name)
    sweep(store)
    assert (store.path("datasets", "data-1") / "content").is_file()
    store.close()
    for path in store.root.glob("ondevice.db*"):
        path.unlink()
    store = Store(tmp_path / "store")
    sweep(store)
    lost = store.root / "lost"
    for kind, name in (("datasets", "data-1"), ("adapters", "job-1"), ("jobs", "job-1")):
        assert (lost / kind / name / "content").read_text() == name and not store.path(
            kind, name
        ).exists()
    began_s = clock.uptime_s()
    monkeypatch.setattr(clock, "uptime_s", lambda: began_s + 29 * 24 * 3600)
    sweep(store)
    assert len(list(lost.glob("*/*"))) == 3
    monkeypatch.setattr(clock, "uptime_s", lambda: began_s + 31 * 24 * 3600)
    sweep(store)
    assert not list(lost.glob("*/*"))
    store.close()


def test_a_store_of_a_newer_version_is_left_alone(tmp_path) -> None:
    store = Store(tmp_path / "store")
    store.connection.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    store.close()
    with pytest.raises(StorageError) as newer:
        Store(tmp_path / "store")
    assert "newer version" in newer.value.message
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "ondevice.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with pytest.raises(StorageError):
        Store(tmp_path / "damaged")


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "/etc", "a\0", "A", "-x", "a..b", "x" * 65, ".hidden", "a\n"]
)
def test_names_of_a_store_are_no_paths(store: Store, name: str) -> None:
    with pytest.raises(MissingError):
        store.path("jobs", name)


def test_connections_of_threads_that_ended_are_closed(store: Store) -> None:
    def burst() -> int:
        """Thirty threads at once, as for requests; gives how many of its files are open after the next thread."""
        together = threading.Barrier(30)

        def ask() -> None:
            store.rows("SELECT 1")
            together.wait(120)
            store.rows("SELECT 1")

        for count in (30, 1):
            together = threading.Barrier(count)
            threads = [threading.Thread(target=ask) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        # The store's files alone: what earlier tests left open may be closed meanwhile.
        return sum(
            os.path.realpath(link).startswith(str(store.root))
            for link in Path("/proc/self/fd").iterdir()
        )

    first = burst()
    assert [burst() for _ in range(4)] == [first] * 4
    assert store.rows("SELECT 1")  # this thread's is open still


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


def test_memory_of_a_family_of_processes() -> None:
    hold = "import time; held = bytearray(b'x' * (80 << 20)); print('held', flush=True); time.sleep(60)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert 80 << 20 < own_bytes(process.pid) < 160 << 20
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    wait_for(lambda: own_bytes(process.pid) == 0, "it is gone")


def test_a_cgroup_where_one_is_delegated(tmp_path) -> None:
    """The files that cgroup v2 has; a kernel with it delegated is not at hand in every place where tests run."""
    home = tmp_path / "system.slice" / "ondevice.service"
    home.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (home / "cgroup.controllers").write_text("memory pids\n")
    (home / "cgroup.subtree_control").write_text("")
    group = Cgroup(tmp_path, "0::/system.slice/ondevice.service\n")
    assert group.how == "cgroup" and (home / "daemon" / "cgroup.procs").read_text() == str(
        os.getpid()
    )
    assert (home / "cgroup.subtree_control").read_text() == "+memory"
    assert group.place(77, "job-1", 1 << 30)
    assert (home / "job-1" / "memory.max").read_text() == str(1 << 30)
    assert (home / "job-1" / "cgroup.procs").read_text() == "77"
    assert not group.killed()
    (home / "job-1" / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert group.killed()
    for own, root in (
        ("1:memory:/x\n", tmp_path),
        ("0::/elsewhere\n", tmp_path),
        ("0::/\n", tmp_path / "none"),
    ):
        other = Cgroup(root, own)
        assert other.how == "watch" and not other.place(77, "job-1", 1 << 30)


@pytest.mark.parametrize(
    ("code", "asked", "told", "outcome"),
    [
        (0, "", None, "finished"),
        (130, "", None, "interrupted"),
        (-15, "paused", None, "interrupted"),
        (-9, "paused", None, "interrupted"),
        (-9, "", None, "crashed"),
        (-11, "", None, "crashed"),
        (1, "", None, "crashed"),
        (2, "", {"error": "ConfigError", "exit_code": 2}, "refused"),
        (9, "", {"error": "TrainingError", "exit_code": 9}, "refused"),
        (7, "", {"error": "BusyError", "exit_code": 7}, "crashed"),
        (11, "", {"error": "StorageError", "exit_code": 11}, "crashed"),
        (8, "", {"error": "DoesNotFitError", "exit_code": 8}, "refused"),
        (8, "", {"error": "DoesNotFitError", "exit_code": 8, "again": True}, "crashed"),
        (1, "", {"error": "ConfigError", "exit_code": 2}, "crashed"),
    ],
)
def test_what_an_exit_status_means(code: int, asked: str, told, outcome: str) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    running = Running("job-1", process, {}, asked=asked)
    actual, error = judge(code, running, told)
    assert actual == outcome and (error is None) == (outcome in ("finished", "interrupted"))
    running.over = over_memory(1 << 30, None)
    actual, error = judge(code, running, told)
    if code == 0:  # all steps are done
        assert (actual, error) == ("finished", None)
    else:
        assert (
            actual == "refused" and error is not None and error["error"] == DoesNotFitError.__name__
        )


def test_temperatures_and_power_as_a_jetson_says_them(tmp_path) -> None:
    zone, chip = tmp_path / "thermal" / "thermal_zone0", tmp_path / "hwmon" / "hwmon1"
    for folder in (
        zone,
        chip,
        tmp_path / "hwmon" / "hwmon2",
        tmp_path / "thermal" / "thermal_zone1",
    ):
        folder.mkdir(parents=True)
    (zone / "type").write_text("tj-thermal\n")
    (zone / "temp").write_text("51250\n")
    for name, text in (("in1_label", "VDD_IN\n"), ("in1_input", "5000\n"), ("curr1_input", "1400\n"),
                       ("curr2_input", "7\n")):  # fmt: skip
        (chip / name).write_text(text)
    (tmp_path / "hwmon" / "hwmon2" / "power1_input").write_text("2500000\n")
    actual = metrics.system(tmp_path, tmp_path / "hwmon", tmp_path / "thermal")
    assert actual["temperatures_c"] == {"tj-thermal": 51.25}
    assert actual["power_w"] == {"VDD_IN": 7.0, "power1_input": 2.5}
    assert (
        actual["memory_total_bytes"] > actual["memory_available_bytes"] > 0
        and actual["disk_free_bytes"] > 0
    )


def test_prometheus_reads_the_metrics(served) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = served.client._send("GET", "/metrics").decode()
    by_name = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert by_name["ondevice_machine_memory_available_bytes"].value > 0
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    states = {
        sample.labels["state"]: sample.value for sample in samples if sample.name == "ondevice_jobs"
    }
    assert states["done"] >= 1 and len(states) == 8
    assert any(
        sample.labels.get("path") == "/v1/jobs/{job}"
        for sample in samples
        if "requests" in sample.name
    )
    figures = served.client.metrics()
    assert figures["jobs"]["done"] == states["done"] and figures["uptime_s"] > 0


def test_prometheus_has_the_gpus(tmp_path, monkeypatch) -> None:
    gpus = [
        {
            "name": "Orin",
            "memory_used_bytes": 5,
            "memory_total_bytes": 9,
            "temperature_c": 51.5,
            "power_w": None,
        },
        {
            "name": "H100",
            "memory_used_bytes": 7,
            "memory_total_bytes": 8,
            "temperature_c": None,
            "power_w": None,
        },
    ]
    monkeypatch.setattr(metrics, "_gpus", lambda: gpus)
    daemon = Daemon(tmp_path / "store")
    daemon.metrics.request("GET", "/v1/jobs", 200)
    text = daemon.metrics.prometheus().decode()
    daemon.stop()
    assert 'ondevice_gpu_memory_used_bytes{gpu="0",name="Orin"} 5.0' in text
    assert 'ondevice_gpu_memory_total_bytes{gpu="1",name="H100"} 8.0' in text
    assert (
        'ondevice_gpu_celsius{gpu="0",name="Orin"} 51.5' in text
        and "ondevice_gpu_watts" not in text
    )


def test_requests_are_counted_while_they_are_read(tmp_path, monkeypatch) -> None:
    from prometheus_client import core

    daemon = Daemon(tmp_path / "store")
    add = core.CounterMetricFamily.add_metric

    def others_count(family: Any, labels: Any, value: float) -> None:
        daemon.metrics.request("GET", "/v1/" + "x" * len(daemon.metrics.requests), 200)
        add(family, labels, value)

    monkeypatch.setattr(core.CounterMetricFamily, "add_metric", others_count)
    for status in (200, 404):
        daemon.metrics.request("GET", "/v1/jobs", status)
    text = daemon.metrics.prometheus().decode()
    daemon.stop()
    assert text.count('path="/v1/jobs"') == 2 and len(daemon.metrics.requests) == 4


def test_a_helper_imports_nothing_from_the_folder_it_is_started_in(tmp_path, monkeypatch) -> None:
    """What lies where the daemon was started, uploads perhaps, must not run as its code."""
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    for name in ("json", "pydantic", "yaml"):
        (tmp_path / f"{name}.py").write_text("open(__file__ + ' ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    helper = Helper("test", timeout_s=120)
    try:
        assert helper("validate", file=str(tmp_path / "rows.jsonl"), task=None)["rows"] == 1
    finally:
        helper.close()
    assert not [*tmp_path.glob("* ran")]


def test_a_helper_that_dies_or_hangs_is_replaced(tmp_path) -> None:
    helper = Helper("test", timeout_s=120, idle_s=0.0)
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    try:
        asked = {"file": str(tmp_path / "rows.jsonl"), "task": None}
        assert helper("validate", **asked)["rows"] == 1
        process = helper._process
        assert process is not None
        answers: list[int] = []
        for _ in range(2):  # the thread that starts it may end, as those of a web server do
            thread = threading.Thread(
                target=lambda: answers.append(helper("validate", **asked)["rows"])
            )
            thread.start()
            thread.join()
            time.sleep(0.2)
            if len(answers) == 1:
                process.kill()
                process.wait()
        assert answers == [1, 1] and helper._process is not None and helper._process.poll() is None
        process = helper._process
        process.kill()
        process.wait()
        assert helper("validate", **asked)["rows"] == 1
        helper.timeout_s = 0.0
        with pytest.raises(TrainingError):
            helper("validate", **asked)
        helper.timeout_s = 120
        assert helper("validate", **asked)["rows"] == 1
        time.sleep(0.01)
        helper.end_if_idle()
        assert helper._process is None
    finally:
        helper.close()


def test_a_full_disk_is_one_line_in_the_log_with_its_count(tmp_path, monkeypatch) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    log = logging.getLogger("a thread")
    seconds = 1000.0
    monkeypatch.setattr(service.time, "monotonic", lambda: seconds)

    def fail(error: Exception) -> None:
        try:
            raise error
        except Exception:
            log.exception("housekeeping failed; trying again")

    try:
        service.start_log(tmp_path)
        for _ in range(100):
            fail(OSError(errno.ENOSPC, "No space left on device"))
        seconds += service.SILENT_S
        fail(OSError(errno.ENOSPC, "No space left on device"))
        fail(ValueError("a bug"))
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
    text = (tmp_path / "ondevice.log").read_text()
    assert text.count("No space left") == 2 and "(99 times more since)" in text
    assert text.count("Traceback") == 1 and "ValueError: a bug" in text


class FullDisk(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_that_a_full_disk_took_are_counted_in_the_log(tmp_path, capsys) -> None:
    log = service.LogFile(tmp_path / "ondevice.log")
    record = logging.LogRecord("x", logging.INFO, "", 0, "a line", (), None)
    log.emit(record)
    log.maxBytes = 0  # no rotation, whose file is another
    stream = log.stream
    log.stream = FullDisk()  # type: ignore[assignment]
    for _ in range(3):
        log.emit(record)
    log.stream = stream
    log.emit(record)
    log.close()
    assert (tmp_path / "ondevice.log").read_text().splitlines() == [
        "a line",
        "a line",
        "3 lines are missing here: the disk was full",
    ]
    assert "Traceback" not in capsys.readouterr().err


def test_a_store_s_error_of_a_full_disk_is_one() -> None:
    def stored(cause: Exception) -> Exception:
        try:
            try:
                raise cause
            except Exception:
                raise StorageError("the store cannot be written") from None
        except StorageError as error:
            return error

    assert service.is_full(stored(sqlite3.OperationalError("database or disk is full")))
    assert service.is_full(stored(OSError(errno.ENOSPC, "No space left on device")))
    assert not service.is_full(stored(sqlite3.OperationalError("database is locked")))
    assert not service.is_full(stored(PermissionError(errno.EACCES, "Permission denied")))
