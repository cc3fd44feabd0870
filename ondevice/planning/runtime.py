"""The memory and the time of a training process without its model: measured, and kept for plans.

A process that has torch but no model yet imports what its method needs, and runs a few steps of a
tiny model. The memory that is then resident is the runtime; a step's time, by block, is what its
operations take whatever their sizes. Both are kept in the cache, for processes without torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ondevice.artifact.files import atomic_write
from ondevice.core.capabilities import Offloads
from ondevice.core.errors import OndeviceError
from ondevice.core.registry import method as method_spec
from ondevice.core.registry import method_config, open_session
from ondevice.core.untrusted import read_json
from ondevice.models import load_model
from ondevice.models.sources.cache import cache_root
from ondevice.planning.devices import cores
from ondevice.training.metrics import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("ondevice.planning")
FILE = "runtime.json"
"""In the cache: what was measured, by packages and method."""
MODEL = "tiny:llama"
ROWS, TOKENS, STEPS = 2, 32, 4
BUDGET_S = 0.2
"""Time for a measured product."""
PACKAGES = ("torch", "transformers", "peft", "numpy")
_measured: dict[str, Runtime] = {}


class Runtime(NamedTuple):
    """A process without its model.

    Attributes:
        resident_bytes: memory, libraries included.
        block_s: seconds that the operations of a block take in a step, without their products.
    """

    resident_bytes: int
    block_s: float


def runtime_of(method: str) -> Runtime | None:
    """Return what was measured for a method here or in an earlier process; None if nothing was.

    A process that has torch, and has loaded no model yet, measures it now.
    """
    method = _stand_in(method)
    if method not in _measured:
        found = _recorded().get(_key(method))
        if "torch" in sys.modules and "transformers.modeling_utils" not in sys.modules:
            found = _measure(method) or found
        if found is None:
            return None
        _measured[method] = found
    return _measured[method]


def _stand_in(method: str) -> str:
    """Return a method that takes as much, for one whose engine allocates by the machine's size."""
    return "full" if method_spec(method).capability(Offloads) else method


def _measure(method: str) -> Runtime | None:
    """Run steps of the tiny model; None if the method cannot take it here."""
    import torch

    ids = np.tile(np.arange(TOKENS, dtype=np.int64) % 97, (ROWS, 1))
    try:
        with torch.random.fork_rng(devices=[]):
            loaded = load_model(MODEL)
            session = open_session(loaded, method_config(method), 0)
            times = [
                _seconds(functools.partial(session.step, ids, ids, i, 0.0)) for i in range(STEPS)
            ]
            session.close()
    except (OndeviceError, RuntimeError) as error:
        log.debug("the runtime of %s is not measured: %s", method, error)
        return None
    measured = Runtime(resident_bytes(), min(times) / loaded.dims.layers)
    _record(method, measured)
    return measured


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


MOST_SIDE = 2048


@functools.cache
def product_rate(rows: int, inputs: int, outputs: int) -> float:
    """Return float32 operations a second of [rows, inputs] x [inputs, outputs], measured now.

    Of at most MOST_SIDE rows and columns, which have the rate of more. The median of several
    counts: a step is disturbed by other processes, too.
    """
    rows, inputs, outputs = (min(side, MOST_SIDE) for side in (rows, inputs, outputs))
    left: Any = np.ones((rows, inputs), dtype=np.float32)
    right: Any = np.ones((inputs, outputs), dtype=np.float32)
    if torch := sys.modules.get("torch"):
        left, right = torch.from_numpy(left), torch.from_numpy(right)
    times = []
    end = time.perf_counter() + BUDGET_S
    while len(times) < 3 or time.perf_counter() < end:
        times.append(_seconds(lambda: left @ right))
    return 2 * rows * inputs * outputs / float(np.median(times))


def _key(method: str) -> str:
    """Name a method, and what its runtime depends on."""
    parts = [platform.machine(), f"python {platform.python_version()}", f"{cores()} cores"]
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    return ", ".join([method, *parts])


def _recorded() -> dict[str, Runtime]:
    """Read what earlier processes measured; a damaged file is as none."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        values: Mapping[str, Any] = read_json(cache_root() / FILE)
        return {key: Runtime(int(size), float(seconds)) for key, (size, seconds) in values.items()}
    return {}


def _record(method: str, measured: Runtime) -> None:
    """Keep the least of what processes measured: some hold more than a run needs."""
    key = _key(method)
    every = _recorded()
    if key in every:
        before = every[key]
        size = min(before.resident_bytes, measured.resident_bytes)
        every[key] = Runtime(size, min(before.block_s, measured.block_s))
    else:
        every[key] = measured
    with contextlib.suppress(OndeviceError, OSError):
        cache_root().mkdir(parents=True, exist_ok=True)
        atomic_write(cache_root() / FILE, json.dumps(every, indent=2) + "\n")
