"""The figures of a machine, and the limits of a job's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from ondevice.server import metrics
from ondevice.server.daemon import Daemon
from ondevice.server.service import Cgroup, own_bytes
from tests.server.running import wait_for


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
