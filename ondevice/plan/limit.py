"""A memory limit that is kept: what would go beyond it fails here, with the plan, before the system ends the process.

On a CPU the kernel counts private writable memory (RLIMIT_DATA). What libraries had mapped without touching it, before
the limit was set, is added to it. On a GPU, PyTorch's allocator has the cap; where CPU and GPU share their memory,
both hold, and what this process takes on the CPU's side is taken from the GPU's. In MLX the limit holds in the plan
alone: its allocator does not look whether memory was refused, and the process would end by a signal. `ondevice serve`
puts a job into a cgroup besides, where it may make one.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ondevice.errors import DoesNotFitError, OndeviceError
from ondevice.plan.estimate import BASELINE_BYTES
from ondevice.plan.fits import parts_text, size_text

if TYPE_CHECKING:
    from ondevice.plan.estimate import Plan

log = logging.getLogger("ondevice.plan")
_REFUSED = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|bad_alloc|can't start new thread", re.IGNORECASE
)
CONTEXT_BYTES = BASELINE_BYTES["torch", "cuda"]
"""What CUDA takes outside PyTorch's allocator."""


@contextmanager
def memory_limit(limit_bytes: int | None, plan: Plan) -> Iterator[None]:
    """Within the block this process takes at most `limit_bytes`; None is no limit. In MLX a warning says that nothing
    holds the run.

    Raises:
        DoesNotFitError: an allocation was refused; says what was planned, part by part.
    """
    if limit_bytes is None:
        yield
        return
    if plan.request.runtime == "mlx":
        log.warning("--memory-limit was held against the plan; nothing holds MLX to it while it runs (a cgroup can)")
        yield
        return
    undo = _limit_data(limit_bytes) if plan.request.device.torch_device == "cpu" or shared() else None
    capped = plan.request.device.torch_device == "cuda" and _cap_gpu(limit_bytes)
    try:
        yield
    except (OndeviceError, MemoryError, RuntimeError, OSError) as told:
        # A method may have said it already, without the plan: what counts is what it was told itself.
        error = told.__cause__ if isinstance(told, DoesNotFitError) else told
        if not isinstance(error, (MemoryError, RuntimeError, OSError)) or not _was_refused(error):
            raise
        raise DoesNotFitError(
            f"an allocation beyond the memory limit was refused; planned: {parts_text(plan.parts, len(plan.parts))}",
            expected=f"at most {size_text(limit_bytes)} (--memory-limit)",
            received=str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__,
            hint="a smaller batch or shorter rows, a higher --memory-limit; the run's last checkpoint is unharmed",
        ) from error
    finally:
        if undo is not None:
            _set_data(*undo)
        if capped:
            _uncap_gpu()


def shared() -> bool:
    """Whether the first GPU has no memory of its own."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    return bool(getattr(torch.cuda.get_device_properties(0), "is_integrated", False))


def _was_refused(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return bool(_REFUSED.search(str(error)))


def _limit_data(limit_bytes: int) -> tuple[int, int] | None:
    """Set the kernel's limit; gives what it was, None where there is none (macOS, Windows)."""
    if not sys.platform.startswith("linux"):
        return None
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    untouched = max(0, _status("VmData") - _status("RssAnon"))
    wanted = limit_bytes + untouched
    if before[1] != resource.RLIM_INFINITY:
        wanted = min(wanted, before[1])
    _set_data(wanted, before[1])
    return before


def _set_data(soft: int, hard: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _status(name: str) -> int:
    """A size in /proc/self/status, bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:")), 0)


def _cap_gpu(limit_bytes: int) -> bool:
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    room = limit_bytes - CONTEXT_BYTES - (_status("RssAnon") if shared() else 0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, room / total)), 0)
    return True


def _uncap_gpu() -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(1.0, 0)
