"""How much memory this process takes: now, and at its highest since a run began.

On Linux the kernel keeps the high-water mark (`VmHWM`) and lets a process reset its own through
`/proc/self/clear_refs`. Elsewhere the mark cannot be reset: it counts once it rises above what it was.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def resident_bytes() -> int:
    """Resident memory of this process now, files it has mapped included."""
    return _status("VmRSS") or _psutil().memory_info().rss


def anonymous_bytes() -> int:
    """Memory that the system cannot drop and read again: RssAnon + VmSwap on Linux (what phones and macOS
    count as the footprint), resident memory elsewhere."""
    anonymous = _status("RssAnon")
    return anonymous + _status("VmSwap") if anonymous else resident_bytes()


def cuda_peak_bytes() -> int | None:
    """Highest memory of CUDA tensors since the last reset; None unless torch is loaded and has used CUDA."""
    cuda = _cuda()
    return None if cuda is None else int(cuda.max_memory_allocated())


class PeakMemory:
    """The highest memory since this object was made.

    `resident_bytes` is exact on Linux. Where the kernel's mark cannot be reset and has not risen, it is the
    highest value at the calls of `resident_bytes`.
    """

    def __init__(self) -> None:
        self._exact = reset_peak()
        self._mark = _high_water_bytes()
        self._sampled = resident_bytes()
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()

    def resident_bytes(self) -> int:
        """Highest resident memory so far."""
        mark = _high_water_bytes()
        if self._exact or mark > self._mark:
            return mark
        self._sampled = max(self._sampled, resident_bytes())
        return self._sampled

    def device_bytes(self) -> int | None:
        """Highest memory of CUDA tensors so far, or None without CUDA."""
        return cuda_peak_bytes()


class AnonymousPeak:
    """Samples `anonymous_bytes` in a thread while open, for benchmarks; the kernel keeps no mark for it.

    Args:
        interval_s: seconds between two samples; a shorter peak may be missed.
    """

    def __init__(self, interval_s: float = 0.005) -> None:
        self.interval_s = interval_s
        self.start_bytes = self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> AnonymousPeak:
        self.start_bytes = self.peak_bytes = anonymous_bytes()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def reset_peak() -> bool:
    """Set the kernel's high-water mark to what is resident now; False where that is not possible."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return _status("VmHWM") > 0


def _high_water_bytes() -> int:
    mark = _status("VmHWM")
    if mark:
        return mark
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes; 0 where there is none."""
    try:
        text = _STATUS.read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _psutil() -> Any:
    import psutil

    return psutil.Process()


def _cuda() -> Any | None:
    """torch.cuda, if something else has loaded and initialised it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda
