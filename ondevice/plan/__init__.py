"""Will a run fit, how long does a step take, and does this machine work."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Device": "devices",
    "device_names": "devices",
    "find_device": "devices",
    "Plan": "estimate",
    "plan": "estimate",
    "alternatives": "estimate",
    "ensure_fits": "estimate",
    "render": "render",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
