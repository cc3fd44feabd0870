"""Devices of plans: a table that users can extend, and this machine, measured.

Memory, cores and GPUs are read from the system and the driver, without torch.
"""

from __future__ import annotations

import difflib
import functools
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError
from ondevice.core.untrusted import read_plain
from ondevice.core.untrusted.yaml_documents import parse_yaml

try:
    import resource
except ImportError:  # Windows
    resource = None

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


@dataclass(frozen=True)
class Gpu:
    """A CUDA device; the memory is None if the driver does not report it, as on a Jetson."""

    name: str
    memory_bytes: int | None
    free_bytes: int | None


def total_bytes() -> int:
    """Return the physical memory, or the limit of this container or process if that is less."""
    import psutil

    limit, _ = _container()
    return min(psutil.virtual_memory().total, limit or 1 << 62, _own_limit())


def available_bytes() -> int:
    """Return the memory that a new process can take without swapping, in this container and
    below this process's own limit."""
    import psutil

    free = min(psutil.virtual_memory().available, _own_limit() - psutil.Process().memory_info().vms)
    limit, used = _container()
    if limit is not None:
        free = min(free, limit - used)
    return max(0, free)


def _own_limit() -> int:
    """Return the address space that this process may have (`ulimit -v`)."""
    if resource is None:
        return 1 << 62
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return 1 << 62
    return soft


def cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[Gpu]:
    """List the CUDA devices that this process may use, by the driver's library or its tool.

    Empty without both, and if CUDA_VISIBLE_DEVICES hides all.
    """
    try:
        listed = _from_library()
    except Exception:  # the library or the driver is missing
        listed = _from_tool()
    return visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(listed: list[Gpu], chosen: str | None) -> list[Gpu]:
    """Return the devices that CUDA shows for a value of CUDA_VISIBLE_DEVICES.

    As CUDA reads it: numbers, up to the first that names no device. Names (`GPU-...`, `MIG-...`) are
    not resolved: they hide none.
    """
    if chosen is None:
        return listed
    found = []
    for word in (word.strip() for word in chosen.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            return listed
        if not word.isdecimal() or int(word) >= len(listed):
            break
        found.append(listed[int(word)])
    return found


def _from_library() -> list[Gpu]:
    import pynvml

    pynvml.nvmlInit()
    try:
        listed = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            if isinstance(name, bytes):
                name = name.decode()
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                listed.append(Gpu(name, int(memory.total), int(memory.free)))
            except pynvml.NVMLError:  # a Jetson shares the CPU's memory, and the driver names none
                listed.append(Gpu(name, None, None))
        return listed
    finally:
        pynvml.nvmlShutdown()


def _from_tool() -> list[Gpu]:
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_tool(done.stdout)


def parse_tool(text: str) -> list[Gpu]:
    """Parse the lines of `nvidia-smi --format=csv,noheader,nounits`: name, total and free MiB."""
    listed = []
    for line in text.splitlines():
        words = [word.strip() for word in line.rsplit(",", 2)]
        if len(words) == 3:
            total, free = (int(word) << 20 if word.isdigit() else None for word in words[1:])
            listed.append(Gpu(words[0], total, free))
    return listed


def _container(root: Path = _CGROUP, own: str | None = None) -> tuple[int | None, int]:
    """Return this container's memory limit and the bytes that count towards it, or (None, 0).

    A limit applies to everything below it, so each cgroup from this process's own up to the root
    counts: systemd and Slurm set it on one in the middle. Inactive file pages count as free,
    because the kernel drops them first.

    Args:
        root: where cgroups are mounted.
        own: the lines of /proc/self/cgroup.
    """
    limits, rooms = [], []
    for limit_path, used_path in _files(root, own):
        try:
            limit, used = int(limit_path.read_text()), int(used_path.read_text())
            lines = used_path.with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        if limit < 1 << 60:  # without a limit, cgroup v1 has a number near 2^63
            inactive = [line.split()[1] for line in lines if line.startswith("inactive_file ")]
            limits.append(limit)
            rooms.append(limit - max(0, used - sum(map(int, inactive))))
    if not limits:
        return None, 0
    return min(limits), min(limits) - min(rooms)


def _files(root: Path, own: str | None) -> Iterator[tuple[Path, Path]]:
    """Yield the limit's and the usage's file of each cgroup of this process, its own first."""
    if own is None:
        try:
            own = Path("/proc/self/cgroup").read_text()
        except OSError:
            own = ""
    names = [line.split(":", 2)[1:] for line in own.splitlines() if line.count(":") >= 2]
    for (limit_name, used_name), controller in zip(_LIMITS, ("", "memory"), strict=True):
        mounted = root / controller
        path = next(
            (name for controllers, name in names if controller in controllers.split(",")), "/"
        )
        # In a container the path may be the host's, which does not exist here; the root does.
        folder = mounted / path.strip("/")
        inside = [
            one
            for one in (folder, *folder.parents)
            if one.is_relative_to(mounted) and ".." not in one.parts
        ]
        for one in inside or [mounted]:
            yield one / limit_name, one / used_name


GIB = 1 << 30
THIS = ("this", "this-cpu", "this-cuda")
"""`this` is the GPU if there is one, as in `model.device: auto`."""
FREE_FRACTION = 0.9
"""The fraction of the memory that is free now that a run on this machine may take."""

Kind = Literal["phone", "board", "gpu", "computer"]


class DeviceEntry(StrictConfig):
    """One device of a table; see the head of `devices.yaml`."""

    description: str = Field(min_length=1)
    """Name and memory, for people."""

    kind: Kind
    """`phone`: one app of several. `board`: CPU and GPU share the memory. `gpu`: its own memory."""

    memory_gib: float = Field(gt=0, le=1 << 20)
    """Physical memory in GiB."""

    usable_fraction: float = Field(gt=0, le=1)
    """How much of it one training process may use."""

    rule: str = Field(min_length=1)
    """Why that fraction."""

    torch_device: Literal["cpu", "cuda"] = "cpu"
    """The device of eager PyTorch on it."""

    bandwidth_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth of its memory, 1e9 bytes a second."""

    bus_gb_s: float | None = Field(default=None, gt=0)
    """Copies between host and accelerator in one direction with pinned memory, 1e9 bytes a second."""

    tflops: dict[Literal["float32", "float16", "bfloat16"], float] = Field(default_factory=dict)
    """Peak of dense matrix products by dtype, 1e12 operations a second."""

    sustained: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the peaks that a real step reaches."""

    gpu_name: str | None = None
    """Text in the driver's name of this GPU."""


@dataclass(frozen=True)
class Device:
    """A device with its memory and rates.

    Attributes:
        memory_bytes: physical memory.
        usable_bytes: memory that one training process may use, by `rule`.
        bus_bytes_s: bytes a second of copies between host and accelerator, in one direction; None
            if not known.
        listed_rates: `flops_s` and `bandwidth_bytes_s` from the table. None for this CPU, whose
            rates are measured on demand, because a run only needs its memory.
        limited: `usable_bytes` is the user's limit.
    """

    name: str
    description: str
    kind: Kind
    memory_bytes: int
    usable_bytes: int
    rule: str
    torch_device: str = "cpu"
    bus_bytes_s: float | None = None
    listed_rates: tuple[dict[str, float], float | None] | None = ({}, None)
    cores: int | None = None
    limited: bool = False

    @property
    def is_this_cpu(self) -> bool:
        """True for the processor of this machine, which is measured."""
        return self.listed_rates is None

    @property
    def flops_s(self) -> dict[str, float]:
        """Operations a second that a step reaches, by dtype; empty if not known."""
        if self.listed_rates is None:
            return {"float32": measured_rates()[0]}
        return self.listed_rates[0]

    @property
    def bandwidth_bytes_s(self) -> float | None:
        """Bytes a second that a step reaches; None if not known."""
        return (self.listed_rates or measured_rates())[1]

    def within(self, limit_bytes: int | None) -> Device:
        """Return this device for a run that may take at most `limit_bytes`."""
        if limit_bytes is None or limit_bytes >= self.usable_bytes:
            return self
        rule = f"--memory-limit, of {self.usable_bytes / GIB:.1f} GiB that could be used"
        return replace(self, usable_bytes=limit_bytes, rule=rule, limited=True)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and rates; bytes and operations a second."""
        fields = {name: value for name, value in self.__dict__.items() if name != "listed_rates"}
        return {
            **fields,
            "bandwidth_bytes_s": self.bandwidth_bytes_s,
            "flops_s": dict(self.flops_s),
        }


def device_table(device_file: Path | str | None = None) -> dict[str, DeviceEntry]:
    """Read the built-in devices and those of `device_file`, which replace built-in ones.

    Raises:
        ConfigError: if the file cannot be read or an entry has an unknown key or a wrong value.
    """
    table = _parse(
        resources.files("ondevice.planning").joinpath("devices.yaml").read_text(), "devices.yaml"
    )
    if device_file is not None:
        path = Path(device_file)
        try:
            text = read_plain(path, 1 << 20).decode("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: the device file cannot be read",
                expected="a YAML file of devices",
                received=str(error),
            ) from None
        table |= _parse(text, str(path))
    return table


def find_device(name: str = "this", device_file: Path | str | None = None) -> Device:
    """Return the device called `name`.

    Args:
        name: a name of the table, `this`, `this-cpu` or `this-cuda`.
        device_file: YAML with more devices.

    Raises:
        ConfigError: the name is unknown; with the list and the nearest name.
    """
    if name in THIS:
        return _this(name, device_file)
    table = device_table(device_file)
    if name not in table:
        names = [*THIS, *table]
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        message = f"unknown device '{name}'"
        if near:
            message += f", did you mean '{near[0]}'?"
        raise ConfigError(
            message,
            expected=", ".join(names),
            received=name,
            hint="describe it in a YAML file and pass --device-file FILE",
        )
    entry = table[name]
    memory = int(entry.memory_gib * GIB)
    return Device(
        name=name,
        description=entry.description,
        kind=entry.kind,
        memory_bytes=memory,
        usable_bytes=int(memory * entry.usable_fraction),
        rule=f"{entry.usable_fraction:.0%} of {entry.memory_gib:g} GiB: {entry.rule}",
        torch_device=entry.torch_device,
        **_rates(entry),
    )


def _parse(text: str, where: str) -> dict[str, DeviceEntry]:
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not YAML", received=str(error)) from None
    if not isinstance(values, dict) or not all(
        isinstance(value, dict) for value in values.values()
    ):
        raise ConfigError(
            f"{where}: expected a device name with its settings",
            expected="NAME: {description: ..., kind: ..., memory_gib: ..., "
            "usable_fraction: ..., rule: ...}",
            received=type(values).__name__,
        )
    return {
        str(name): DeviceEntry.parse(value, f"{where}: {name}") for name, value in values.items()
    }


def _rates(entry: DeviceEntry | None) -> dict[str, Any]:
    if entry is None:
        return {}
    bandwidth = entry.bandwidth_gb_s and entry.bandwidth_gb_s * 1e9 * entry.sustained
    flops = {dtype: rate * 1e12 * entry.sustained for dtype, rate in entry.tflops.items()}
    return {
        "bus_bytes_s": entry.bus_gb_s and entry.bus_gb_s * 1e9,
        "listed_rates": (flops, bandwidth),
    }


def _this(name: str, device_file: Path | str | None) -> Device:
    listed = gpus() if name != "this-cpu" else []
    table = device_table(device_file) if listed or device_file is not None else {}
    if listed:
        return _this_gpu(name, listed[0], table.values())
    if name == "this-cuda":
        raise ConfigError(
            "this machine has no CUDA device that the driver lists",
            expected="an NVIDIA GPU",
            received="none",
            hint="--device this-cpu",
        )
    free = available_bytes()
    count = cores()
    return Device(
        name=name,
        description=f"this machine: {platform.machine()}, {count} cores",
        kind="computer",
        memory_bytes=total_bytes(),
        usable_bytes=int(free * FREE_FRACTION),
        rule=f"{FREE_FRACTION:.0%} of the {free / GIB:.1f} GiB that are free now",
        listed_rates=None,
        cores=count,
    )


def _this_gpu(name: str, gpu: Gpu, entries: Iterable[DeviceEntry]) -> Device:
    entry = next(
        (e for e in entries if e.gpu_name and e.gpu_name.lower() in gpu.name.lower()), None
    )
    kind: Kind = "gpu"
    description = f"this machine: {gpu.name}"
    memory = gpu.memory_bytes
    free = gpu.free_bytes
    if memory is None:
        kind = "board"
        description += ", memory shared with the CPU"
        memory = total_bytes()
    if free is None:
        free = available_bytes()
    return Device(
        name=name,
        description=description,
        kind=kind,
        memory_bytes=memory,
        usable_bytes=int(free * FREE_FRACTION),
        rule=f"{FREE_FRACTION:.0%} of the {free / GIB:.1f} GiB that are free now",
        torch_device="cuda",
        cores=cores(),
        **_rates(entry),
    )


@functools.cache
def measured_rates() -> tuple[float, float]:
    """Measure this CPU: float32 operations a second of a matrix product, and bytes a second read.

    Takes half a second, once a process. The best of several alternating runs counts, because
    other processes disturb them.
    """
    import numpy as np

    size = 512
    a = np.ones((size, size), dtype=np.float32)
    source = np.ones(1 << 23, dtype=np.float32)
    turns = [(_fastest(lambda: a @ a, 0.1), _fastest(lambda: source.max(), 0.05)) for _ in range(3)]
    products, reads = (min(best) for best in zip(*turns))
    return 2 * size**3 / products, source.nbytes / reads


def _fastest(function: Any, budget_s: float) -> float:
    best = float("inf")
    end = time.perf_counter() + budget_s
    while True:
        start = time.perf_counter()
        function()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best
