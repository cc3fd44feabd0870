"""Choices that follow the machine: backend, device, kernels and threads.

A run takes them when it begins, and its log has them (`identity`). A resumed run takes the same,
whatever this machine would choose now; what this machine no longer has is chosen again, and said.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import OndeviceError
from ondevice.core.method import has_liger
from ondevice.planning.devices import backend_for, resolve_device
from ondevice.training.identity import PLACEMENT

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.method import Placement

log = logging.getLogger(__name__)
BACKEND = "train.backend"
DEVICE = "model.device"
KERNELS = f"{PLACEMENT}kernels"
THREADS = "threads"
"""Keys of a run's decisions."""
NAMED_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables with which a user names the number of threads."""


def usable(recorded: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return recorded choices without a backend or device that this machine does not have."""
    kept = dict(recorded)
    checks = {
        BACKEND: lambda value: backend_for(config.method, value),
        DEVICE: resolve_device,
    }
    for key, check in checks.items():
        try:
            if key in kept:
                check(kept[key])
        except OndeviceError as error:
            log.warning("this run began with %s %s: %s", key, kept.pop(key), error.message)
    return kept


def machine_choices(config: RunConfig, placement: Placement) -> dict[str, Any]:
    """Return the backend and the device that a run file leaves open, as this run takes them."""
    taken = {}
    if config.train.backend == "auto":
        taken[BACKEND] = placement.backend
    if config.model.device == "auto" and placement.backend == "torch":
        taken[DEVICE] = placement.device
    return taken


def kernels_of(method: Any, placement: Placement, recorded: Mapping[str, Any]) -> str | None:
    """Return the kernels that a method's `auto` takes; None if it leaves nothing open."""
    if getattr(method, "kernels", None) != "auto" or placement.backend != "torch":
        return None
    can_use_liger = has_liger(placement.device)
    taken = recorded.get(KERNELS)
    if taken == "liger" and not can_use_liger:
        log.warning("this run began with liger-kernel, which cannot be used here: torch's kernels")
    elif taken in ("liger", "torch"):
        return taken
    return "liger" if can_use_liger else "torch"


@contextmanager
def threads(placement: Placement, recorded: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Compute with as many threads as the run began with; yield the number for its log.

    A number that the user names stays, and so does this machine's if it has fewer cores.
    """
    if placement.backend != "torch":
        yield {}
        return
    import torch

    before = torch.get_num_threads()
    number = before
    is_named = any(name in os.environ for name in NAMED_THREADS)
    if THREADS in recorded and not is_named and int(recorded[THREADS]) <= cores():
        number = int(recorded[THREADS])
    torch.set_num_threads(number)
    try:
        yield {THREADS: number}
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
