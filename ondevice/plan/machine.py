"""What this machine has: memory, cores and GPUs, read from the system and the driver."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


@dataclass(frozen=True)
class Gpu:
    """A CUDA device; the memory is None where the driver does not say, as on a Jetson that shares it."""

    name: str
    memory_bytes: int | None
    free_bytes: int | None


def total_bytes() -> int:
    """Physical memory, or this container's limit where that is less."""
    import psutil

    limit, _ = _container()
    return min(psutil.virtual_memory().total, limit or 1 << 62)


def available_bytes() -> int:
    """Memory that a new process can take without swapping, within this container's limit."""
    import psutil

    free = psutil.virtual_memory().available
    limit, used = _container()
    return free if limit is None else max(0, min(free, limit - used))


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[Gpu]:
    """CUDA devices by the driver's library or its tool; empty where neither is there."""
    try:
        return _from_library()
    except Exception:  # the library is absent, or there is no driver behind it
        return _from_tool()


def _from_library() -> list[Gpu]:
    import pynvml

    pynvml.nvmlInit()
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            name = name.decode() if isinstance(name, bytes) else name
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found.append(Gpu(name, int(memory.total), int(memory.free)))
            except pynvml.NVMLError:
                found.append(Gpu(name, None, None))
        return found
    finally:
        pynvml.nvmlShutdown()


def _from_tool() -> list[Gpu]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_tool(done.stdout)


def parse_tool(text: str) -> list[Gpu]:
    """The lines of `nvidia-smi --format=csv,noheader,nounits`: name, total and free MiB."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.rsplit(",", 2)]
        if len(words) == 3:
            total, free = (int(word) << 20 if word.isdigit() else None for word in words[1:])
            found.append(Gpu(words[0], total, free))
    return found


def _container(root: Path = _CGROUP) -> tuple[int | None, int]:
    """The container's memory limit and what counts against it, in bytes; (None, 0) without one.

    File pages that were not used lately count as free, as the kernel drops them first.
    """
    for limit_name, used_name in _LIMITS:
        try:
            limit = int((root / limit_name).read_text())
            used = int((root / used_name).read_text())
            lines = (root / used_name).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        if limit < 1 << 60:
            droppable = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
            return limit, max(0, used - droppable)
    return None, 0
