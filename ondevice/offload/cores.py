"""Give each rank of a host its own cores, near its accelerator, so that memory is on the same node.

Linux gives memory from the node of the thread that touches it first, so what a bound rank fills is
near its cores. A launcher that has bound the ranks already (`torchrun --numa-binding`) is left its
way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

SYSTEM = Path("/sys")


def divide(cores: set[int], gpus: Sequence[str | None], system: Path = SYSTEM) -> list[list[int]]:
    """Return the cores of each rank of a host, in equal parts: of its GPU's node, if that is known.

    Args:
        cores: that all ranks may use.
        gpus: the PCI address of each rank's GPU, such as `0000:17:00.0`; None without a GPU.
    """
    nodes = {
        int(path.name[4:]): cores & _cores(_read(path / "cpulist")) for path in system.glob(_NODES)
    }
    near = [
        _number(_read(system / "bus/pci/devices" / gpu / "numa_node")) if gpu else None
        for gpu in gpus
    ]
    known = len(nodes) > 1 and all(node is not None and nodes.get(node) for node in near)
    homes: list[int | None] = list(near) if known else [None] * len(gpus)
    parts = []
    for rank, home in enumerate(homes):
        there = sorted(
            cores if home is None else nodes[home], key=lambda core: _place(core, system)
        )
        count = homes.count(home)
        at = homes[:rank].count(home)
        parts.append(there[len(there) * at // count : len(there) * (at + 1) // count])
    return parts


def bind(cores: list[int]) -> None:
    """Let all threads of this process run on these cores only; later threads inherit them."""
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), cores)
        except ProcessLookupError:  # it has ended meanwhile
            continue


def pci_address(index: int) -> str | None:
    """Return the PCI address of a CUDA device."""
    import torch

    found = torch.cuda.get_device_properties(index)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return None


_NODES = "devices/system/node/node[0-9]*"


def _place(core: int, system: Path) -> tuple[int, int, int]:
    """Threads of one physical core are neighbours."""
    topology = system / f"devices/system/cpu/cpu{core}/topology"
    return (
        _number(_read(topology / "physical_package_id")) or 0,
        _number(_read(topology / "core_id")) or 0,
        core,
    )


def _cores(text: str) -> set[int]:
    """Numbers of `0-3,8`."""
    ends = [part.split("-") for part in text.split(",") if part]
    return {core for pair in ends for core in range(int(pair[0]), int(pair[-1]) + 1)}


def _number(text: str) -> int | None:
    if text.isdigit():
        return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
