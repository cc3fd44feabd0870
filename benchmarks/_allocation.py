"""How much memory a call holds at most, from the allocator's own record: exact, and the same every time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any], device: str = "cpu") -> int:
    """The most that `call` had allocated at once beyond what was there before it.

    On a CPU every allocation and release of PyTorch's allocator is recorded; on CUDA its own counter is read.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    found: Any = record.profiler
    events = [(e.start_ns(), e.nbytes()) for e in found.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event[0])
    return max(accumulate(size for _, size in events), default=0)
