"""In which numbers a run computes, where its method may choose: what this machine is quick at, measured."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.method import Placement

SLOW = 2.0
"""A CPU whose bfloat16 products take so many times as long as float32's has no units for them."""
ROWS, WIDTH = 64, 512


def with_precision(config: RunConfig, placement: Placement) -> tuple[RunConfig, list[str]]:
    """Return the run file with a precision that the machine is quick at, and what is to be said of it.

    A precision that the run file or a flag names stays.
    """
    key, said = placement.spec.precision, list[str]()
    dtype = config.model.dtype
    if key:
        dtype = getattr(config.method, key)
        if dtype == "bfloat16" and placement.device == "cpu" and key not in config.method.model_fields_set:
            ratio = bfloat16_ratio()
            if ratio > SLOW:
                dtype = "float32"
                config = config.model_copy(update={"method": config.method.model_copy(update={key: dtype})})
                said.append(
                    f"this CPU takes {ratio:.0f} times as long in bfloat16: --set method.{key}=bfloat16 asks for it"
                )
    return config, [*placement.precision(dtype), *said]


@cache
def bfloat16_ratio() -> float:
    """Measure how many times as long a product in bfloat16 takes on this CPU as in float32, in some milliseconds."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
        torch.mm(left, right)  # the first call chooses and builds a kernel
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            torch.mm(left, right)
            best = min(best, time.perf_counter() - began)
        return best

    return seconds(torch.bfloat16) / seconds(torch.float32)
