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
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ondevice.artifact.files import atomic_write
from ondevice.core.capabilities import Offloads
from ondevice.core.errors import OndeviceError
from ondevice.core.process import cache_root
from ondevice.core.registry import method as method_spec
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import IGNORE, Preparing
from ondevice.core.untrusted import read_json
from ondevice.data.batching import ROUND_TO_TOKENS, Batch
from ondevice.models import load_model, tiny_model
from ondevice.planning.devices import cores
from ondevice.training.metrics import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ondevice.core.dims import ModelDims
    from ondevice.core.session import Session

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
            settings = method_spec(method).for_training(method_config(method))
            session = _opened(loaded, settings, ids, ids)
            times = [
                _seconds(functools.partial(session.step, ids, ids, i, 0.0)) for i in range(STEPS)
            ]
            session.close()
    except (OndeviceError, RuntimeError) as error:
        log.debug("the runtime of %s is not measured: %s", method, error)
        return None
    return _record(method, Runtime(resident_bytes(), min(times) / loaded.dims.layers))


def _opened(loaded: Any, method: Any, ids: np.ndarray, labels: np.ndarray) -> Session:
    """Open a session, and prepare its first step with rows of two tokens if its method does so."""
    session = open_session(loaded, method, 0)
    if isinstance(session, Preparing):
        short = Batch(ids[:, -2:], labels[:, -2:])
        with tempfile.TemporaryDirectory() as folder:
            session.before_step(0, lambda step: short, Path(folder))
    return session


def _seconds(function: Callable[[], Any]) -> float:
    """Return the seconds of a call; of one thread its CPU time, which other processes do not
    lengthen."""
    torch = sys.modules.get("torch")
    clock = time.perf_counter
    if torch is not None and torch.get_num_threads() == 1:
        clock = time.thread_time
    start = clock()
    function()
    return clock() - start


MOST_BLOCK_PARAMETERS = 1 << 23
"""Of a block that is measured; a larger one's step is estimated from its operations."""
MOST_TOKENS = 512
"""Of a step that is measured; one with more takes as much longer. So a plan takes neither the
memory nor the time of the run that it is for."""
BLOCKS = 2
"""Blocks of the model that is measured: two kinds of blocks mostly take turns."""
_blocks: dict[tuple[Any, ...], float | None] = {}


def blocks_s(dims: ModelDims, method: Any, rows: int, length_tokens: int) -> float | None:
    """Return the seconds of a float32 step in a model's blocks, from steps of two such blocks.

    The random model has the model's sizes and a small head, and the steps at most MOST_TOKENS. Only
    a process that has torch measures.

    Returns:
        None if it cannot be measured: without torch, of unknown or large blocks, of a method that
        offloads.
    """
    tokens = rows * length_tokens
    length_tokens = min(length_tokens, MOST_TOKENS)
    rows = min(rows, MOST_TOKENS // length_tokens)
    key = (dims, method.model_dump_json(), rows, length_tokens)
    if key not in _blocks:
        known = not dims.whole and dims.block_parameters <= MOST_BLOCK_PARAMETERS
        offloads = method_spec(method.name).capability(Offloads)
        found = None
        if "torch" in sys.modules and known and not offloads:
            found = _measure_blocks(dims, method, rows, length_tokens)
        _blocks[key] = found
    seconds = _blocks[key]
    if seconds is None:
        return None
    return seconds * tokens / (rows * length_tokens)


def _measure_blocks(dims: ModelDims, method: Any, rows: int, length_tokens: int) -> float | None:
    """Run steps of a random model with BLOCKS of the blocks; the median counts, as a step of the run
    is disturbed by other processes, too."""
    import torch

    layers = min(BLOCKS, dims.layers)
    sizes: dict[str, Any] = {
        "hidden": dims.hidden,
        "intermediate": dims.intermediate,
        "heads": dims.heads,
        "kv_heads": dims.kv_heads,
        "max_positions": max(length_tokens, TOKENS),
    }
    if dims.head_dim * dims.heads != dims.hidden:
        sizes["head_dim"] = dims.head_dim
    ids = np.tile(np.arange(length_tokens, dtype=np.int64) % 97, (rows, 1))
    labels = ids.copy()
    labels[:, :-1] = IGNORE
    try:
        with torch.random.fork_rng(devices=[]):
            model = tiny_model(dims.family, layers=layers, **sizes)
            session = _opened(model, method, ids, labels)
            shorter = max(1, length_tokens - ROUND_TO_TOKENS)
            lengths = [length_tokens, shorter]  # as in a run: no step finds memory of its sizes
            steps = [
                functools.partial(session.step, ids[:, -n:], labels[:, -n:], 0, 0.0)
                for n in lengths
            ]
            for step in steps:
                step()  # the first ones make moments and buffers
            times = [[_seconds(step)] for step in steps]
            while len(times[0]) < STEPS and sum(map(sum, times)) < BUDGET_S * STEPS:
                for step, taken in zip(steps, times, strict=True):
                    taken.append(_seconds(step))
            session.close()
    except (OndeviceError, RuntimeError, ValueError) as error:
        log.debug("the blocks of %s are not measured: %s", dims.family, error)
        return None
    seconds = sum(float(np.median(taken)) for taken in times) * length_tokens / sum(lengths)
    return seconds / layers * dims.layers


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


def _record(method: str, measured: Runtime) -> Runtime:
    """Keep the least of what processes measured, as some hold more than a run needs; return this
    process's own, which its run will have around it."""
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
    return measured
