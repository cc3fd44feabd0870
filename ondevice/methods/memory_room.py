"""The memory that `method.recompute: auto` fills with what a backward pass would compute again."""

from __future__ import annotations

from typing import Any

SHARE = 0.85
"""Of the usable memory that is filled: the plan's parts are estimates, and allocators leave gaps."""
AROUND_BYTES = 1 << 30
"""Libraries and their workspaces."""


def room_bytes(request: Any, needed_bytes: int) -> int:
    """Return the memory that is left by a step that keeps nothing, bytes.

    Args:
        request: a plan's request.
        needed_bytes: of weights and step.
    """
    return int(SHARE * request.device.usable_bytes) - AROUND_BYTES - needed_bytes


def item_bytes(dtype: str) -> int:
    """Return the bytes of a number."""
    return 4 if dtype == "float32" else 2
