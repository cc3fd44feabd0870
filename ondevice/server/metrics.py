"""Figures of the daemon and of the machine, as JSON and for Prometheus."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ondevice.planning.devices import available_bytes, cores, total_bytes
from ondevice.server.engine.engine import Engine
from ondevice.server.events import Hub
from ondevice.server.queue import Queue
from ondevice.server.store import MissingError
from ondevice.server.supervisor import Supervisor

HWMON = Path("/sys/class/hwmon")
THERMAL = Path("/sys/class/thermal")


def system(root: Path, hwmon: Path = HWMON, thermal: Path = THERMAL) -> dict[str, Any]:
    """Return memory, disk, load, temperatures (degrees Celsius) and power (watts), if known."""
    import psutil

    disk = shutil.disk_usage(root)
    swap = psutil.swap_memory()
    return {
        "time_s": time.time(),
        "cores": cores(),
        "load": os.getloadavg()[0],
        "memory_total_bytes": total_bytes(),
        "memory_available_bytes": available_bytes(),
        "swap_total_bytes": swap.total,
        "swap_used_bytes": swap.used,
        "disk_total_bytes": disk.total,
        "disk_free_bytes": disk.free,
        "temperatures_c": dict(_temperatures(thermal)),
        "power_w": dict(_power(hwmon)),
        "gpus": _gpus(),
    }


def _temperatures(folder: Path) -> Iterator[tuple[str, float]]:
    """Return the temperature of each thermal zone; a Jetson has one for CPU, GPU and junction."""
    for zone in sorted(folder.glob("thermal_zone*")):
        try:
            yield (zone / "type").read_text().strip(), int((zone / "temp").read_text()) / 1000
        except (OSError, ValueError):
            continue


def _power(folder: Path) -> Iterator[tuple[str, float]]:
    """Return the power of each rail, from watts, or volts and amperes (a Jetson's INA3221)."""
    for chip in sorted(folder.glob("hwmon*")):
        for path in sorted(chip.glob("power*_input")):
            if (watts := _number(path)) is not None:
                yield _label(chip, path.name.replace("input", "label"), path.name), watts / 1e6
        for path in sorted(chip.glob("curr*_input")):
            number = path.name[4:-6]
            amperes = _number(path)
            volts = _number(chip / f"in{number}_input")
            if amperes is not None and volts is not None:
                yield _label(chip, f"in{number}_label", f"rail{number}"), amperes * volts / 1e6


def _label(chip: Path, name: str, otherwise: str) -> str:
    try:
        return (chip / name).read_text().strip() or otherwise
    except OSError:
        return otherwise


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _gpus() -> list[dict[str, Any]]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the library or the driver is absent
        return []
    gpus = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            values: dict[str, Any] = {"name": name.decode() if isinstance(name, bytes) else name}
            for key, read in (
                ("memory_used_bytes", lambda h=handle: int(pynvml.nvmlDeviceGetMemoryInfo(h).used)),
                (
                    "memory_total_bytes",
                    lambda h=handle: int(pynvml.nvmlDeviceGetMemoryInfo(h).total),
                ),
                ("temperature_c", lambda h=handle: float(pynvml.nvmlDeviceGetTemperature(h, 0))),
                ("power_w", lambda h=handle: pynvml.nvmlDeviceGetPowerUsage(h) / 1000),
            ):
                try:
                    values[key] = read()
                except pynvml.NVMLError:
                    values[key] = None
            gpus.append(values)
    finally:
        pynvml.nvmlShutdown()
    return gpus


class Metrics:
    """Counters since the daemon started, and figures that are read on request."""

    def __init__(
        self, root: Path, queue: Queue, supervisor: Supervisor, hub: Hub, engine: Engine
    ) -> None:
        self.root = root
        self.queue = queue
        self.supervisor = supervisor
        self.hub = hub
        self.engine = engine
        self.began_s = time.monotonic()
        self.requests: Counter[tuple[str, str, int]] = Counter()

    def request(self, method: str, path: str, status: int) -> None:
        """Count a request with its response."""
        # Only known methods are labels: otherwise a client could make any number of time series.
        label = "other"
        if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
            label = method
        self.requests[label, path, status] += 1

    def to_dict(self) -> dict[str, Any]:
        """GET /v1/metrics."""
        return {
            "uptime_s": time.monotonic() - self.began_s,
            "jobs": self.queue.counts(),
            "event_streams": self.hub.readers,
            "answers": self.engine.figures(),
            "requests": sum(list(self.requests.values())),
            "running": self._running(),
        }

    def _running(self) -> dict[str, Any] | None:
        """Return the figures of the running job; None without one."""
        running = self.supervisor.running
        if running is None:
            return None
        try:
            job = self.queue.get(running.job)
        except MissingError:  # it ended and was deleted meanwhile
            return None
        return {
            "job": job.id,
            "step": int(job.progress.get("step", 0)),
            "steps": int(job.progress.get("steps", 0)),
            "loss": _finite(job.progress.get("loss")),
            "tokens_per_s": _finite(job.progress.get("tokens_per_s")),
            "memory_bytes": running.memory_bytes,
            "peak_memory_bytes": running.peak_bytes,
        }

    def collect(self) -> Iterator[Any]:
        """Yield the figures for the registry of `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self.to_dict()
        machine = system(self.root)
        yield GaugeMetricFamily(
            "ondevice_uptime_seconds", "Since the daemon started.", figures["uptime_s"]
        )
        yield GaugeMetricFamily(
            "ondevice_event_streams", "Open streams of events.", figures["event_streams"]
        )
        jobs = GaugeMetricFamily("ondevice_jobs", "Jobs by state.", labels=["state"])
        for state, count in figures["jobs"].items():
            jobs.add_metric([state], count)
        yield jobs
        answers = GaugeMetricFamily(
            "ondevice_answers", "Requests to the model by state.", labels=["state"]
        )
        for state, count in figures["answers"].items():
            answers.add_metric([state], count)
        yield answers
        requests = CounterMetricFamily(
            "ondevice_requests", "Answered requests.", labels=["method", "path", "status"]
        )
        for (method, path, status), count in list(self.requests.items()):  # others count meanwhile
            requests.add_metric([method, path, str(status)], count)
        yield requests
        running = figures["running"] or {}
        for name, about in (
            ("step", "Steps that the running job has done."),
            ("loss", "Loss of its last step, nats per token."),
            ("tokens_per_s", "Its tokens per second."),
            ("memory_bytes", "Memory that only its processes use."),
        ):
            if running.get(name) is not None:
                yield GaugeMetricFamily(f"ondevice_running_{name}", about, running[name])
        for name in ("memory_available_bytes", "disk_free_bytes", "swap_used_bytes", "load"):
            yield GaugeMetricFamily(
                f"ondevice_machine_{name}", name.replace("_", " "), machine[name]
            )
        for name, unit in (("temperatures_c", "celsius"), ("power_w", "watts")):
            family = GaugeMetricFamily(
                f"ondevice_machine_{unit}", name.replace("_", " "), labels=["sensor"]
            )
            for sensor, value in machine[name].items():
                family.add_metric([sensor], value)
            yield family
        yield from _gpu_families(machine["gpus"])

    def prometheus(self) -> bytes:
        """GET /metrics."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # type: ignore[arg-type]
        return generate_latest(registry)


def _gpu_families(gpus: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield a metric for each figure that some GPU reports."""
    from prometheus_client.core import GaugeMetricFamily

    for key, name, about in (
        ("memory_used_bytes", "memory_used_bytes", "Memory of a GPU that is in use."),
        ("memory_total_bytes", "memory_total_bytes", "Memory of a GPU."),
        ("temperature_c", "celsius", "Temperature of a GPU."),
        ("power_w", "watts", "Power of a GPU."),
    ):
        family = GaugeMetricFamily(f"ondevice_gpu_{name}", about, labels=["gpu", "name"])
        for index, gpu in enumerate(gpus):
            if gpu.get(key) is not None:
                family.add_metric([str(index), gpu["name"]], gpu[key])
        if family.samples:
            yield family


def _finite(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return None
